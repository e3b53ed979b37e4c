from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from rich.console import Console

from benchmarks import harness
from benchmarks.timing import Candidate, Timing


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> harness.Bench:
    """A bench on the CPU whose clock says 20 us for whatever it times."""

    def clock(calls: Mapping[str, object]) -> dict[str, Timing]:
        return dict.fromkeys(calls, Timing(20.0, 0.01))

    monkeypatch.setattr(harness, "as_graph", Candidate)
    monkeypatch.setattr(harness, "time_interleaved", clock)
    monkeypatch.setattr(harness, "time_host", clock)
    monkeypatch.setattr(harness, "time_graph", lambda call: Timing(20.0, 0.01))
    ceilings = {"read_tb_s": 4.0, "matmul_bf16_tflop_s": 800.0}
    return harness.Bench(torch.device("cpu"), ceilings, ["cublas", "flex"], Console(record=True, width=200))

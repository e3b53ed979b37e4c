"""The benchmark of latent attention on the CPU: its reference, its peer, its work, and a small case."""

from __future__ import annotations

import sys

import pytest
import torch

import evenshare.compat.flashinfer
from benchmarks import harness, mla
from benchmarks.batches import Batch
from benchmarks.peers import relative_error

CPU = torch.device("cpu")


def small(rows: int, heads: int = 4) -> Batch:
    return mla.make_latents(mla.case("small", [33, 16], heads, 16, rows).shape, CPU, torch.float32)


@pytest.mark.parametrize("rows", [1, 3])
def test_reference_is_what_latent_attention_computes(rows: int) -> None:
    batch = small(rows)
    call = mla.run_call(batch, mla.make_plan(batch))
    assert relative_error(call()[batch.sampled_tokens()], batch.reference()) < 1e-5


def test_the_peer_does_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", evenshare.compat.flashinfer)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", evenshare.compat.flashinfer.mla)
    batch = small(2)
    call = mla.peer("flashinfer", batch)
    assert call is not None
    assert relative_error(call()[batch.sampled_tokens()], batch.reference()) < 1e-5
    assert mla.peer("cublas", batch) is None


@pytest.mark.parametrize("heads", [4, 64])
def test_a_case(bench: harness.Bench, heads: int) -> None:
    case = mla.case("small", [40, 7], heads, 16, has_target=True)
    mla.measure(bench, case)
    value, rate, ratio = bench.rows
    assert value.case == f"{heads} heads, page 16, small"
    assert value.bytes == 47 * 576 * 2
    assert value.flops == heads * 47 * 2 * (576 + 512)
    assert (rate.unit, rate.target) == (("TFLOP/s", 600) if heads == 64 else ("TB/s", None))
    assert (ratio.kind, ratio.target) == ("ratio", None if heads == 64 else 0.85)


def test_titles_are_different() -> None:
    titles = [case.title for case in mla.CASES]
    assert len(set(titles)) == len(titles)

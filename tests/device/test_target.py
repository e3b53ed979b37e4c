"""Choice of backend."""

from __future__ import annotations

import pytest
import torch

from evenshare.device import target
from evenshare.device.target import select_target


def test_cpu_tensors_run_on_torch() -> None:
    chosen = select_target("cpu")
    assert (chosen.backend, chosen.num_sms, chosen.interpreted) == ("cpu", 1, False)


def test_triton_on_cpu_tensors_is_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "interpreter_active", lambda: True)
    chosen = select_target(torch.device("cpu"), "triton")
    assert chosen.interpreted
    assert chosen.num_sms == target.INTERPRETER_WORKERS


def test_triton_on_cpu_tensors_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "interpreter_active", lambda: False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        select_target("cpu", "triton")


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="backend: got 'cuda', want one of cpu, triton or None"):
        select_target("cpu", "cuda")
    with pytest.raises(ValueError, match="device: got meta, want a cpu or cuda device"):
        select_target("meta")


def test_the_same_record_every_time() -> None:
    assert select_target("cpu") is select_target(torch.device("cpu"))


@pytest.mark.gpu
def test_cuda_tensors_run_on_triton() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    chosen = select_target("cuda")
    assert chosen.backend == "triton"
    assert chosen.device.index == torch.cuda.current_device()
    assert chosen.num_sms == torch.cuda.get_device_properties(chosen.device).multi_processor_count
    assert not chosen.interpreted
    assert select_target("cuda", "cpu").backend == "cpu"

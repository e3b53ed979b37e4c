"""What ranks compute together, on gloo with 2 and 4 processes, and on NCCL where there is more than one GPU."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.distributed import context_cases, linear_cases, ring_cases
from tests.distributed.spawn import Case, run_cases

CASES: dict[str, Case] = {**linear_cases.CASES, **context_cases.CASES, **ring_cases.CASES}
BY_SIZE: dict[int, dict[str, Case]] = {2: {**CASES, **linear_cases.PAIR_CASES}, 4: CASES}
GPU_CASES: dict[str, Case] = {**CASES, **context_cases.GPU_CASES}


ONE_GPU_CASES: dict[str, Case] = {name: case for name, case in GPU_CASES.items() if "mesh" not in name}


@cache
def results(size: int, device_type: str) -> dict[str, str]:
    """Ranks are started once for each number of them, and run all cases."""
    if device_type == "cuda":
        return run_cases(ONE_GPU_CASES if size == 1 else GPU_CASES, size, device_type)
    return run_cases({name: case for name, case in BY_SIZE[size].items() if not on_gpu_only(name)}, size, device_type)


def on_gpu_only(name: str) -> bool:
    return "portable kernels" in name and torch.cuda.is_available()


def check_on_gloo(size: int, name: str) -> None:
    if on_gpu_only(name):
        pytest.skip("the interpreter is chosen at import, and this machine has a GPU")
    assert not (failure := results(size, "cpu")[name]), failure


@pytest.mark.parametrize("name", BY_SIZE[2])
def test_two_ranks_on_gloo(name: str) -> None:
    check_on_gloo(2, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_SIZE[4])
def test_four_ranks_on_gloo(name: str) -> None:
    check_on_gloo(4, name)


@pytest.mark.gpu
@pytest.mark.timeout(1800)  # the first one runs them all, and kernels are compiled
@pytest.mark.parametrize("name", ONE_GPU_CASES)
def test_on_one_gpu(name: str) -> None:
    """Nothing is sent, but local attention writes into states in place, and plans never sync."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    assert not (failure := results(1, "cuda")[name]), failure


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", GPU_CASES)
def test_on_nccl(name: str) -> None:
    size = 2 if torch.cuda.device_count() < 4 else 4
    if torch.cuda.device_count() < size:
        pytest.skip(f"{torch.cuda.device_count()} GPUs, NCCL wants one for each rank")
    assert not (failure := results(size, "cuda")[name]), failure

"""What ranks compute together, on gloo with 2 and 4 processes, and on NCCL where there is more than one GPU."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.distributed import context_cases, linear_cases, ring_cases
from tests.distributed.spawn import Case, run_cases

CASES: dict[str, Case] = {**linear_cases.CASES, **context_cases.CASES, **ring_cases.CASES}


@cache
def results(size: int, device_type: str) -> dict[str, str]:
    """Ranks are started once for each number of them, and run all cases."""
    return run_cases(CASES, size, device_type)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_on_gloo(size: int, name: str) -> None:
    assert not (failure := results(size, "cpu")[name]), failure


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_nccl(name: str) -> None:
    size = 2 if torch.cuda.device_count() < 4 else 4
    if torch.cuda.device_count() < size:
        pytest.skip(f"{torch.cuda.device_count()} GPUs, NCCL wants one for each rank")
    assert not (failure := results(size, "cuda")[name]), failure

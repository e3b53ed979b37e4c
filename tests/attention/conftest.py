"""Where a test of the public functions runs: torch on the CPU, the kernels in Triton's interpreter, the kernels on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.attention.helpers import Place


def _place(name: str) -> Place:
    if name == "torch":
        return Place(torch.device("cpu"), "cpu", (torch.float32, torch.float16, torch.bfloat16))
    if name == "interpreter":
        if torch.cuda.is_available():
            pytest.skip("the interpreter is chosen at import, and this machine has a GPU")
        # bf16 is wrong in the interpreter.
        return Place(torch.device("cpu"), "triton", (torch.float32, torch.float16))
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return Place(torch.device("cuda"), "triton", (torch.float32, torch.float16, torch.bfloat16))


@pytest.fixture(params=["torch", "interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Place:
    """Every backend in turn."""
    return _place(request.param)


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernel_place(request: pytest.FixtureRequest) -> Place:
    """The portable kernels only."""
    return _place(request.param)

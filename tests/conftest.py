"""One test body runs twice: on CPU tensors through Triton's interpreter, and on a GPU (`-m gpu`)."""

from __future__ import annotations

import os

# Before torch's import: parallel test processes share the cores, and OpenMP threads that spin for one another would stand still.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # chosen at triton's import; the conftest is imported first

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where portable kernels run: "cpu" by the interpreter, "cuda" on the GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is chosen at import, and this machine has a GPU")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

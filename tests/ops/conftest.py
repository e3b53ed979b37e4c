"""Where an operator's test runs: torch on the CPU, the kernels in Triton's interpreter, the kernels on a GPU."""

from __future__ import annotations

import pytest
import torch

BACKENDS = [("cpu", "cpu"), ("cpu", "triton"), pytest.param(("cuda", "triton"), marks=pytest.mark.gpu)]


@pytest.fixture(params=BACKENDS, ids=str)
def place(request: pytest.FixtureRequest) -> tuple[torch.device, str]:
    device, backend = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    if (device, backend) == ("cpu", "triton") and torch.cuda.is_available():
        pytest.skip("the interpreter is chosen at import, and this machine has a GPU")
    return torch.device(device), backend

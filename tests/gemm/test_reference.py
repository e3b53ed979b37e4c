"""The CPU backend."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from evenshare.gemm import matmul, reference
from evenshare.gemm.epilogue import Epilogue
from tests.gemm.helpers import assert_product

ACTIVATIONS = {None: lambda y: y, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("k", [0, 30])
def test_oracle_is_what_torch_computes(activation: str | None, k: int) -> None:
    a, b, bias = (torch.randn(s, dtype=torch.float64) for s in ((5, k), (k, 7), (7,)))
    want = ACTIVATIONS[activation](a @ b + bias)
    torch.testing.assert_close(reference.matmul(a, b, Epilogue(bias, activation)), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16])
def test_cpu_backend(dtype: torch.dtype, activation: str | None, bias_dtype: torch.dtype | None) -> None:
    a, b = torch.randn(2, 9, 60).to(dtype)[:, 2:], torch.randn(24, 60).to(dtype).T
    bias = None if bias_dtype is None else torch.randn(24).to(bias_dtype)
    out = torch.full((2, 7, 48), float("nan"), dtype=dtype)[..., ::2]
    assert matmul(a, b, bias=bias, activation=activation, out=out, backend="cpu") is out
    assert_product(out, a, b, bias, activation)


def test_backend_none_is_the_cpu_on_cpu_tensors() -> None:
    a, b = torch.randn(3, 8), torch.randn(8, 4)
    assert torch.equal(matmul(a, b), torch.mm(a, b))


@pytest.mark.parametrize("shape", [(8,), (2, 3, 8)])
def test_leading_dims(shape: tuple[int, ...]) -> None:
    a, b = torch.randn(shape), torch.randn(8, 4)
    assert_product(matmul(a, b), a, b)

"""The error budget of a product."""

from __future__ import annotations

import math

import torch

from evenshare.gemm import reference
from evenshare.gemm.costs import SHIPPED, CostTable, read_table
from evenshare.gemm.epilogue import Epilogue

H200 = CostTable(*read_table(SHIPPED / "nvidia-h200.json"))  # whatever this machine's user has measured


def assert_product(
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> None:
    """y against the float64 oracle, in maximum and in root mean square: below twice the error of torch's own product plus one
    rounding of the result. float32 sums of a few terms may be exact in torch: 2 eps of the sum of the magnitudes is allowed as
    well, since a product and the partial sums are each rounded by half an eps and an activation has a slope below 1.2."""
    rows = a.reshape(math.prod(a.shape[:-1]), b.shape[0])
    wide_bias = None if bias is None else bias.double()
    want = reference.matmul(rows.double(), b.double(), Epilogue(wide_bias, activation))
    assert y.dtype == a.dtype
    assert y.shape == (*a.shape[:-1], b.shape[1])
    error = y.reshape(want.shape).double() - want
    eps = torch.finfo(a.dtype).eps
    own_error = torch.mm(rows, b).double() - reference.matmul(rows.double(), b.double())
    rounding = eps * want.abs().max()
    most = 2 * own_error.abs().max() + rounding
    mean = 2 * own_error.square().mean().sqrt() + rounding
    if a.dtype == torch.float32:
        magnitudes = rows.double().abs() @ b.double().abs() + want.abs()
        if wide_bias is not None:
            magnitudes += wide_bias.abs()
        most = torch.maximum(most, 2 * eps * magnitudes)
        mean = torch.maximum(mean, 2 * eps * magnitudes.square().mean().sqrt())
    assert (error.abs() <= most).all()
    assert error.square().mean().sqrt() <= mean


def assert_gated(
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor,
    activation: str,
    residual: torch.Tensor,
) -> None:
    """float32 y = activation(gate) up + residual. The sum of each half is known to 2 eps of its magnitudes (`assert_product`), the
    slope of an activation is below 1.2, and the activation, the product and the sum are rounded: 4 eps of each."""
    want = reference.matmul(a.double(), b.double(), Epilogue(bias.double(), activation, residual.double()))
    gate, up = (a.double() @ b.double() + bias.double()).chunk(2, -1)
    spread = (a.double().abs() @ b.double().abs() + bias.double().abs()).chunk(2, -1)
    bound = 2 * (1.2 * spread[0] * up.abs() + gate.abs() * spread[1])
    bound += 4 * (gate.abs() * up.abs() + residual.double().abs() + want.abs())
    assert y.shape == want.shape
    assert ((y.double() - want).abs() <= torch.finfo(torch.float32).eps * bound).all()

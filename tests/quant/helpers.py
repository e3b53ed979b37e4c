"""Random weights of every form, and the error budget of the products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from evenshare.quant import QuantizedWeight, w4a16_matmul, w8a16_matmul
from evenshare.quant.encodings import CODEBOOKS
from evenshare.quant.reference import matmul as reference_matmul

ZERO_FORMS = ("symmetric", "zeros", "offsets")
FORMS = (*ZERO_FORMS, *CODEBOOKS)


def random_weight(
    n: int,
    k: int,
    group_size: int,
    zero_form: str = "symmetric",
    bits: int = 4,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    permutation: torch.Tensor | None = None,
) -> QuantizedWeight:
    """zero_form: one of ZERO_FORMS, or an encoding, which has no zeros."""
    stored_k = k if permutation is None else permutation.numel()
    groups = (n, -(-stored_k // (stored_k if group_size == -1 else group_size)))
    codes = torch.randint(0, 256, (n, stored_k if bits == 8 else (stored_k + 1) // 2), dtype=torch.uint8)
    scales = ((torch.rand(groups) + 0.5) / (1 << bits)).to(dtype)
    zeros = torch.randint(0, 1 << bits, groups, dtype=torch.uint8) if zero_form == "zeros" else None
    offsets = torch.randn(groups).to(dtype) if zero_form == "offsets" else None
    encoding = zero_form if zero_form in CODEBOOKS else "integer"
    return QuantizedWeight(codes, scales, k, group_size, bits, zeros, offsets, encoding, permutation).to(device)


def random_permutation(k: int, padding: int = 0) -> torch.Tensor:
    """int32 [k + padding]: the columns 0..k-1 and `padding` times -1, shuffled."""
    columns = torch.cat((torch.arange(k), torch.full((padding,), -1)))
    return columns[torch.randperm(k + padding)].int()


def product(x: torch.Tensor, weight: QuantizedWeight, **arguments: object) -> torch.Tensor:
    function = w4a16_matmul if weight.bits == 4 else w8a16_matmul
    return function(x, weight, **arguments)  # type: ignore[arg-type]


def assert_product(
    y: torch.Tensor,
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> None:
    """y against the float64 oracle, in maximum and in root mean square. 16 bits: below twice the error of torch's own product in
    the dtype of x, plus one rounding of the result. float32: below sqrt(k) eps / 2 of the sum
    of the magnitudes, the probabilistic bound of a sum of k terms (Higham and Mary, 2019), plus two roundings."""
    rows = x.reshape(-1, weight.k)
    want = reference_matmul(rows, weight, bias, activation)
    error = y.reshape(want.shape).double() - want
    eps = torch.finfo(x.dtype).eps
    if x.dtype == torch.float32:
        magnitudes = rows.double().abs() @ weight.dequantize().double().abs().T
        assert (error.abs() <= eps * (weight.k**0.5 / 2 + 2) * (magnitudes + want.abs())).all()
        return
    torch_own = F.linear(rows, weight.dequantize(x.dtype), None if bias is None else bias.to(x.dtype))
    own_error = torch_own.double() - reference_matmul(rows, weight, bias)
    rounding = eps * want.abs().max()
    assert error.abs().max() <= 2 * own_error.abs().max() + rounding
    assert error.square().mean().sqrt() <= 2 * own_error.square().mean().sqrt() + rounding

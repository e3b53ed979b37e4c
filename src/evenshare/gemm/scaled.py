"""The product of fp8 codes and their scales."""

from __future__ import annotations

import math

import torch

from evenshare.device.checks import check_epilogue, check_is_tensor
from evenshare.device.target import select_target
from evenshare.gemm import reference
from evenshare.gemm.epilogue import Epilogue
from evenshare.gemm.functions import DTYPES, FP8_DTYPES
from evenshare.gemm.scales import make_scales


def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | float = 1.0,
    scale_b: torch.Tensor | float = 1.0,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """y = activation((scale_a a) (scale_b b) + bias) + residual for fp8 a and b, dealt in even shares (Stream-K, arXiv 2301.03598).

    a: float8_e4m3fn or float8_e5m2 [..., k], any strides.
    b: float8_e4m3fn or float8_e5m2 [k, n], any strides (a Linear's weight is passed as `weight.T`, which is the fast layout).
    scale_a: a number; or float32 on the device of a, any strides: of one element, [..., 1], a scale for each row, or
        [..., ceil(k / 128)], one for each 128 numbers of a row.
    scale_b: likewise: of one element, [1, n], a scale for each column, or [ceil(k / 128), ceil(n / 128)], one for each block of
        128 x 128 (scales of a weight's blocks are passed as `weight_scale.T`). Any scale_a goes with any scale_b.
    bias, activation, residual, out: as for `matmul`; out is of out_dtype.
    out_dtype: float32, float16 or bfloat16; None: bfloat16.
    backend: None (by device), "cpu" or "triton".

    Returns [..., n_out] of out_dtype. Sums are float32: Hopper's tensor cores, which keep fewer bits of a sum of fp8 products, hand
    theirs over every 128 of k (arXiv 2412.19437, section 3.3.2). What follows the sum is applied to it, and the result is rounded
    once; it repeats bit for bit. On Hopper, operands whose k is contiguous, in rows of whole 16 bytes, take the kernel that is
    written for it; all others, and other GPUs, take the portable one, which widens codes to float16. Nothing is transposed.

    Raises TypeError for a wrong dtype and ValueError for a wrong shape, device, activation or backend, before any work.

    >>> import torch
    >>> from evenshare.gemm import scaled_matmul
    >>> a, weight = torch.randn(3, 256).to(torch.float8_e4m3fn), torch.randn(64, 256).to(torch.float8_e4m3fn)
    >>> scaled_matmul(a, weight.T, torch.rand(3, 2), torch.rand(2, 1), out_dtype=torch.float32).shape
    torch.Size([3, 64])
    """
    _check_operands(a, b)
    dtype = torch.bfloat16 if out_dtype is None else out_dtype
    if dtype not in DTYPES:
        raise TypeError(f"out_dtype: got {out_dtype}, want float32, float16 or bfloat16")
    n_out = check_epilogue(a, "a", b.shape[1], bias, activation, residual, out, dtype)
    scales = make_scales(a, b, scale_a, scale_b)
    target = select_target(a.device, backend)
    shape = (*a.shape[:-1], n_out)
    rows = a.reshape(math.prod(shape[:-1]), b.shape[0])
    y = out if out is not None and out.ndim == 2 else a.new_empty(rows.shape[0], n_out, dtype=dtype)
    epilogue = Epilogue(bias, activation, None if residual is None else residual.reshape(y.shape))
    if target.backend == "cpu":
        y.copy_(reference.scaled_matmul(rows, b, scales.a, scales.b, epilogue._replace(alpha=scales.factor), dtype))
    elif y.numel():
        from evenshare.gemm import launch

        launch.scaled_matmul(rows, b, scales, epilogue, y, target)
    if out is None:
        return y.view(shape)
    return out if out.ndim == 2 else out.copy_(y.view(shape))


def _check_operands(a: torch.Tensor, b: torch.Tensor) -> None:
    check_is_tensor(a=a, b=b)
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype not in FP8_DTYPES:
            raise TypeError(f"{name}: got {operand.dtype}, want float8_e4m3fn or float8_e5m2")
    if b.ndim != 2:
        raise ValueError(f"b: got shape {tuple(b.shape)}, want [k, n]")
    if a.ndim == 0 or a.shape[-1] != b.shape[0]:
        raise ValueError(f"a: got shape {tuple(a.shape)}, want [..., {b.shape[0]}], the k of b {tuple(b.shape)}")
    if b.device != a.device:
        raise ValueError(f"b: got device {b.device}, want that of a, {a.device}")

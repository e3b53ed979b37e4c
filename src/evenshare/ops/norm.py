"""RMSNorm, the same after adding to a residual, and LayerNorm."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton

from evenshare.device.launcher import Launch, get_launcher
from evenshare.device.target import select_target
from evenshare.ops.kernels import norm as norm_kernels
from evenshare.ops.rows import DTYPES, FP8_DTYPES, check_float, check_like, choose_blocks, fold, shares_memory

MAX_BLOCK_D = 8192  # wider rows are read twice, the second time from L2


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset), over the last dimension (arXiv 1910.07467).

    x: [..., d], float32, float16 or bfloat16; weight: [d] of any of these; any strides. weight_offset: 1 in Gemma's models.
    out: like x, or x itself; with `scale` also float8_e4m3fn or float8_e5m2: codes that times `scale` give the norm.
    scale: a number above 0, or float32 of one element on the device; wanted for such an `out`, and only for it.

    Returns out; sums are fp32, the result is rounded once. Raises ValueError or TypeError naming the argument, before any write.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2))
    tensor([[0.8485, 1.1314]])
    """
    check_float("x", x)
    out, scale = _check_rms(x, weight, scale, out)
    _rms(x, None, weight, eps, weight_offset, scale, out, backend)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """residual += x in place, and return `rms_norm` of that sum, which is rounded for the residual and not for the norm.

    residual: of x's shape, dtype and device, any strides. out may be x. Otherwise as `rms_norm`.

    >>> residual = torch.ones(1, 2)
    >>> add_rms_norm(torch.tensor([[2.0, 3.0]]), residual, torch.ones(2)), residual
    (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    check_float("x", x)
    check_like("residual", residual, "x", x, x.shape)
    out, scale = _check_rms(x, weight, scale, out)
    _rms(x, residual, weight, eps, weight_offset, scale, out, backend)
    return out


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-6,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension (arXiv 1607.06450).

    x: [..., d], float32, float16 or bfloat16; weight, bias: [d] of any of these; any strides. out: like x, or x itself.

    Returns out; sums are fp32, the result is rounded once. Raises ValueError or TypeError naming the argument, before any write.

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.zeros(2), eps=0.0)
    tensor([[-1.,  1.]])
    """
    check_float("x", x)
    for name, vector in (("weight", weight), ("bias", bias)):
        check_like(name, vector, "x", x, x.shape[-1:], DTYPES)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    else:
        check_like("out", out, "x", x, x.shape)
    target = select_target(x.device, backend)
    if x.numel() == 0:
        return out
    if target.backend == "cpu":
        wide = x.float()
        out.copy_(torch.nn.functional.layer_norm(wide, x.shape[-1:], weight.float(), bias.float(), eps))
        return out
    rows, out_rows = fold(x), fold(out)
    launch = _layer_launch(
        x.device,
        tuple(rows.shape),
        rows.stride(),
        weight.stride(),
        bias.stride(),
        out_rows.stride(),
        float(eps),
        target.interpreted,
    )
    launch(rows, weight, bias, out_rows)
    if not shares_memory(out_rows, out):
        out.copy_(out_rows.view(out.shape))
    return out


def _check_rms(
    x: torch.Tensor, weight: torch.Tensor, scale: float | torch.Tensor | None, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, scale as a tensor)."""
    check_like("weight", weight, "x", x, x.shape[-1:], DTYPES)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    else:
        check_like("out", out, "x", x, x.shape, (x.dtype, *(FP8_DTYPES if scale is not None else ())))
    if out.dtype not in FP8_DTYPES:
        if scale is not None:
            raise ValueError(f"scale: got a scale for an out of {out.dtype}, want None, or an out of {FP8_DTYPES[0]}")
        return out, None
    if isinstance(scale, torch.Tensor):
        if scale.dtype != torch.float32 or scale.numel() != 1:
            raise ValueError(f"scale: got {scale.dtype} {tuple(scale.shape)}, want a number or one float32")
        if scale.device != x.device:
            raise ValueError(f"scale: got device {scale.device}, want {x.device}, as x")
        return out, scale
    if not isinstance(scale, int | float):
        raise TypeError(f"scale: got {type(scale).__name__}, want a number or one float32")
    if not scale > 0:
        raise ValueError(f"scale: got {scale}, want a number above 0")
    return out, torch.full((1,), scale, dtype=torch.float32, device=x.device)


def _rms(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    scale: torch.Tensor | None,
    out: torch.Tensor,
    backend: str | None,
) -> None:
    target = select_target(x.device, backend)
    if x.numel() == 0:
        return
    if target.backend == "cpu":
        wide = x.float()
        if residual is not None:
            wide = wide + residual
            residual.copy_(wide)
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.float() + weight_offset)
        if scale is not None:
            largest = torch.finfo(out.dtype).max
            y = (y / scale).clamp_(-largest, largest)
        out.copy_(y)
        return
    rows, out_rows = fold(x), fold(out)
    residual_rows = rows if residual is None else fold(residual)
    fp8_max = 0.0 if scale is None else torch.finfo(out.dtype).max
    launch = _rms_launch(
        x.device, tuple(rows.shape), rows.stride(), residual_rows.stride(), weight.stride(), out_rows.stride(), float(eps),
        float(weight_offset), residual is not None, fp8_max, target.interpreted,
    )  # fmt: skip
    launch(rows, residual_rows, weight, out_rows, weight if scale is None else scale)
    if residual is not None and not shares_memory(residual_rows, residual):
        residual.copy_(residual_rows.view(residual.shape))
    if not shares_memory(out_rows, out):
        out.copy_(out_rows.view(out.shape))


@lru_cache(maxsize=512)
def _rms_launch(
    device: torch.device,
    shape: tuple[int, ...],
    x_strides: tuple[int, ...],
    residual_strides: tuple[int, ...],
    weight_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    eps: float,
    weight_offset: float,
    has_residual: bool,
    fp8_max: float,
    interpreted: bool,
) -> Launch:
    outer, inner, width = shape
    blocks, constants = _constants(width, interpreted)
    launcher = get_launcher(norm_kernels.rms_norm, 5, **constants, HAS_RESIDUAL=has_residual, FP8_MAX=fp8_max)
    static = (outer * inner, inner, eps, weight_offset, *x_strides, *residual_strides, *weight_strides, *out_strides)
    return launcher.bind(device, (triton.cdiv(outer * inner, blocks),), static)


@lru_cache(maxsize=512)
def _layer_launch(
    device: torch.device,
    shape: tuple[int, ...],
    x_strides: tuple[int, ...],
    weight_strides: tuple[int, ...],
    bias_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    eps: float,
    interpreted: bool,
) -> Launch:
    outer, inner, width = shape
    blocks, constants = _constants(width, interpreted)
    launcher = get_launcher(norm_kernels.layer_norm, 4, **constants)
    static = (outer * inner, inner, eps, *x_strides, *weight_strides, *bias_strides, *out_strides)
    return launcher.bind(device, (triton.cdiv(outer * inner, blocks),), static)


def _constants(width: int, interpreted: bool) -> tuple[int, dict[str, Any]]:
    """(rows of a program, constants of the kernel)."""
    blocks = choose_blocks(width, MAX_BLOCK_D, interpreted)
    constants = {"D": width, "BLOCK_M": blocks.rows, "BLOCK_D": blocks.columns, "num_warps": blocks.num_warps}
    return blocks.rows, constants

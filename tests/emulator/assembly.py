"""What the kernels' inline PTX computes, by its text with the spaces normalised: torch tensors in, a tensor or a tuple out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _pack(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Two float32 -> the 16-bit numbers next to them, the first one in the low half of an int32."""
    return lambda low, high: torch.stack((low.to(dtype), high.to(dtype)), -1).view(torch.int32).squeeze(-1)


def _widen_fp8(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int16 pairs of e4m3 codes -> the low ones and the high ones as float16."""
    codes = pairs.contiguous().view(torch.float8_e4m3fn).view(*pairs.shape, 2).to(torch.float16)
    return codes[..., 0], codes[..., 1]


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "cvt.rn.bf16x2.f32 $0, $2, $1;": _pack(torch.bfloat16),
    "cvt.rn.f16x2.f32 $0, $2, $1;": _pack(torch.float16),
    "{ .reg .b32 t; .reg .b16 low, high; prmt.b32 t, $2, 0, 0x3120; mov.b32 {low, high}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }": _widen_fp8,
}

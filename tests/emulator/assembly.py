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


def _signed_codes(dtype: torch.dtype) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """int32 words of eight codes -> code - 8 of the nibbles 0, 4, 1, 5, 2, 6, 3, 7."""
    return lambda words: tuple(((words >> 4 * nibble & 15) - 8).to(dtype) for nibble in (0, 4, 1, 5, 2, 6, 3, 7))


def _signed_codes_text(magic: int, middle: int, kind: str) -> str:
    shifts = " ".join(f"shr.u32 s{i}, $8, {4 * i};" for i in (1, 2, 3))
    picks = " ".join(
        f"lop3.b32 t{i}, {f's{i}' if i else '$8'}, 0x000F000F, 0x{magic:04X}{magic:04X}, 0xEA;" for i in range(4)
    )
    subtractions = " ".join(f"sub.{kind} t{i}, t{i}, c;" for i in range(4))
    moves = " ".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, t{i};" for i in range(4))
    head = f"{{ .reg .b32 t0, t1, t2, t3, s1, s2, s3, c; mov.b32 c, 0x{middle:04X}{middle:04X};"
    return f"{head} {shifts} {picks} {subtractions} {moves} }}"


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "cvt.rn.bf16x2.f32 $0, $2, $1;": _pack(torch.bfloat16),
    "cvt.rn.f16x2.f32 $0, $2, $1;": _pack(torch.float16),
    _signed_codes_text(0x4300, 0x4308, "bf16x2"): _signed_codes(torch.bfloat16),
    _signed_codes_text(0x6400, 0x6408, "f16x2"): _signed_codes(torch.float16),
    "{ .reg .b32 t; .reg .b16 low, high; prmt.b32 t, $2, 0, 0x3120; mov.b32 {low, high}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }": _widen_fp8,
}

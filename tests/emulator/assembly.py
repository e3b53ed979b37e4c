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


def _codes(dtype: torch.dtype, one: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """int32 words of eight codes -> those of the nibbles 0, 4, 1, 5, 2, 6, 3, 7 less what the pairs hold above `one`."""

    def compute(words: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = [pair.expand_as(words).contiguous().view(dtype).view(*words.shape, 2) for pair in (upper, lower)]
        codes = [(words >> 4 * nibble & 15) + one for nibble in (0, 4, 1, 5, 2, 6, 3, 7)]
        return tuple(code.to(dtype) - pairs[i // 2 % 2][..., i % 2] for i, code in enumerate(codes))

    return compute


def _codes_text(magic: int, kind: str) -> str:
    shifts = " ".join(f"shr.u32 s{i}, $8, {4 * i};" for i in (1, 2, 3))
    picks = " ".join(
        f"lop3.b32 t{i}, {f's{i}' if i else '$8'}, 0x000F000F, 0x{magic:04X}{magic:04X}, 0xEA;" for i in range(4)
    )
    subtractions = " ".join(f"sub.{kind} t{i}, t{i}, ${9 + i % 2};" for i in range(4))
    moves = " ".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, t{i};" for i in range(4))
    return f"{{ .reg .b32 t0, t1, t2, t3, s1, s2, s3; {shifts} {picks} {subtractions} {moves} }}"


def _subnormals(words: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """int32 words of eight codes -> those of the nibbles 0, 4, 1, 5, 2, 6, 3, 7 as float16 of these bits, odd ones shifted by 4."""
    codes = [(words >> 4 * nibble & 15) << (4 * (nibble % 2)) for nibble in (0, 4, 1, 5, 2, 6, 3, 7)]
    return tuple(code.to(torch.int16).view(torch.float16) for code in codes)


def _look_up(words: torch.Tensor, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """int32 words of eight codes and a table's low and high bytes, four words of each -> int16 numbers, nibble by nibble."""
    table = torch.stack([entry.flatten()[0] for entry in tables]).view(torch.uint8).to(torch.int32)
    numbers = (table[:16] | table[16:] << 8).to(torch.int16)
    return tuple(numbers[(words >> 4 * nibble & 15).long()] for nibble in range(8))


_PICK = (
    "prmt.b32 a, $9, $10, {l}; prmt.b32 b, $11, $12, {l}; prmt.b32 p, a, b, {c}; "
    "prmt.b32 a, $13, $14, {l}; prmt.b32 b, $15, $16, {l}; prmt.b32 q, a, b, {c}; "
    "prmt.b32 a, p, q, 0x5140; prmt.b32 b, p, q, 0x7362; "
)
_LOOK_UP_TEXT = (
    "{ .reg .b32 l, h, c, d, a, b, p, q; and.b32 l, $8, 0x77777777; shr.u32 c, $8, 1; "
    "lop3.b32 c, c, 0x44444444, 0x32103210, 0xEA; shr.u32 h, l, 16; shr.u32 d, c, 16; "
    + _PICK.format(l="l", c="c")
    + "mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; "
    + _PICK.format(l="h", c="d")
    + "mov.b32 {$4, $5}, a; mov.b32 {$6, $7}, b; }"
)


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "cvt.rn.bf16x2.f32 $0, $2, $1;": _pack(torch.bfloat16),
    "cvt.rn.f16x2.f32 $0, $2, $1;": _pack(torch.float16),
    _codes_text(0x4300, "bf16x2"): _codes(torch.bfloat16, 128),
    _codes_text(0x6400, "f16x2"): _codes(torch.float16, 1024),
    _LOOK_UP_TEXT: _look_up,
    "{ .reg .b32 s, t0, t1, t2, t3; shr.u32 s, $8, 8; and.b32 t0, $8, 0x000F000F; and.b32 t1, $8, 0x00F000F0; "
    "and.b32 t2, s, 0x000F000F; and.b32 t3, s, 0x00F000F0; mov.b32 {$0, $1}, t0; mov.b32 {$2, $3}, t1; "
    "mov.b32 {$4, $5}, t2; mov.b32 {$6, $7}, t3; }": _subnormals,
    "{ .reg .b32 t; .reg .b16 low, high; prmt.b32 t, $2, 0, 0x3120; mov.b32 {low, high}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }": _widen_fp8,
}

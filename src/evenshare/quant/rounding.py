"""Quantisation without data: round to nearest, or with scales and zero points refined to the least squared error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from evenshare.device.checks import check_is_tensor
from evenshare.quant.chunks import for_each_chunk
from evenshare.quant.levels import Form, Levels, nearest_codes
from evenshare.quant.refine import refine_levels
from evenshare.quant.weight import GROUP_SIZES, PER_CHANNEL, SCALE_DTYPES, QuantizedWeight


def quantize(
    weight: torch.Tensor,
    group_size: int = 128,
    *,
    bits: int = 4,
    symmetric: bool = True,
    zero_points: Literal["integer", "float"] = "integer",
    refine: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    progress: Callable[[int, int], None] | None = None,
) -> QuantizedWeight:
    """Quantise `weight` [n, k] (any float dtype) to the nearest codes, group by group along k.

    group_size: 16, 32, 64, 128, 256, k, or -1 for k.
    symmetric: codes are centred, w = (q - 2^(bits-1)) * scale with scale = max|w| / (2^(bits-1) - 1). Otherwise the range of a
        group is cut evenly.
    zero_points: of asymmetric weights. "integer": the range is widened to hold 0 and w = (q - zero) * scale. "float":
        w = q * scale + offset, which fits groups that lie to one side of 0.
    refine: choose scales and zero points that give the least squared error instead of those that cover the range
        (`evenshare.quant.refine`): 0.68 of the squared error for symmetric groups of 128 normal weights, for some ten times
        the work. Scales may become negative. No group is worse than without.
    scale_dtype: float16, bfloat16 or float32, of scales and offsets. Codes are chosen against the rounded ones.
    progress: called with (rows done, n).

    Without `refine` the error is at most half a scale, plus what rounding the scale itself costs at the ends of the range.
    Rows are worked on in chunks: beside the result, memory is bounded.

    Raises TypeError or ValueError for a wrong dtype, shape or group size, and ValueError if a scale overflows `scale_dtype`.
    """
    form = _check(weight, bits, symmetric, zero_points, scale_dtype)
    n, k = weight.shape
    group_size = k if group_size == PER_CHANNEL else group_size
    if group_size not in GROUP_SIZES and group_size != k:
        raise ValueError(f"group_size: got {group_size}, want one of {GROUP_SIZES}, k = {k} or -1")

    num_groups = -(-k // group_size)
    codes = weight.new_empty(n, k if bits == 8 else (k + 1) // 2, dtype=torch.uint8)
    scales = weight.new_empty(n, num_groups, dtype=scale_dtype)
    shifts = weight.new_empty(n, num_groups, dtype=torch.float32)

    def work(chunk: slice) -> None:
        found, levels = _quantize_rows(weight[chunk].detach().float(), group_size, bits, form, scale_dtype, refine)
        codes[chunk], scales[chunk], shifts[chunk] = pack_codes(found, bits), levels.scale, levels.shift

    for_each_chunk(work, weight, progress)
    zeros = shifts.to(torch.uint8) if form is Form.ZEROS else None
    offsets = shifts.to(scale_dtype) if form is Form.OFFSETS else None
    return QuantizedWeight(codes, scales, k, group_size, bits, zeros, offsets)


def _check(weight: torch.Tensor, bits: int, symmetric: bool, zero_points: str, scale_dtype: torch.dtype) -> Form:
    check_is_tensor(weight=weight)
    if not weight.is_floating_point():
        raise TypeError(f"weight: got {weight.dtype}, want a floating-point tensor")
    if weight.ndim != 2 or weight.shape[1] == 0:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, want [n, k] with k at least 1")
    if bits not in (4, 8):
        raise ValueError(f"bits: got {bits}, want 4 or 8")
    if scale_dtype not in SCALE_DTYPES:
        raise TypeError(f"scale_dtype: got {scale_dtype}, want float16, bfloat16 or float32")
    if zero_points not in ("integer", "float"):
        raise ValueError(f"zero_points: got {zero_points!r}, want 'integer' or 'float'")
    if symmetric and zero_points == "float":
        raise ValueError("zero_points: got 'float' of a symmetric weight, want symmetric=False")
    return Form.SYMMETRIC if symmetric else Form.ZEROS if zero_points == "integer" else Form.OFFSETS


def _quantize_rows(
    rows: torch.Tensor, group_size: int, bits: int, form: Form, scale_dtype: torch.dtype, refine: bool
) -> tuple[torch.Tensor, Levels]:
    """Codes uint8 [m, k] and levels [m, num_groups] of float32 rows [m, k]; the last group may be a short one."""
    m, k = rows.shape
    whole = k - k % group_size
    found = []
    for part in (rows[:, :whole].unflatten(1, (-1, group_size)), rows[:, None, whole:]):
        if part.numel() or not m:
            levels = _covering(part, bits, form, scale_dtype)
            if refine and not rows.is_meta:  # there is nothing to fit, and operators on the meta device are slow
                levels = refine_levels(part, levels, bits, form, scale_dtype)
            found.append((nearest_codes(part, levels, bits, form).to(torch.uint8).flatten(1), levels))
    scale, shift = (torch.cat([getattr(levels, name) for _, levels in found], 1) for name in Levels._fields)
    return torch.cat([codes for codes, _ in found], 1), Levels(scale[..., 0], shift[..., 0])


def _covering(values: torch.Tensor, bits: int, form: Form, scale_dtype: torch.dtype) -> Levels:
    """Evenly spaced levels that cover the range of each group [m, num_groups, group_size]."""
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    if form is Form.SYMMETRIC:
        exact = torch.maximum(-low, high) / (middle - 1)
    elif form is Form.ZEROS:
        low, high = low.clamp(max=0), high.clamp(min=0)
        exact = (high - low) / top
    else:
        exact = (high - low) / top
    scale = exact.to(scale_dtype).float()
    shift = torch.full_like(scale, middle)
    if form is Form.ZEROS:
        shift = torch.round(-low / torch.where(scale == 0, 1.0, scale)).clamp(0, top)
    elif form is Form.OFFSETS:
        shift = low.to(scale_dtype).float()
    # Quantising happens once: waiting for a GPU does not matter. Tensors on the meta device have no values.
    if not values.is_meta and not (torch.isfinite(scale) & torch.isfinite(shift)).all():
        raise ValueError(
            f"weight: got a group of range {exact.max().item():g} per code, want finite values that {scale_dtype} can hold"
        )
    return Levels(scale, shift)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Canonical storage of `codes` (uint8 [n, k], one a byte): two a byte for 4 bits, low nibble first; as they are for 8."""
    if bits == 8:
        return codes.contiguous()
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)

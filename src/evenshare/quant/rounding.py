"""Round-to-nearest quantisation."""

from __future__ import annotations

import torch

from evenshare.quant.weight import GROUP_SIZES, PER_CHANNEL, SCALE_DTYPES, QuantizedWeight


def quantize(
    weight: torch.Tensor,
    group_size: int = 128,
    *,
    bits: int = 4,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float16,
) -> QuantizedWeight:
    """Quantise `weight` [n, k] (any float dtype) by rounding to the nearest code, group by group along k.

    group_size: 16, 32, 64, 128, 256, k, or -1 for k.
    symmetric: codes are centred, w = (q - 2^(bits-1)) * scale with scale = max|w| / (2^(bits-1) - 1). Otherwise the range
        of a group, widened to hold 0, is cut evenly and its zero point is an integer code: w = (q - zero) * scale.
    scale_dtype: float16, bfloat16 or float32. Codes are chosen against the rounded scale.

    The error is at most half a scale, plus what rounding the scale itself costs at the ends of the range.

    Raises TypeError or ValueError for a wrong dtype, shape or group size, and ValueError if a scale overflows `scale_dtype`.
    """
    if not weight.is_floating_point():
        raise TypeError(f"weight: got {weight.dtype}, want a floating-point tensor")
    if weight.ndim != 2 or weight.shape[1] == 0:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, want [n, k] with k at least 1")
    if bits not in (4, 8):
        raise ValueError(f"bits: got {bits}, want 4 or 8")
    if scale_dtype not in SCALE_DTYPES:
        raise TypeError(f"scale_dtype: got {scale_dtype}, want float16, bfloat16 or float32")
    n, k = weight.shape
    group_size = k if group_size == PER_CHANNEL else group_size
    if group_size not in GROUP_SIZES and group_size != k:
        raise ValueError(f"group_size: got {group_size}, want one of {GROUP_SIZES}, k = {k} or -1")

    # Zeros pad the last group: they never widen a range that has to hold 0.
    values = torch.nn.functional.pad(weight.float(), (0, -k % group_size)).view(n, -(-k // group_size), group_size)
    top = (1 << bits) - 1
    middle = 1 << (bits - 1)
    if symmetric:
        exact = values.abs().amax(-1) / (middle - 1)
    else:
        low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
        exact = (high - low) / top
    scales = exact.to(scale_dtype)
    if not torch.isfinite(scales).all():  # on a GPU this waits: quantising happens once
        raise ValueError(
            f"weight: got a group of range {exact.max().item():g} per code, want finite values that {scale_dtype} can hold"
        )
    step = scales.float()[..., None]
    step = torch.where(step == 0, 1.0, step)  # a group of zeros: every code is the zero point
    if symmetric:
        zeros = None
        codes = torch.round(values / step) + middle
    else:
        zero_point = torch.round(-low[..., None] / step).clamp(0, top)
        codes = torch.round(values / step) + zero_point
        zeros = zero_point[..., 0].to(torch.uint8)
    codes = codes.clamp(0, top).to(torch.uint8).flatten(1)[:, :k]
    return QuantizedWeight(pack_codes(codes, bits), scales, k, group_size, bits, zeros)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Canonical storage of `codes` (uint8 [n, k], one a byte): two a byte for 4 bits, low nibble first; as they are for 8."""
    if bits == 8:
        return codes.contiguous()
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)

"""HQQ (half-quadratic quantisation), 4 and 8 bits, groups along k (axis = 1).

    W_q          uint8 [r / 2, group_size], 8 bits: [r, group_size]    r = n * k / group_size rows, one per group of W
    scale, zero  float [r, 1]                                          (q - zero) * scale, zero a float
    shape        int64 [2]                                             n, k
    axis         int32                                                 1; groups along n (0) are none of a row's

4 bits: row i lies in the high nibbles of byte row i, row i + r / 2 in the low ones. The other settings of HQQLinear are stored as
tensors as well: they are written, and not looked at when read.

Zero points that are all integers stay integers. Others become offsets -zero * scale in float32, which is exact for 16-bit scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evenshare.quant.formats.format import Config, Format, Tensors, check, one_of_all
from evenshare.quant.formats.words import integer_zeros
from evenshare.quant.rounding import pack_codes
from evenshare.quant.weight import SCALE_DTYPES, QuantizedWeight


def _unpack(tensors: Tensors, config: Config) -> QuantizedWeight:
    W_q, scale, zero = tensors["W_q"], tensors["scale"], tensors["zero"]
    axis, bits = int(tensors["axis"]), int(tensors["nbits"])
    n, k = (int(size) for size in tensors["shape"])
    if axis != 1:
        raise ValueError(
            f"axis: got {axis}, want 1: with 0 a group's scale is shared by rows, not by neighbouring columns"
        )
    if bits not in (4, 8):
        raise ValueError(f"nbits: got {bits}, want 4 or 8")
    W_q = W_q.view(torch.uint8)  # view_as_float stores the same bytes under another dtype
    rows = W_q.shape[0] * 8 // bits
    if W_q.ndim != 2 or rows * W_q.shape[1] != n * k:
        raise ValueError(f"W_q: got shape {tuple(W_q.shape)} of bytes, want {n} x {k} codes of {bits} bits")
    check("scale", scale, SCALE_DTYPES, rows, 1)
    check("zero", zero, SCALE_DTYPES, rows, 1)
    group_size = W_q.shape[1]
    codes = torch.cat((W_q >> 4, W_q & 15)) if bits == 4 else W_q
    codes = pack_codes(codes.reshape(n, k), bits)
    scales, floats = scale.view(n, -1), zero.view(n, -1).float()
    zeros = floats.clamp(0, (1 << bits) - 1).to(torch.uint8)
    if torch.equal(zeros.float(), floats):
        return QuantizedWeight(codes, scales.contiguous(), k, group_size, bits, zeros)
    scales = scales.float()
    # A group of scale 0 is 0 whatever its zero point, even if that is infinite.
    offsets = torch.where(scales == 0, 0.0, -(floats * scales))
    return QuantizedWeight(codes, scales, k, group_size, bits, offsets=offsets)


def _float_zeros(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, zero) [n, num_groups], in 16 bits if that is exact, so that HQQ's kernels can take them as they are."""
    if weight.offsets is None:
        return weight.scales, integer_zeros(weight).to(weight.scales.dtype)
    scales, offsets = weight.scales.float(), weight.offsets.float()
    zeros = torch.where(scales == 0, 0.0, -offsets / scales)
    halves = scales.half(), zeros.half()
    exact = torch.equal(halves[0].float(), scales) and torch.equal(halves[1].float(), zeros)
    return halves if exact else (scales, zeros)


def _refusal(weight: QuantizedWeight) -> str | None:
    if weight.encoding != "integer":
        return f"its codes are {weight.encoding}, not integers"
    if weight.permutation is not None:
        return "it has a permutation (act-order), and groups lie side by side"
    if weight.k % weight.group_size:
        return f"its groups of {weight.group_size} do not cut its {weight.k} columns evenly"
    if weight.bits == 4 and weight.n * weight.num_groups % 2:
        return f"its {weight.n * weight.num_groups} groups are an odd number, and two share a row of bytes"
    if weight.offsets is not None and not weight.offsets.is_meta:
        scales, zeros = (part.float() for part in _float_zeros(weight))
        if not torch.equal(-(zeros * scales), weight.offsets.float()):
            return "its offsets are not all a float zero point times the scale, rounded once"
        if torch.equal(zeros, zeros.round().clamp(0, (1 << weight.bits) - 1)):
            return "its offsets are integer zero points, and would be read as such"
    return None


def _pack(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    scale, zero = (part.reshape(-1, 1).contiguous() for part in _float_zeros(weight))
    rows = weight.unpacked_codes().reshape(-1, weight.group_size)
    half = rows.shape[0] // 2
    settings: dict[str, int | str | torch.Tensor] = {
        "nbits": weight.bits,
        "group_size": weight.group_size,
        "axis": 1,
        "shape": torch.tensor(weight.shape),
        "packing": f"{weight.bits}bit_u8",
        "unpack_view_dtype": "torch.uint8",
        "compute_dtype": str(scale.dtype),
        "view_as_float": False,
        "channel_wise": True,
        "optimize": True,
        "round_zero": weight.offsets is None,
        "quant_scale": False,
        "quant_zero": False,
        "offload_meta": False,
        "encoded_state_dict": True,
        "stores_quant_config": True,
    }
    W_q = rows if weight.bits == 8 else rows[:half] << 4 | rows[half:]
    return {"W_q": W_q.contiguous(), "scale": scale, "zero": zero} | {
        name: _encoded(value) for name, value in settings.items()
    }


def _encoded(value: int | str | torch.Tensor) -> torch.Tensor:
    """A setting as HQQ puts it into safetensors."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, str):
        return torch.tensor(list(value.encode()), dtype=torch.uint8)
    return torch.tensor(int(value), dtype=torch.uint8 if isinstance(value, bool) else torch.int32)


def _describe(weights: Mapping[str, QuantizedWeight], skipped: Sequence[str]) -> dict[str, Any]:
    each = weights.values()
    parameters = {
        "nbits": one_of_all("bits", [w.bits for w in each]),
        "group_size": one_of_all("group size", [w.group_size for w in each]),
        "axis": 1,
        "channel_wise": True,
        "view_as_float": False,
    }
    config = {"weight_quant_params": parameters, "scale_quant_params": None, "zero_quant_params": None}
    return {"quant_method": "hqq", "quant_config": config, "skip_modules": list(skipped)}


HQQ = Format(
    name="hqq",
    wants="quant_method hqq, 4 or 8 bits, axis 1",
    required=("W_q", "scale", "zero", "shape", "axis", "nbits"),
    optional=(
        "group_size", "packing", "unpack_view_dtype", "compute_dtype", "view_as_float", "channel_wise", "optimize",
        "round_zero", "quant_scale", "quant_zero", "offload_meta", "encoded_state_dict", "stores_quant_config",
    ),
    matches=lambda config: config.get("quant_method") == "hqq",
    unpack=_unpack,
    refusal=_refusal,
    pack=_pack,
    describe=_describe,
)  # fmt: skip

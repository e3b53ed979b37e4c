"""compressed-tensors (LLM Compressor, vLLM): integers, NVFP4 and MXFP4, also side by side in one model.

pack-quantized, 4 and 8 bits:
    weight_packed      int32 [n, ceil(k * bits / 32)]        codes, packed along k, low bits first
    weight_scale       [n, groups]                           one group per row, or k / group_size
    weight_shape       int64 [2]                             n, k
    weight_zero_point  int32 [ceil(n * bits / 32), groups]   zero points, packed along n; absent if symmetric
    weight_g_idx       int32 [k]                             the group of each column, with actorder "group" only
nvfp4-pack-quantized and mxfp4-pack-quantized:
    weight_packed        uint8 [n, k / 2]                    e2m1 codes, low nibble first
    weight_scale         float8_e4m3fn [n, k / 16] or, for MXFP4, uint8 [n, k / 32] (e8m0)
    weight_global_scale  float32 [1], NVFP4 only             w = e2m1 * (weight_scale / weight_global_scale)

The tensors of a layer say which of the three it is, and its group size, so schemes by layer need no look-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evenshare.quant.formats import mxfp4, nvfp4, words
from evenshare.quant.formats.format import Config, Format, Tensors, check
from evenshare.quant.weight import SCALE_DTYPES, QuantizedWeight

INTEGER, NVFP4, MXFP4 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"


def _groups(config: Config) -> list[dict[str, Any]]:
    return list((config.get("config_groups") or {}).values())


def _matches(config: Config) -> bool:
    found = {group.get("format") or config.get("format") for group in _groups(config)} or {config.get("format")}
    return config.get("quant_method") == "compressed-tensors" and found <= {INTEGER, NVFP4, MXFP4}


def _unpack(tensors: Tensors, config: Config) -> QuantizedWeight:
    packed, scales = tensors["weight_packed"], tensors["weight_scale"]
    if packed.dtype != torch.uint8:
        return _unpack_integers(tensors, config)
    if scales.dtype == torch.uint8:
        return mxfp4.from_codes(packed, scales)
    divisor = tensors.get("weight_global_scale")
    if divisor is None or divisor.numel() != 1:
        got = None if divisor is None else f"shape {tuple(divisor.shape)}"
        raise ValueError(f"weight_global_scale: got {got}, want one element")
    check("weight_scale", scales, nvfp4.E4M3, None, None)
    return nvfp4.from_codes(packed, scales.float() / divisor.float().view(1))


def _unpack_integers(tensors: Tensors, config: Config) -> QuantizedWeight:
    packed, scales, zero_point = tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero_point")
    if "weight_shape" not in tensors:
        raise ValueError(f"tensors: got {sorted(tensors)}, want weight_shape as well ({INTEGER})")
    check("weight_shape", tensors["weight_shape"], (torch.int64, torch.int32), 2)
    n, k = tensors["weight_shape"].tolist()
    check("weight_packed", packed, torch.int32, n, None)
    said = [int(weights.get("num_bits", 0)) for group in _groups(config) if (weights := group.get("weights"))]
    bits = next((bits for bits in (*said, 4, 8) if bits in (4, 8) and -(-k * bits // 32) == packed.shape[1]), None)
    if bits is None:
        raise ValueError(f"weight_packed: got {packed.shape[1]} words for k = {k}, want 4 or 8 bits a code")
    check("weight_scale", scales, SCALE_DTYPES, n, None)
    num_groups = scales.shape[1]
    if num_groups == 0 or k % num_groups:
        raise ValueError(f"weight_scale: got {num_groups} groups, want a divisor of k = {k}")
    zeros = None
    if zero_point is not None:
        check("weight_zero_point", zero_point, torch.int32, -(-n * bits // 32), num_groups)
        zeros = words.unpack(zero_point.t(), bits)[:, :n].t().contiguous()
    g_idx = tensors.get("weight_g_idx")
    if g_idx is not None:
        check("weight_g_idx", g_idx, (torch.int32, torch.int64), k)
    codes = words.as_bytes(packed)[:, : -(-k * bits // 8)].contiguous()
    return words.from_columns(
        codes, scales.contiguous(), zeros, k=k, group_size=k // num_groups, bits=bits, g_idx=g_idx
    )


def _kind(weight: QuantizedWeight) -> str:
    if weight.encoding != "e2m1":
        return INTEGER
    return NVFP4 if weight.group_size == nvfp4.GROUP_SIZE else MXFP4


def _refusal(weight: QuantizedWeight) -> str | None:
    kind = _kind(weight)
    if kind != INTEGER:
        return nvfp4.refusal(weight) if kind == NVFP4 else mxfp4.refusal(weight)
    if weight.stored_k != weight.k:
        return "its permutation pads groups of unequal sizes"
    if weight.k % weight.group_size:
        return f"its groups of {weight.group_size} do not cut its {weight.k} columns evenly"
    return words.refuse_other_than_integer(weight) or words.refuse_columns(weight)


def _pack(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    kind = _kind(weight)
    if kind == MXFP4:
        return {"weight_packed": weight.codes, "weight_scale": mxfp4.e8m0(weight.scales)}
    if kind == NVFP4:
        split = nvfp4.split_scales(weight.scales)
        assert split is not None
        return {"weight_packed": weight.codes, "weight_scale": split[0], "weight_global_scale": split[1]}
    codes, g_idx = words.by_columns(weight)
    tensors = {
        "weight_packed": words.pack(codes, weight.bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if weight.zeros is not None:
        tensors["weight_zero_point"] = words.pack(weight.zeros.t(), weight.bits).t().contiguous()
    if weight.permutation is not None:
        tensors["weight_g_idx"] = g_idx
    return tensors


def _scheme(weight: QuantizedWeight) -> dict[str, Any]:
    """The entry of config_groups, without its targets."""
    kind = _kind(weight)
    per_channel = kind == INTEGER and weight.num_groups == 1
    weights = {
        "num_bits": weight.bits,
        "type": "int" if kind == INTEGER else "float",
        "symmetric": weight.zeros is None,
        "strategy": "channel" if per_channel else "tensor_group" if kind == NVFP4 else "group",
        "group_size": None if per_channel else weight.group_size,
        "actorder": None if weight.permutation is None else "group",
        "dynamic": False,
    }
    if kind != INTEGER:
        weights["scale_dtype"] = str(nvfp4.E4M3 if kind == NVFP4 else torch.uint8)
    return {"weights": weights, "input_activations": None, "output_activations": None, "format": kind}


def _describe(weights: Mapping[str, QuantizedWeight], skipped: Sequence[str]) -> dict[str, Any]:
    schemes: list[tuple[dict[str, Any], list[str]]] = []
    for name, weight in weights.items():
        scheme = _scheme(weight)
        targets = next((targets for known, targets in schemes if known == scheme), None)
        if targets is None:
            schemes.append((scheme, [name]))
        else:
            targets.append(name)
    formats = {scheme["format"] for scheme, _ in schemes}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {**scheme, "targets": ["Linear"] if len(schemes) == 1 else targets}
            for i, (scheme, targets) in enumerate(schemes)
        },
        "ignore": list(skipped),
    }


COMPRESSED_TENSORS = Format(
    name="compressed-tensors",
    wants=f"quant_method compressed-tensors, format {INTEGER} (4 or 8 bits), {NVFP4} or {MXFP4}",
    required=("weight_packed", "weight_scale"),
    optional=("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale"),
    matches=_matches,
    unpack=_unpack,
    refusal=_refusal,
    pack=_pack,
    describe=_describe,
)

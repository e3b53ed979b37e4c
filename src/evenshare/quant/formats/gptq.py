"""GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel store it, 4 and 8 bits, act-order (desc_act) and its shards included.

    qweight  int32 [k * bits / 32, n]           codes, packed along k, low bits first
    qzeros   int32 [groups, n * bits / 32]      zero points, packed along n
    scales   float16 or bfloat16 [groups, n]
    g_idx    int32 [k]                          the group of each column of W, (q - zero) * scales[g_idx]

Version 1 stores zero - 1, modulo 2^bits; version 2 stores the zero point. `sym: true` means the middle code, whatever is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from evenshare.quant.formats import words
from evenshare.quant.formats.format import Config, Format, Tensors, check, one_of_all
from evenshare.quant.weight import QuantizedWeight

HALVES = (torch.float16, torch.bfloat16)
VERSIONS = {"gptq": 1, "gptq_v2": 0}  # what was subtracted from the zero points before they were stored


def _version(config: Config) -> str:
    return str(config.get("checkpoint_format") or config.get("format") or "gptq")


def _matches(version: str, config: Config) -> bool:
    return config.get("quant_method") == "gptq" and _version(config) == version


def _unpack(subtracted: int, tensors: Tensors, config: Config) -> QuantizedWeight:
    qweight, qzeros, scales, g_idx = (tensors.get(name) for name in ("qweight", "qzeros", "scales", "g_idx"))
    assert qweight is not None and qzeros is not None and scales is not None
    check("qweight", qweight, torch.int32, None, None)
    bits = int(config.get("bits", 4))
    if bits not in (4, 8):
        raise ValueError(f"bits: got {bits}, want 4 or 8")
    rows, n = qweight.shape
    k = rows * 32 // bits
    group_size = int(config.get("group_size", -1))
    group_size = k if group_size == -1 else group_size
    groups = None if g_idx is not None else -(-k // group_size)
    check("scales", scales, HALVES, groups, n)
    check("qzeros", qzeros, torch.int32, scales.shape[0], -(-n * bits // 32))
    if g_idx is not None:
        check("g_idx", g_idx, (torch.int32, torch.int64), k)

    zeros = None
    if not config.get("sym", False):
        stored = words.unpack(qzeros, bits)[:, :n].t()
        zeros = ((stored + subtracted) & ((1 << bits) - 1)).contiguous()
    codes = words.as_bytes(qweight.t())
    return words.from_columns(codes, scales.t().contiguous(), zeros, k=k, group_size=group_size, bits=bits, g_idx=g_idx)


def _refusal(weight: QuantizedWeight) -> str | None:
    multiple = 32 // weight.bits
    if weight.n % multiple or weight.k % multiple:
        return f"its shape {weight.shape} is no multiple of {multiple} in both dimensions"
    if weight.scales.dtype not in HALVES:
        return f"its scales are {weight.scales.dtype}, not float16 or bfloat16"
    return words.refuse_other_than_integer(weight) or words.refuse_columns(weight)


def _pack(subtracted: int, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    codes, g_idx = words.by_columns(weight)
    zeros = (words.integer_zeros(weight) - subtracted) & ((1 << weight.bits) - 1)
    return {
        "qweight": words.pack(codes, weight.bits).t().contiguous(),
        "qzeros": words.pack(zeros.t(), weight.bits),
        "scales": weight.scales.t().contiguous(),
        "g_idx": g_idx,
    }


def _describe(version: str, weights: Mapping[str, QuantizedWeight], skipped: Sequence[str]) -> dict[str, Any]:
    each = weights.values()
    return {
        "quant_method": "gptq",
        "checkpoint_format": version,
        "bits": one_of_all("bits", [w.bits for w in each]),
        "group_size": one_of_all("group size", [-1 if w.group_size == w.stored_k else w.group_size for w in each]),
        "sym": all(w.zeros is None for w in each),
        "desc_act": any(w.permutation is not None for w in each),
    }


GPTQ, GPTQ_V2 = (
    Format(
        name=version,
        wants=f"quant_method gptq, checkpoint_format {version}, 4 or 8 bits",
        required=("qweight", "qzeros", "scales"),
        optional=("g_idx",),
        matches=partial(_matches, version),
        unpack=partial(_unpack, subtracted),
        refusal=_refusal,
        pack=partial(_pack, subtracted),
        describe=partial(_describe, version),
    )
    for version, subtracted in VERSIONS.items()
)

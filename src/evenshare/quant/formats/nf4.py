"""bitsandbytes' nf4 (QLoRA, arXiv 2305.14314), with plain or nested absmax.

weight                                uint8 [n * k / 2, 1]            codes of W row by row, high nibble first
weight.absmax                         float32 [blocks], nested uint8  a scale per `blocksize` codes
weight.quant_map                      float32 [16]                    the table
weight.quant_state.bitsandbytes__nf4  uint8                           JSON: shape, blocksize, dtype, nested_*
weight.nested_absmax                  float32 [blocks / nested_blocksize]
weight.nested_quant_map               float32 [256]                   absmax = map[byte] * nested_absmax + nested_offset
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evenshare.quant.encodings import NF4 as TABLE
from evenshare.quant.formats.format import Config, Format, Tensors, check
from evenshare.quant.weight import QuantizedWeight

STATE = "weight.quant_state.bitsandbytes__nf4"
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def _matches(config: Config) -> bool:
    return (
        config.get("quant_method") == "bitsandbytes"
        and bool(config.get("load_in_4bit") or config.get("_load_in_4bit"))
        and config.get("bnb_4bit_quant_type") == "nf4"
    )


def _unpack(tensors: Tensors, config: Config) -> QuantizedWeight:
    state = json.loads(bytes(tensors[STATE].tolist()))
    table = tensors.get("weight.quant_map")
    if table is not None and not torch.equal(table.cpu(), torch.tensor(TABLE)):
        raise ValueError(f"weight.quant_map: got {table.tolist()}, want the table of nf4")
    if len(state["shape"]) != 2:
        raise ValueError(f"{STATE}: got shape {state['shape']}, want two dimensions")
    (n, k), block = state["shape"], state["blocksize"]
    if k % block:
        raise ValueError(
            f"{STATE}: got blocks of {block} codes for k = {k}, want a divisor: no block may span two rows"
        )
    data = tensors["weight"].contiguous().view(torch.uint8).flatten()
    check("weight", data, torch.uint8, n * k // 2)
    absmax = tensors["weight.absmax"].flatten()
    check("weight.absmax", absmax, (torch.float32, torch.uint8), n * k // block)
    if absmax.dtype == torch.uint8:
        absmax = _nested(absmax, state, tensors)
    # One nibble moves: the canonical order is low first.
    codes = (data >> 4 | data << 4).view(n, k // 2)
    return QuantizedWeight(codes, absmax.view(n, -1), k, block, encoding="nf4")


def _nested(absmax: torch.Tensor, state: Mapping[str, Any], tensors: Tensors) -> torch.Tensor:
    missing = [name for name in ("weight.nested_absmax", "weight.nested_quant_map") if name not in tensors]
    if missing:
        raise ValueError(f"tensors: got a nested weight.absmax (uint8), want {', '.join(missing)} as well")
    block = state["nested_blocksize"]
    scales = tensors["weight.nested_absmax"].float()
    check("weight.nested_absmax", scales, torch.float32, -(-absmax.numel() // block))
    values = tensors["weight.nested_quant_map"].float()[absmax.int()]
    return values * scales.repeat_interleave(block)[: absmax.numel()] + state["nested_offset"]


def _refusal(weight: QuantizedWeight) -> str | None:
    if weight.encoding != "nf4":
        return f"its codes are {weight.encoding}, not nf4"
    if weight.permutation is not None:
        return "it has a permutation"
    if weight.group_size not in BLOCK_SIZES or weight.k % weight.group_size:
        return f"its groups of {weight.group_size} of {weight.k} columns are not cut evenly by one of {BLOCK_SIZES}"
    return None


def _pack(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    state = {
        "quant_type": "nf4",
        "blocksize": weight.group_size,
        "dtype": "float16" if weight.scales.dtype == torch.float16 else "bfloat16",  # of the model
        "shape": list(weight.shape),
    }
    return {
        "weight": (weight.codes >> 4 | weight.codes << 4).view(-1, 1),
        "weight.absmax": weight.scales.float().flatten(),
        "weight.quant_map": torch.tensor(TABLE),
        STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _describe(weights: Mapping[str, QuantizedWeight], skipped: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "llm_int8_skip_modules": list(skipped),
    }


NF4 = Format(
    name="bitsandbytes",
    wants="quant_method bitsandbytes, load_in_4bit, bnb_4bit_quant_type nf4",
    required=(STATE, "weight", "weight.absmax"),
    optional=("weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    matches=_matches,
    unpack=_unpack,
    refusal=_refusal,
    pack=_pack,
    describe=_describe,
)

"""A weight as the blocks of a GGUF tensor, the inverse of the readers in gguf.py. The container is the `gguf` package's to write:

type_name, blocks = gguf_blocks(weight)
writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[type_name])
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from evenshare.quant.formats.gguf import GROUP_SIZE
from evenshare.quant.weight import QuantizedWeight


def gguf_blocks(weight: QuantizedWeight) -> tuple[str, np.ndarray[Any, Any]]:
    """(type, uint8 [n, bytes per row]): Q4_0 for symmetric 4-bit weights, Q4_1 for others of 4 bits, Q8_0 for symmetric 8 bits.

    Groups of 32 and multiples of it, whose scale is repeated. `dequantize` of what `read_gguf` reads is equal bit for bit.
    Raises ValueError, naming what the type cannot hold: it stores float16.
    """
    n, k = weight.shape
    symmetric = weight.zeros is None and weight.offsets is None
    name = "Q8_0" if weight.bits == 8 else "Q4_0" if symmetric else "Q4_1"
    reason = _refusal(weight, symmetric)
    if reason is not None:
        raise ValueError(f"weight: {name} cannot hold it, because {reason}")
    parts = [_float16_per_block(name, "scales", weight.scales, weight)]
    if not symmetric:
        parts.append(_float16_per_block(name, "offsets", _offsets(weight), weight))
    codes = weight.unpacked_codes().cpu().view(n, k // GROUP_SIZE, GROUP_SIZE)
    if weight.bits == 8:
        parts.append(codes ^ 0x80)  # unsigned about 128 -> int8
    else:
        parts.append(codes[..., : GROUP_SIZE // 2] | codes[..., GROUP_SIZE // 2 :] << 4)
    return name, torch.cat(parts, -1).view(n, -1).numpy()


def _refusal(weight: QuantizedWeight, symmetric: bool) -> str | None:
    if weight.encoding != "integer":
        return f"its codes are {weight.encoding}, not integers"
    if weight.permutation is not None:
        return "it has a permutation"
    if weight.group_size % GROUP_SIZE or weight.k % GROUP_SIZE:
        return f"its groups are {weight.group_size} of {weight.k} columns, and blocks have {GROUP_SIZE}"
    if weight.bits == 8 and not symmetric:
        return "it has zero points"
    return None


def _offsets(weight: QuantizedWeight) -> torch.Tensor:
    if weight.offsets is not None:
        return weight.offsets
    assert weight.zeros is not None
    return -(weight.zeros.float() * weight.scales.float())


def _float16_per_block(name: str, what: str, per_group: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """uint8 [n, blocks, 2]: the bytes of a float16 for each block of 32 columns."""
    halves = per_group.to(torch.float16)
    if not torch.equal(halves.float(), per_group.float()):
        raise ValueError(f"weight: {name} cannot hold it, because its {what} are not all float16 numbers")
    blocks = halves.cpu().repeat_interleave(weight.group_size // GROUP_SIZE, 1)[:, : weight.k // GROUP_SIZE]
    return blocks.contiguous().view(torch.uint8).view(weight.n, -1, 2)

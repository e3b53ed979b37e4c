"""Codes in int32 words, low bits first, and the order of a weight's columns: what GPTQ, AWQ and compressed-tensors share.

Words are little-endian, so the bytes of a row of words are the canonical bytes of its codes: nothing is shifted, only viewed.
"""

from __future__ import annotations

import torch

from evenshare.quant.rounding import pack_codes
from evenshare.quant.weight import QuantizedWeight, order_by_group


def as_bytes(words: torch.Tensor) -> torch.Tensor:
    """uint8 [r, 4 c] of int32 words [r, c]: the canonical bytes of their codes, a copy."""
    # Not .contiguous(): it leaves the strides of a single row or column as they are, and then they cannot be viewed.
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes one a byte, uint8 [r, c * 32 / bits], of int32 words [r, c]."""
    data = as_bytes(words)
    return data if bits == 8 else torch.stack((data & 15, data >> 4), -1).flatten(-2)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [r, ceil(c * bits / 32)] of codes [r, c] (uint8, one a byte); the last word is filled up with zeros."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (32 // bits)))
    return pack_codes(codes, bits).clone(memory_format=torch.contiguous_format).view(torch.int32)


def from_columns(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    k: int,
    group_size: int,
    bits: int,
    g_idx: torch.Tensor | None,
) -> QuantizedWeight:
    """A weight from `codes` (canonical bytes) in the order of W's columns and the group of each column, `g_idx` [k].

    scales, zeros: [n, groups]. Without g_idx, column j is of group j // group_size. The columns stay where they are if the
    groups lie side by side, also in a shard that begins at a later group.
    """
    if g_idx is None or _in_order(g_idx, group_size, scales.shape[1]):
        return QuantizedWeight(codes, scales, k, group_size, bits, zeros)
    permutation, group_size, groups = order_by_group(g_idx, scales.shape[1], group_size)
    scales, zeros = scales[:, groups], None if zeros is None else zeros[:, groups]
    if torch.equal(permutation, torch.arange(k, dtype=torch.int32, device=permutation.device)):
        return QuantizedWeight(codes, scales, k, group_size, bits, zeros)
    by_column = codes if bits == 8 else torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    # A padding column (-1) gets column 0's codes: whatever they are, x counts as 0 there.
    stored = pack_codes(by_column[:, permutation.clamp(min=0).long()], bits)
    return QuantizedWeight(stored, scales, k, group_size, bits, zeros, permutation=permutation)


def _in_order(g_idx: torch.Tensor, group_size: int, num_groups: int) -> bool:
    k = g_idx.shape[0]
    return -(-k // group_size) == num_groups and torch.equal(
        g_idx.long(), torch.arange(k, device=g_idx.device) // group_size
    )


def by_columns(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [n, k], one a byte; g_idx int32 [k]) in the order of W's columns, the inverse of `from_columns`."""
    codes = weight.unpacked_codes()
    groups = torch.arange(weight.stored_k, dtype=torch.int32, device=weight.device) // weight.group_size
    if weight.permutation is None:
        return codes, groups
    stored = torch.nonzero(weight.permutation >= 0)[:, 0]
    columns = weight.permutation[stored].long()
    ordered, g_idx = codes.new_empty(weight.n, weight.k), groups.new_empty(weight.k)
    ordered[:, columns], g_idx[columns] = codes[:, stored], groups[stored]
    return ordered, g_idx


def integer_zeros(weight: QuantizedWeight) -> torch.Tensor:
    """uint8 [n, num_groups]: the zero points, the middle code if the weight is symmetric."""
    if weight.zeros is not None:
        return weight.zeros
    return torch.full(weight.scales.shape, 1 << (weight.bits - 1), dtype=torch.uint8, device=weight.device)


def refuse_columns(weight: QuantizedWeight) -> str | None:
    """Why `by_columns` cannot give all of W."""
    if weight.permutation is not None and int((weight.permutation >= 0).sum()) < weight.k:
        return f"its permutation does not name all of its {weight.k} columns"
    return None


def refuse_other_than_integer(weight: QuantizedWeight) -> str | None:
    """Why a format of integer codes with integer zero points cannot hold the weight."""
    if weight.encoding != "integer":
        return f"its codes are {weight.encoding}, not integers"
    if weight.offsets is not None:
        return "it has float offsets, and zero points are integers"
    return None

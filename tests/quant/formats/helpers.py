"""Random weights, and layers taken apart bit by bit: loops over elements, written from the layouts alone."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from evenshare.quant import QuantizedWeight
from evenshare.quant.rounding import pack_codes
from evenshare.quant.weight import order_by_group

SEEDS = st.integers(0, 2**31 - 1)


def make_weight(
    n: int,
    k: int,
    group_size: int,
    *,
    bits: int = 4,
    zero_form: str = "symmetric",
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
    encoding: str = "integer",
) -> QuantizedWeight:
    """A random weight: every code occurs, zero points include the least and the greatest, one group has scale 0."""
    generator = torch.Generator().manual_seed(seed)
    group_size = k if group_size == -1 else group_size
    groups = (n, -(-k // group_size))
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    scales = torch.randn(groups, generator=generator).to(dtype)
    scales[0, 0] = 0
    zeros = offsets = None
    if zero_form == "zeros":
        zeros = torch.randint(0, 1 << bits, groups, dtype=torch.uint8, generator=generator)
        zeros.view(-1)[0], zeros.view(-1)[-1] = 0, (1 << bits) - 1
    elif zero_form == "offsets":
        offsets = torch.randn(groups, generator=generator).to(dtype)
    return QuantizedWeight(pack_codes(codes, bits), scales, k, group_size, bits, zeros, offsets, encoding)


def permuted(weight: QuantizedWeight, g_idx: torch.Tensor) -> QuantizedWeight:
    """A weight with random codes whose column j is of group g_idx[j] of `weight`."""
    permutation, group_size, groups = order_by_group(g_idx, weight.num_groups, weight.group_size)
    codes = torch.randint(0, 1 << weight.bits, (weight.n, permutation.numel()), dtype=torch.uint8)
    return QuantizedWeight(
        pack_codes(codes, weight.bits),
        weight.scales[:, groups],
        g_idx.numel(),
        group_size,
        weight.bits,
        None if weight.zeros is None else weight.zeros[:, groups],
        permutation=permutation,
    )


def field(word: int, index: int, bits: int) -> int:
    """The index-th field of a 32-bit word, low bits first."""
    return (word & 0xFFFFFFFF) >> (index * bits) & ((1 << bits) - 1)


def bits_of(q: int, zero: float, scale: torch.Tensor) -> float:
    """(q - zero) * scale, rounded once to float32: 8 bits times 24 are exact in float64."""
    return float(torch.tensor((q - zero) * scale.double().item(), dtype=torch.float64).float())


def gptq_loop(tensors: dict[str, torch.Tensor], *, bits: int, version: int, sym: bool) -> torch.Tensor:
    """Dequantise the tensors of a GPTQ layer, one weight after the other: float32 [n, k]."""
    qweight, qzeros, g_idx = (tensors[name].tolist() for name in ("qweight", "qzeros", "g_idx"))
    per_word = 32 // bits
    n, k = len(qweight[0]), len(g_idx)
    out = torch.empty(n, k)
    for row in range(n):
        for column in range(k):
            q = field(qweight[column // per_word][row], column % per_word, bits)
            zero = field(qzeros[g_idx[column]][row // per_word], row % per_word, bits)
            zero = 1 << (bits - 1) if sym else (zero + 1) % (1 << bits) if version == 1 else zero
            out[row, column] = bits_of(q, zero, tensors["scales"][g_idx[column], row])
    return out


def awq_loop(tensors: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
    """Dequantise the tensors of an AWQ layer: float32 [n, k]."""
    nibble = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}  # column of a word -> where it lies
    qweight, qzeros = tensors["qweight"].tolist(), tensors["qzeros"].tolist()
    k, n = len(qweight), len(qweight[0]) * 8
    out = torch.empty(n, k)
    for row in range(n):
        for column in range(k):
            q = field(qweight[column][row // 8], nibble[row % 8], 4)
            zero = field(qzeros[column // group_size][row // 8], nibble[row % 8], 4)
            out[row, column] = bits_of(q, zero, tensors["scales"][column // group_size, row])
    return out


def packed_loop(tensors: dict[str, torch.Tensor], *, bits: int, group_size: int) -> torch.Tensor:
    """Dequantise the tensors of a pack-quantized layer: float32 [n, k]."""
    packed, (n, k) = tensors["weight_packed"].tolist(), tensors["weight_shape"].tolist()
    zero_point = tensors["weight_zero_point"].tolist() if "weight_zero_point" in tensors else None
    g_idx = tensors["weight_g_idx"].tolist() if "weight_g_idx" in tensors else [j // group_size for j in range(k)]
    per_word = 32 // bits
    out = torch.empty(n, k)
    for row in range(n):
        for column in range(k):
            q = field(packed[row][column // per_word], column % per_word, bits)
            zero = 1 << (bits - 1)
            if zero_point is not None:
                zero = field(zero_point[row // per_word][g_idx[column]], row % per_word, bits)
            out[row, column] = bits_of(q, zero, tensors["weight_scale"][row, g_idx[column]])
    return out

"""CPU backend: how a weight is packed for torch's CPU operators, and which operator takes which call.

bfloat16 activations run on torch's int4 kernel (`_weight_int4pack_mm_for_cpu`, which accumulates in float32) where it takes
the weight; its scales and zeros are bfloat16, so a scale is rounded to 8 significant bits once, at packing. Everything else
multiplies by the dequantised float32 weight, kept in memory: float32 activations are exact but for the sum's rounding. A
permutation of the columns is applied to x for the first, to the weight for the second.

An 8-bit code is two 4-bit codes, c = 16 hi + lo, so an 8-bit weight is a 4-bit weight with twice the columns,
[hi | lo] with scales [16 s | s], times [x | x]. On two AVX-512 cores the head [49152, 576] at m = 1 takes 1.75 ms that way
(dequantised bfloat16: 3.4 ms, float32: 4.3 ms, torch's int8 kernel, which knows no groups: 1.85 ms).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from evenshare.device.activations import get_activation
from evenshare.quant.encodings import INTEGER
from evenshare.quant.weight import QuantizedWeight

# The int4 kernel is linear in m (26 us a row for [3072, 576] on two AVX-512 cores); dequantising first (1.4 ms and more) for a
# float32 matmul passes it between m = 128 (3.4 ms both) and 512 (8.5 against 13.4 ms). A float32 copy kept for prefill would
# take 1.5 ms at m = 128, for eight times the weight's memory.
INT4_MAX_ROWS = 128
INT4_GROUP_SIZES = (256, 128, 64, 32)
INT4_ROW_MULTIPLE = 16
# Weights dequantised at a time for long inputs, 64 MB of float32. Chunks that fit the cache were slower: the matmul's set-up.
DEQUANTIZE_ELEMENTS = 1 << 24
# Packing a small weight is a dozen short operators. On a busy machine each waits for torch's pool (8 ms at a time): the 210
# weights of a 135M model took 4.8 s with two threads beside another process, 0.3 s with one.
ONE_THREAD_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class Int4Weight:
    """Operands of torch's int4 CPU kernel: w = (q - 8) * scale + zero."""

    codes: torch.Tensor  # uint8, torch's own order
    scales_and_zeros: torch.Tensor  # bfloat16 [num_groups, n, 2]
    group_size: int
    repeats: int  # times that x is repeated along k: 2 for 8-bit codes


@dataclass(frozen=True)
class PermutedInt4Weight:
    """An `Int4Weight` of stored columns: for x in their order."""

    weight: Int4Weight


def int4_group_size(weight: QuantizedWeight) -> int:
    """The group size under which torch's int4 kernel takes this weight (large groups are repeated smaller ones), or 0."""
    n, k = weight.n, weight.stored_k
    if n == 0 or n % INT4_ROW_MULTIPLE or weight.encoding != INTEGER or weight.device.type != "cpu":
        return 0
    return next((g for g in INT4_GROUP_SIZES if weight.group_size % g == 0 and k % g == 0), 0)


def pack(weight: QuantizedWeight, dtype: torch.dtype) -> Int4Weight | PermutedInt4Weight | torch.Tensor:
    """What `matmul` needs for activations of `dtype`, from the weight's cache or made now."""
    found = weight.packed.get(("cpu", dtype))
    if found is None:
        group_size = int4_group_size(weight) if dtype == torch.bfloat16 else 0
        if group_size:
            with _one_thread() if weight.n * weight.stored_k < ONE_THREAD_ELEMENTS else nullcontext():
                found = pack_int4(weight, group_size)
            if weight.permutation is not None:
                found = PermutedInt4Weight(found)
        elif dtype == torch.float32:
            found = weight.dequantize(torch.float32)
        else:
            found = pack(weight, torch.float32)
        weight.packed["cpu", dtype] = found
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pack_int4(weight: QuantizedWeight, group_size: int) -> Int4Weight:
    scales = weight.scales.float()
    middle = 1 << (weight.bits - 1)
    if weight.offsets is not None:
        shift = weight.offsets.float() + middle * scales
    elif weight.zeros is not None:
        shift = (middle - weight.zeros.float()) * scales
    else:
        shift = torch.zeros_like(scales)
    # w = (q - middle) * scale + shift: written about the middle code, both roundings to bfloat16 stay below 2^-9 of the range.
    codes = weight.unpacked_codes()
    if weight.bits == 8:
        # q - 128 = 16 (hi - 8) + (lo - 8) + 8. The shift goes with hi, and what its rounding leaves over with lo.
        coarse = shift.bfloat16().float()
        codes = torch.cat((codes >> 4, codes & 15), dim=1)
        scales, shift = torch.cat((16 * scales, scales), 1), torch.cat((coarse, shift - coarse + 8 * scales), 1)
    scales_and_zeros = torch.stack((scales, shift), dim=-1).transpose(0, 1)
    scales_and_zeros = scales_and_zeros.repeat_interleave(weight.group_size // group_size, 0)
    return Int4Weight(
        torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1),
        scales_and_zeros.to(torch.bfloat16).contiguous(),
        group_size,
        weight.bits // 4,
    )


def matmul(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """y [m, n] = x [m, k] Wᵀ, in the dtype of x."""
    operand = pack(weight, x.dtype)
    if isinstance(operand, torch.Tensor):
        return F.linear(x.float(), operand).to(x.dtype)
    m = x.shape[0]
    if m > INT4_MAX_ROWS:
        return _matmul_dequantizing(x, weight)
    if m == 0:
        return x.new_empty(0, weight.n)
    if isinstance(operand, PermutedInt4Weight):
        x, operand = weight.gather(x), operand.weight
    x = torch.cat((x, x), 1) if operand.repeats == 2 else x.contiguous()
    return torch._weight_int4pack_mm_for_cpu(x, operand.codes, operand.group_size, operand.scales_and_zeros)


def linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """activation(x Wᵀ + bias) + residual [m, n_out], in the dtype of x [m, k]."""
    y = matmul(x, weight)
    if bias is not None:
        y += bias
    if activation is not None:
        y = get_activation(activation)(y)
    return y if residual is None else (y + residual).to(x.dtype)


def _matmul_dequantizing(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    x32 = x.float()
    out = x.new_empty(x.shape[0], weight.n)
    rows = max(1, DEQUANTIZE_ELEMENTS // weight.stored_k)
    for start in range(0, weight.n, rows):
        stop = min(start + rows, weight.n)
        out[:, start:stop] = F.linear(x32, weight.narrow(start, stop).dequantize(torch.float32))
    return out

"""The products of many tokens: W becomes 16-bit numbers once, in a workspace of bounded size, and the GEMM does the rest.

A fused kernel unpacks every weight again for each tile of tokens and keeps the tensor cores waiting for it; a dequantised weight is
written and read once. Its numbers are rounded to the dtype of x, by up to 2^-8 of themselves in bfloat16 and 2^-11 in float16,
where the fused Hopper kernel holds codes exactly and scales sums.
"""

from __future__ import annotations

import math

import torch
import triton

from evenshare.device.activations import is_gated
from evenshare.device.target import HOPPER, Target
from evenshare.gemm import launch as gemm
from evenshare.gemm.epilogue import Epilogue
from evenshare.quant.encodings import CODEBOOKS, INTEGER
from evenshare.quant.experts import ExpertWeights
from evenshare.quant.hopper_weight import PIECE_BYTES, for_tma
from evenshare.quant.kernels.dequantize import FLOAT_OFFSETS, INTEGER_ZEROS
from evenshare.quant.kernels.dequantize_weight import dequantize_weight
from evenshare.quant.packing import FORMS, ONE_GROUP
from evenshare.quant.weight import QuantizedWeight

# 8192 x 8192 x 8192 in bf16 on an H200: 2104 us by the fused kernel, 1568 us by the GEMM. Its memory copies at 4.2 TB/s.
FUSED_FLOP_S, GEMM_FLOP_S, BYTES_S = 522e12, 701e12, 4.2e12
LAUNCHES_S = 4e-6  # of two launches in place of one; an estimate
SLAB_BYTES = 256 << 20  # of dequantised weights at a time
SLAB_ROWS = 256  # whole tiles of the GEMM, the least there is at a time
MAX_BLOCK_K, COLUMNS_PER_WARP = 4096, 1024  # 16 bytes of 4-bit codes a thread
FLOAT16_EXPONENT = 15  # weights stay below 2^15, half of what float16 holds


def pays(m: int, n: int, k: int, bits: int = 4, num_experts: int = 1) -> bool:
    """Whether m tokens save more arithmetic than it costs to write out W [n, k] of every expert: from some 700 tokens for each
    on, and more where W is small."""
    saved = 2 * m * n * k * (1 / FUSED_FLOP_S - 1 / GEMM_FLOP_S)
    return saved > num_experts * n * k * (bits / 8 + 2) / BYTES_S + LAUNCHES_S


def takes(x: torch.Tensor, weight: QuantizedWeight, target: Target, num_experts: int = 1) -> bool:
    """Whether x [m, k] Wᵀ is computed here: where the GEMM for Hopper, whose speed `pays` knows, follows. weight: all experts'."""
    if target.capability != HOPPER or x.element_size() != 2:
        return False
    return pays(x.shape[0], weight.n // num_experts, weight.k, weight.bits, num_experts)


def pack(weight: QuantizedWeight, dtype: torch.dtype) -> float:
    """The power of two that weights are multiplied by, and sums divided by, so that none leaves the range of `dtype`; from the
    weight's cache or found now, which waits for the device. Of bfloat16 and float32, whose range is that of the scales, 1."""
    if dtype != torch.float16:
        return 1.0
    found: float | None = weight.packed.get("float16 factor")
    if found is None:
        if weight.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "weight: got one that is not packed inside a CUDA graph's capture, want prepare(weight, ...) before"
            )
        found = weight.packed["float16 factor"] = _factor(weight)
    return found


def _factor(weight: QuantizedWeight) -> float:
    if weight.scales.numel() == 0:
        return 1.0
    largest = (1 << weight.bits) - 1 if weight.encoding == INTEGER else max(map(abs, CODEBOOKS[weight.encoding]))
    bound = weight.scales.float().abs().max() * largest
    if weight.offsets is not None:
        bound += weight.offsets.float().abs().max()
    magnitude = float(bound)
    if magnitude == 0 or not math.isfinite(magnitude):
        return 1.0
    exponent = FLOAT16_EXPONENT - math.frexp(magnitude)[1]
    return 2.0 ** min(max(exponent, -126), 126)  # float32 holds it and its inverse


def slab_rows(n: int, blocks: int, k: int, itemsize: int) -> int:
    """Of each of `blocks` blocks of n rows of W, how many are dequantised at a time: as equal slabs as tiles allow, within
    SLAB_BYTES or of SLAB_ROWS rows."""
    num_slabs = -(-blocks * n * k * itemsize // SLAB_BYTES)
    rows = n // num_slabs // SLAB_ROWS * SLAB_ROWS if num_slabs > 1 else n
    return min(max(rows, SLAB_ROWS), n)


def dequantize(
    weight: QuantizedWeight,
    blocks: int,
    first: int,
    rows: int,
    dtype: torch.dtype,
    factor: float = 1.0,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """factor W, stored columns in their order: of each of `blocks` equal blocks of rows those from `first` to `first + rows`.

    offsets: int32 [blocks + 1]; block i is left without values where offsets[i + 1] is not above offsets[i].
    Returns [blocks * rows, stored_k], each row at a multiple of 16 bytes. CUDA graphs may capture it."""
    k = weight.stored_k
    out = weight.codes.new_empty(blocks * rows, k + -k % (PIECE_BYTES // dtype.itemsize), dtype=dtype)[:, :k]
    if weight.offsets is not None:
        zeros, form = weight.offsets, FLOAT_OFFSETS
    elif weight.zeros is not None:
        zeros, form = weight.zeros, INTEGER_ZEROS
    else:
        zeros, form = weight.scales, FORMS[weight.encoding]
    block_k = min(MAX_BLOCK_K, max(triton.next_power_of_2(k), 32))
    with torch.cuda.device_of(out):
        dequantize_weight[(rows, -(-k // block_k), blocks)](
            weight.codes,
            weight.scales,
            zeros,
            out,
            offsets,
            rows,
            first,
            weight.n // blocks,
            k,
            weight.codes.shape[1],
            factor,
            *weight.codes.stride(),
            *weight.scales.stride(),
            *zeros.stride(),
            out.stride(0),
            BITS=weight.bits,
            GROUP_SIZE=ONE_GROUP if weight.num_groups == 1 else weight.group_size,
            FORM=form.value,
            BLOCK_K=block_k,
            num_warps=max(block_k // COLUMNS_PER_WARP, 1),
        )
    return out


def matmul(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    target: Target,
) -> None:
    """As `launch.matmul`. Slabs of W's rows, and with them columns of out, one after another; of a gated weight the same rows of
    gate and up."""
    factor = pack(weight, x.dtype)
    x = for_tma(weight.gather(x))
    n_out, blocks = out.shape[1], 2 if is_gated(activation) else 1
    step = slab_rows(n_out, blocks, weight.stored_k, x.element_size())
    for first in range(0, n_out, step):
        columns = slice(first, min(first + step, n_out))
        epilogue = Epilogue(
            None if bias is None else bias.unflatten(0, (blocks, n_out))[:, columns].flatten(),
            activation,
            None if residual is None else residual[None, :, columns],
            alpha=1 / factor,
        )
        w = dequantize(weight, blocks, first, columns.stop - first, x.dtype, factor)
        gemm.matmul(x[None], w.t()[None], epilogue, out[None, :, columns], target)
        del w  # before the next one is made


def grouped_matmul(
    x: torch.Tensor,
    weights: ExpertWeights,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
    target: Target,
) -> None:
    """As `launch.grouped_matmul`. A few experts one after another, of which those without tokens cost next to nothing. In float16
    every weight has to be within its range."""
    x = for_tma(weights.weight.gather(x))
    n, offsets = weights.n, offsets.contiguous()
    num_here = max(SLAB_BYTES // (n * weights.weight.stored_k * x.element_size()), 1)
    for first in range(0, weights.num_experts, num_here):
        end = min(first + num_here, weights.num_experts)
        part = weights.weight.narrow(first * n, end * n)
        bias_here = None if bias is None else bias[first:end]
        w = dequantize(part, end - first, 0, n, x.dtype, offsets=offsets[first : end + 1]).unflatten(0, (-1, n)).mT
        gemm.grouped_matmul(x, w, offsets, bias_here, activation, None, None, x.shape[0], out, target, first)
        del w

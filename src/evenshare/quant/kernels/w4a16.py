"""y = activation(x Wᵀ + bias), W in packed codes, by an even share of the (tile, k-step) space (arXiv 2301.03598, 2402.00025).

A k-step is one 32-bit word per column and lane: LANES rows of words hold PLANES = 32 / BITS codes each, and plane p of a word
is LANES columns of W further along k. A plane is thus a [LANES, BLOCK_N] operand of one dot, unpacked without any shuffle,
and as every group is a multiple of LANES it has one scale per column. Words lie with n innermost: 16-byte loads.

Codes become numbers in float32 (`dequantize`), scale and zero point included, and are rounded once to the dtype of x before the
dot, so nothing larger than a weight is ever held in 16 bits. Sums and partials are float32.
"""

import triton
import triton.language as tl

from evenshare.device.epilogue import store_tile, tile_columns
from evenshare.device.merge import merge_split_tile
from evenshare.device.segments import next_segment, share_begin
from evenshare.quant.kernels.dequantize import FLOAT_OFFSETS, INTEGER_ZEROS, LANES, dequantize


@triton.jit
def accumulate(x_ptr, permutation_ptr, words_ptr, scales_ptr, zeros_ptr, rows, columns, m, k, padded_n, begin, end,
                stride_x_m, stride_x_k,
                BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, FORM: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_N] of k-steps [begin, end)."""
    PLANES: tl.constexpr = 32 // BITS
    BLOCK_K: tl.constexpr = PLANES * LANES
    lanes = tl.arange(0, LANES)
    row_offsets = rows.to(tl.int64) * stride_x_m
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(begin, end, num_stages=NUM_STAGES):
        words = tl.load(words_ptr + (lanes + step * LANES).to(tl.int64)[:, None] * padded_n + columns[None, :])
        for plane in tl.static_range(PLANES):
            first = step * BLOCK_K + plane * LANES
            # Scales are padded like the words: no mask. A group that spans planes is loaded once.
            if (plane * LANES) % GROUP_SIZE == 0:
                group = tl.cast(first // GROUP_SIZE, tl.int64) * padded_n + columns
                scale = tl.load(scales_ptr + group).to(tl.float32)[None, :]
                zero = scale
                if FORM == INTEGER_ZEROS or FORM == FLOAT_OFFSETS:
                    zero = tl.load(zeros_ptr + group).to(tl.float32)[None, :]
            weight = dequantize(words, scale, zero, plane, BITS, FORM)
            at = lanes + first
            if permutation_ptr is None:
                present = at < k
            else:
                at = tl.load(permutation_ptr + at)  # padded with -1 like the words
                present = at >= 0
            x = tl.load(
                x_ptr + row_offsets[:, None] + at.to(tl.int64)[None, :] * stride_x_k,
                mask=(rows < m)[:, None] & present[None, :],
                other=0.0,
            )
            acc = tl.dot(x, weight.to(x.dtype), acc, input_precision="ieee")
    return acc


# What changes from call to call is not specialised on: no compilation for m = 1, or for a plan of one tile.
@triton.jit(do_not_specialize=["m", "num_workers", "num_tiles", "iters_per_tile", "num_whole"])
def w4a16(x_ptr, permutation_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr,
          partials_ptr, counters_ptr, m, n, k, padded_n,
          stride_x_m, stride_x_k, stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
          num_workers, num_tiles, iters_per_tile, num_whole,
          BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, FORM: tl.constexpr,
          ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr):  # fmt: skip
    """One worker of a `UniformPlan`: its whole tiles, then its share of the tail. GROUP_SIZE may exceed k: one group.
    n: columns of out, of which the weight has twice as many if GATED."""
    worker = tl.program_id(0)
    tiles_m = tl.cdiv(m, BLOCK_M)
    tile_rows = tl.arange(0, BLOCK_M)
    inner = tile_rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]

    tile = worker
    tail = (num_tiles - num_whole) * iters_per_tile
    position = share_begin(worker, tail, num_workers)
    share_end = share_begin(worker + 1, tail, num_workers)
    while (tile < num_whole) | (position < share_end):
        current, begin, end, split_tile, tile, position = next_segment(
            tile, position, share_end, iters_per_tile, num_whole, num_workers
        )
        # Rows first: neighbours share the columns of W through L2.
        tile_n = current // tiles_m
        rows = (current - tile_n * tiles_m) * BLOCK_M + tile_rows
        columns = tile_columns(tile_n, n, BLOCK_N, GATED)
        acc = accumulate(x_ptr, permutation_ptr, words_ptr, scales_ptr, zeros_ptr, rows, columns, m, k, padded_n, begin, end,
                          stride_x_m, stride_x_k, BITS, GROUP_SIZE, FORM, BLOCK_M, BLOCK_N, NUM_STAGES)  # fmt: skip
        complete = end - begin == iters_per_tile
        if not complete:
            acc, complete = merge_split_tile(acc, partials_ptr, counters_ptr, inner, worker, split_tile, iters_per_tile, tail, num_workers,
                                             BLOCK_M * BLOCK_N)  # fmt: skip
        if complete:
            store_tile(out_ptr, bias_ptr, residual_ptr, acc, rows, tile_n, m, n, stride_out_m, stride_out_n,
                       stride_residual_m, stride_residual_n, ACTIVATION, GATED, BLOCK_M, BLOCK_N)  # fmt: skip

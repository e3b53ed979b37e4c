"""y = activation(x W_eᵀ + bias_e) for the rows of each expert e, in one launch: the kernel of w4a16.py over a ragged set of tiles.

Rows of x are sorted by expert; `offsets` says where each one's begin. All tiles have the same k-steps, so what depends on the
offsets is only how many tiles there are and whose they are: every program counts them for itself, and the share of the even
deal (`device.segments`) follows in closed form. The host knows none of it.
"""

import triton
import triton.language as tl

from evenshare.device.epilogue import store_tile, tile_columns
from evenshare.device.merge import merge_split_tile
from evenshare.device.segments import next_segment, share_begin
from evenshare.quant.kernels.dequantize import LANES
from evenshare.quant.kernels.w4a16 import accumulate


@triton.jit
def _offset(offsets_ptr, index, m):
    return tl.minimum(tl.maximum(tl.load(offsets_ptr + index), 0), m)


@triton.jit
def _tile_ends(offsets_ptr, num_experts, m, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """int32 [EXPERTS]: row tiles of each expert and all before it."""
    expert = tl.arange(0, EXPERTS)
    inside = tl.minimum(expert, num_experts - 1)
    rows = _offset(offsets_ptr, inside + 1, m) - _offset(offsets_ptr, inside, m)
    return tl.cumsum(tl.where(expert < num_experts, tl.cdiv(tl.maximum(rows, 0), BLOCK_M), 0), 0)


@triton.jit
def _store_zeros(out_ptr, first, last, m, n, stride_out_m, stride_out_n, worker, num_workers, BLOCK_N: tl.constexpr):
    """Rows that are no expert's: [0, first) and [last, m)."""
    columns = tl.arange(0, BLOCK_N)
    for i in range(worker, first + m - last, num_workers):
        row = tl.where(i < first, i, i - first + last).to(tl.int64)
        for begin in range(0, n, BLOCK_N):
            at = begin + columns
            zeros = tl.zeros([BLOCK_N], out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * stride_out_m + at.to(tl.int64) * stride_out_n, zeros, mask=at < n)


@triton.jit(do_not_specialize=["m", "num_experts", "max_workers", "iters_per_tile", "num_groups", "min_steps"])
def grouped_w4a16(x_ptr, permutation_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr,
                  offsets_ptr, m, n, k, padded_n, stride_x_m, stride_x_k, stride_out_m, stride_out_n,
                  num_experts, max_workers, iters_per_tile, num_groups, min_steps,
                  BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
                  EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr):  # fmt: skip
    """words [num_experts, iters_per_tile * LANES, padded_n], scales and zeros [num_experts, num_groups, padded_n], bias
    [num_experts, columns of the weight]. m: rows of x; n: columns of out. A share has at least min_steps k-steps."""
    program = tl.program_id(0)
    tile_rows = tl.arange(0, BLOCK_M)
    inner = tile_rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    columns_w = 2 * n if GATED else n
    tiles_n = tl.cdiv(columns_w, BLOCK_N)
    ends = _tile_ends(offsets_ptr, num_experts, m, BLOCK_M, EXPERTS)
    _store_zeros(out_ptr, _offset(offsets_ptr, 0, m), _offset(offsets_ptr, num_experts, m), m, n, stride_out_m, stride_out_n,
                 program, max_workers, BLOCK_N)  # fmt: skip

    # The even deal of quant/plan.py and schedule/uniform.py, by those who get something.
    num_tiles = tl.max(ends, 0) * tiles_n
    most = tl.maximum(num_tiles, (num_tiles.to(tl.int64) * iters_per_tile // min_steps).to(tl.int32))
    num_workers = tl.maximum(tl.minimum(most, max_workers), 1)
    num_whole = tl.maximum(num_tiles // num_workers - 1, 0) * num_workers
    num_whole = tl.where(num_tiles % num_workers == 0, num_tiles, num_whole)
    tail = (num_tiles - num_whole) * iters_per_tile
    tile = program
    position = share_begin(program, tail, num_workers)
    share_end = share_begin(program + 1, tail, num_workers)
    if program >= num_workers:
        tile = num_whole
        share_end = position
    while (tile < num_whole) | (position < share_end):
        current, begin, end, split_tile, tile, position = next_segment(
            tile, position, share_end, iters_per_tile, num_whole, num_workers
        )
        # Tiles of an expert are neighbours, and so are those that read the same columns of its weight.
        row_tile = current // tiles_n
        expert = tl.sum((ends <= row_tile).to(tl.int32), 0)
        first_tile = tl.max(tl.where(ends <= row_tile, ends, 0), 0)
        row_begin = _offset(offsets_ptr, expert, m)
        row_end = _offset(offsets_ptr, expert + 1, m)
        tiles_m = tl.cdiv(row_end - row_begin, BLOCK_M)
        local = current - first_tile * tiles_n
        tile_n = local // tiles_m
        rows = row_begin + (local - tile_n * tiles_m) * BLOCK_M + tile_rows
        columns = tile_columns(tile_n, n, BLOCK_N, GATED)
        words = expert.to(tl.int64) * padded_n * (iters_per_tile * LANES)
        groups = expert.to(tl.int64) * padded_n * num_groups
        acc = accumulate(x_ptr, permutation_ptr, words_ptr + words, scales_ptr + groups, zeros_ptr + groups, rows, columns,
                         row_end, k, padded_n, begin, end, stride_x_m, stride_x_k,
                         BITS, GROUP_SIZE, FORM, BLOCK_M, BLOCK_N, NUM_STAGES)  # fmt: skip
        complete = end - begin == iters_per_tile
        if not complete:
            acc, complete = merge_split_tile(acc, partials_ptr, counters_ptr, inner, program, split_tile, iters_per_tile, tail,
                                             num_workers, BLOCK_M * BLOCK_N)  # fmt: skip
        if complete:
            bias = bias_ptr
            if bias_ptr is not None:
                bias = bias_ptr + expert.to(tl.int64) * columns_w
            store_tile(out_ptr, bias, None, acc, rows, tile_n, row_end, n, stride_out_m, stride_out_n, 0, 0,
                       ACTIVATION, GATED, BLOCK_M, BLOCK_N)  # fmt: skip

"""y = activation(x W_eᵀ + bias_e) for the rows of each expert e, in one launch: the kernel of w4a16.py over the ragged set of tiles
of `device.groups`."""

import triton
import triton.language as tl

from evenshare.device.epilogue import store_tile, tile_columns
from evenshare.device.groups import deal, find_tile, store_zeros, tile_ends
from evenshare.device.merge import merge_split_tile
from evenshare.device.segments import next_segment, share_begin
from evenshare.quant.kernels.dequantize import LANES
from evenshare.quant.kernels.w4a16 import accumulate


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
    ends = tile_ends(offsets_ptr, num_experts, m, BLOCK_M, EXPERTS)
    store_zeros(out_ptr, offsets_ptr, num_experts, m, n, stride_out_m, stride_out_n, program, max_workers, BLOCK_N)

    num_tiles = tl.max(ends, 0) * tiles_n
    num_workers, num_whole = deal(num_tiles, iters_per_tile, min_steps, max_workers)
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
        expert, row_begin, row_end, tile_n = find_tile(current, ends, offsets_ptr, m, tiles_n, BLOCK_M)
        rows = row_begin + tile_rows
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

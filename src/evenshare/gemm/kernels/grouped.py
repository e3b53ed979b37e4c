"""out = activation(a B_g + bias_g) for the rows of each group g, in one launch: the kernel of matmul.py over the ragged set of tiles of
`device.groups`. Rows are read and written where `gather` and `scatter` say."""

import triton
import triton.language as tl

from evenshare.device.epilogue import store_tile, tile_columns
from evenshare.device.groups import deal, find_tile, store_zeros, tile_ends
from evenshare.device.merge import merge_split_tile
from evenshare.device.segments import next_segment, share_begin
from evenshare.gemm.kernels.matmul import accumulate


@triton.jit
def _rows_of(index_ptr, rows, row_end, num_rows):
    """Rows of a tile -> (where they are, which are rows at all): index[rows] if there is one, and within num_rows."""
    is_row = rows < row_end
    if index_ptr is not None:
        rows = tl.load(index_ptr + rows, mask=is_row, other=-1)
        is_row &= (rows >= 0) & (rows < num_rows)
    return rows, is_row


@triton.jit(
    do_not_specialize=["m", "num_rows", "num_out_rows", "num_groups", "first_group", "num_here", "max_workers", "iters_per_tile",
                       "min_steps"]
)  # fmt: skip
def grouped_matmul(a_ptr, b_ptr, bias_ptr, out_ptr, offsets_ptr, gather_ptr, scatter_ptr, partials_ptr, counters_ptr,
                   m, n, k, num_rows, num_out_rows, stride_a_m, stride_a_k, stride_b_g, stride_b_k, stride_b_n,
                   stride_bias_g, stride_bias_n, stride_out_m, stride_out_n, num_groups, first_group, num_here,
                   max_workers, iters_per_tile, min_steps,
                   ACTIVATION: tl.constexpr, GATED: tl.constexpr, GROUPS: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr):  # fmt: skip
    """a [num_rows, k], b [num_here, k, columns], bias [num_here, columns], out [num_out_rows, n]: the groups from first_group on of
    num_groups. m: rows that offsets deal out, of gather and scatter as well. A share has at least min_steps k-steps."""
    program = tl.program_id(0)
    tile_rows = tl.arange(0, BLOCK_M)
    columns_b = 2 * n if GATED else n
    tiles_n = tl.cdiv(columns_b, BLOCK_N)
    if scatter_ptr is None:
        store_zeros(out_ptr, offsets_ptr, num_groups, m, n, stride_out_m, stride_out_n, program, max_workers, BLOCK_N)
    offsets_ptr += first_group
    ends = tile_ends(offsets_ptr, num_here, m, BLOCK_M, GROUPS)

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
        group, row_begin, row_end, tile_n = find_tile(current, ends, offsets_ptr, m, tiles_n, BLOCK_M)
        rows, is_row = _rows_of(gather_ptr, row_begin + tile_rows, row_end, num_rows)
        columns = tile_columns(tile_n, n, BLOCK_N, GATED)
        group = group.to(tl.int64)
        acc = accumulate(a_ptr, b_ptr + group * stride_b_g, rows, is_row, columns, columns_b, k, begin, end,
                         stride_a_m, stride_a_k, stride_b_k, stride_b_n, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, "ieee")  # fmt: skip
        complete = end - begin == iters_per_tile
        if not complete:
            inner = tile_rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            acc, complete = merge_split_tile(acc, partials_ptr, counters_ptr, inner, program, split_tile, iters_per_tile,
                                             tail, num_workers, BLOCK_M * BLOCK_N)  # fmt: skip
        if complete:
            if bias_ptr is not None:
                bias = bias_ptr + group * stride_bias_g + columns.to(tl.int64) * stride_bias_n
                acc += tl.load(bias, mask=columns < columns_b, other=0.0).to(tl.float32)[None, :]
            rows, is_row = _rows_of(scatter_ptr, row_begin + tile_rows, row_end, num_out_rows)
            rows = tl.where(is_row, rows, num_out_rows)
            store_tile(out_ptr, None, None, acc, rows, tile_n, num_out_rows, n, stride_out_m, stride_out_n, 0, 0,
                       ACTIVATION, GATED, BLOCK_M, BLOCK_N)  # fmt: skip

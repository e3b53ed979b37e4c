"""Portable Stream-K GEMM: whole tiles in waves, then an even share of the tail's k-steps (arXiv 2301.03598, section 5.2)."""

import triton
import triton.language as tl

from evenshare.device.epilogue import store_tile, tile_columns
from evenshare.device.merge import merge_split_tile
from evenshare.device.segments import next_segment, share_begin

# Row tiles that neighbouring workers take before the next column tile: they share the rows' and the columns' loads through L2.
GROUP_M = tl.constexpr(8)


@triton.jit
def tile_coordinates(tile, tiles_m, tiles_n):
    group = tile // (GROUP_M * tiles_n)
    first_m = group * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tile - group * GROUP_M * tiles_n
    tile_n = within // group_m
    return first_m + within - tile_n * group_m, tile_n


@triton.jit
def accumulate(a_ptr, b_ptr, rows, is_row, columns, n, k, begin, end, stride_a_m, stride_a_k, stride_b_k, stride_b_n,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """The k-steps [begin, end) of one tile: fp32 [BLOCK_M, BLOCK_N]. Rows of a that are none are not read."""
    inner = tl.arange(0, BLOCK_K)
    at = (begin * BLOCK_K + inner).to(tl.int64)
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * stride_a_m + at[None, :] * stride_a_k
    b_ptrs = b_ptr + at[:, None] * stride_b_k + columns.to(tl.int64)[None, :] * stride_b_n
    a_step = tl.cast(stride_a_k, tl.int64) * BLOCK_K
    b_step = tl.cast(stride_b_k, tl.int64) * BLOCK_K
    a_rows = is_row[:, None]
    b_columns = (columns < n)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(begin, end, num_stages=NUM_STAGES):
        left = k - step * BLOCK_K
        a = tl.load(a_ptrs, mask=a_rows & (inner < left)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(inner < left)[:, None] & b_columns, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += a_step
        b_ptrs += b_step
    return acc


# The plan's numbers are not specialised on: no compilation for a plan of one tile or of one k-step.
@triton.jit(do_not_specialize=["alpha", "beta", "num_workers", "num_tiles", "iters_per_tile", "num_whole"])
def matmul(a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr, partials_ptr, counters_ptr, alpha, beta, m, n, k,
           stride_a_batch, stride_a_m, stride_a_k, stride_b_batch, stride_b_k, stride_b_n, stride_out_batch, stride_out_m, stride_out_n,
           stride_residual_batch, stride_residual_m, stride_residual_n, num_workers, num_tiles, iters_per_tile, num_whole,
           ACTIVATION: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr):  # fmt: skip
    """One worker of a `UniformPlan` over the tiles of all products of a batch: its whole tiles, then its share of the tail. An
    iteration is BLOCK_K of k; n: columns of out, of which b has twice as many if GATED."""
    worker = tl.program_id(0)
    tiles_m = tl.cdiv(m, BLOCK_M)
    columns_b = 2 * n if GATED else n
    tiles_n = tl.cdiv(columns_b, BLOCK_N)
    tile_rows = tl.arange(0, BLOCK_M)

    tile = worker
    tail = (num_tiles - num_whole) * iters_per_tile
    position = share_begin(worker, tail, num_workers)
    share_end = share_begin(worker + 1, tail, num_workers)
    while (tile < num_whole) | (position < share_end):
        current, begin, end, split_tile, tile, position = next_segment(
            tile, position, share_end, iters_per_tile, num_whole, num_workers
        )
        batch = current // (tiles_m * tiles_n)
        tile_m, tile_n = tile_coordinates(current - batch * tiles_m * tiles_n, tiles_m, tiles_n)
        batch = batch.to(tl.int64)
        rows = tile_m * BLOCK_M + tile_rows
        columns = tile_columns(tile_n, n, BLOCK_N, GATED)
        acc = accumulate(a_ptr + batch * stride_a_batch, b_ptr + batch * stride_b_batch, rows, rows < m, columns, columns_b, k, begin, end,
                         stride_a_m, stride_a_k, stride_b_k, stride_b_n, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, PRECISION)  # fmt: skip
        complete = end - begin == iters_per_tile
        if not complete:
            inner = tile_rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            acc, complete = merge_split_tile(acc, partials_ptr, counters_ptr, inner, worker, split_tile, iters_per_tile,
                                             tail, num_workers, BLOCK_M * BLOCK_N)  # fmt: skip
        if complete:
            residual = residual_ptr
            if residual_ptr is not None:
                residual = residual_ptr + batch * stride_residual_batch
            store_tile(out_ptr + batch * stride_out_batch, bias_ptr, residual, acc * alpha, rows, tile_n, m, n,
                       stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                       ACTIVATION, GATED, BLOCK_M, BLOCK_N, beta)  # fmt: skip

"""Portable Stream-K GEMM of fp8 codes and their scales: the kernel of matmul.py over numbers that are widened to fp16, exactly.

Every fp8 number is an fp16 number, so the products of codes are exact in float32, on GPUs without fp8 tensor cores too.
"""

import triton
import triton.language as tl

from evenshare.device.epilogue import store_tile, tile_columns
from evenshare.device.merge import merge_split_tile
from evenshare.device.segments import next_segment, share_begin
from evenshare.gemm.kernels.matmul import tile_coordinates

SCALE_BLOCK = tl.constexpr(128)  # of k, and of the columns of b if its scales are of blocks
FP16_NAN = tl.constexpr(0x7E00)


@triton.jit
def _widen(codes, E4M3: tl.constexpr):
    """uint8 codes -> fp16: an e5m2 code is an fp16 number's upper byte; e4m3 has a bit of mantissa more and an exponent whose bias is 8
    less, so that its bits, shifted, are 1 / 256 of the number."""
    bits = codes.to(tl.uint16)
    if E4M3:
        magnitude = bits & 0x7F
        bits = tl.where(magnitude == 0x7F, FP16_NAN, ((bits & 0x80) << 8) | (magnitude << 7)).to(tl.uint16)
    else:
        bits = bits << 8
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def _times_scales(acc, scale_a_ptr, scale_b_ptr, rows, is_row, columns, is_column, block, stride_a_m, stride_a_k, stride_b_k, stride_b_n,
                  A: tl.constexpr, B: tl.constexpr, COLUMNS_PER_SCALE: tl.constexpr):  # fmt: skip
    """acc times the scales of a if A, and those of b if B, of block `block` of k; a pointer that is None has none."""
    if A and scale_a_ptr is not None:
        at = rows.to(tl.int64) * stride_a_m + tl.cast(block, tl.int64) * stride_a_k
        acc *= tl.load(scale_a_ptr + at, mask=is_row, other=0.0)[:, None]
    if B and scale_b_ptr is not None:
        at = (columns // COLUMNS_PER_SCALE).to(tl.int64) * stride_b_n + tl.cast(block, tl.int64) * stride_b_k
        acc *= tl.load(scale_b_ptr + at, mask=is_column, other=0.0)[None, :]
    return acc


@triton.jit
def _accumulate(a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, rows, m, columns, n, k, begin, end, stride_a_m, stride_a_k, stride_b_k, stride_b_n,
                stride_scale_a_m, stride_scale_a_k, stride_scale_b_k, stride_scale_b_n,
                A_E4M3: tl.constexpr, B_E4M3: tl.constexpr, A_BLOCKS: tl.constexpr, COLUMNS_PER_SCALE: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr):  # fmt: skip
    """The k-steps [begin, end) of one tile, scaled: fp32 [BLOCK_M, BLOCK_N]."""
    inner = tl.arange(0, BLOCK_K)
    at = (begin * BLOCK_K + inner).to(tl.int64)
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * stride_a_m + at[None, :] * stride_a_k
    b_ptrs = b_ptr + at[:, None] * stride_b_k + columns.to(tl.int64)[None, :] * stride_b_n
    a_step = tl.cast(stride_a_k, tl.int64) * BLOCK_K
    b_step = tl.cast(stride_b_k, tl.int64) * BLOCK_K
    is_row = rows < m
    is_column = columns < n
    B_BLOCKS: tl.constexpr = COLUMNS_PER_SCALE > 1
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(begin, end, num_stages=NUM_STAGES):
        left = k - step * BLOCK_K
        a = tl.load(a_ptrs, mask=is_row[:, None] & (inner < left)[None, :], other=0)
        b = tl.load(b_ptrs, mask=(inner < left)[:, None] & is_column[None, :], other=0)
        if A_BLOCKS or B_BLOCKS:
            product = tl.dot(_widen(a, A_E4M3), _widen(b, B_E4M3))
            acc += _times_scales(product, scale_a_ptr, scale_b_ptr, rows, is_row, columns, is_column, step * BLOCK_K // SCALE_BLOCK,
                                 stride_scale_a_m, stride_scale_a_k, stride_scale_b_k, stride_scale_b_n,
                                 A_BLOCKS, B_BLOCKS, COLUMNS_PER_SCALE)  # fmt: skip
        else:
            acc = tl.dot(_widen(a, A_E4M3), _widen(b, B_E4M3), acc)
        a_ptrs += a_step
        b_ptrs += b_step
    return _times_scales(acc, scale_a_ptr, scale_b_ptr, rows, is_row, columns, is_column, 0,
                         stride_scale_a_m, stride_scale_a_k, stride_scale_b_k, stride_scale_b_n,
                         not A_BLOCKS, not B_BLOCKS, COLUMNS_PER_SCALE)  # fmt: skip


@triton.jit(
    do_not_specialize=[
        *("alpha", "stride_scale_a_m", "stride_scale_a_k", "stride_scale_b_k", "stride_scale_b_n"),
        *("num_workers", "num_tiles", "iters_per_tile", "num_whole"),
    ]
)
def scaled_matmul(a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, out_ptr, partials_ptr, counters_ptr, alpha, m, n, k,
                  stride_a_m, stride_a_k, stride_b_k, stride_b_n, stride_scale_a_m, stride_scale_a_k, stride_scale_b_k, stride_scale_b_n,
                  stride_out_m, stride_out_n, stride_residual_m, stride_residual_n, num_workers, num_tiles, iters_per_tile, num_whole,
                  A_E4M3: tl.constexpr, B_E4M3: tl.constexpr, A_BLOCKS: tl.constexpr, COLUMNS_PER_SCALE: tl.constexpr,
                  ACTIVATION: tl.constexpr, GATED: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr):  # fmt: skip
    """One worker of a `UniformPlan`: its whole tiles, then its share of the tail. a, b: uint8 codes. alpha: what the sum is multiplied by,
    256 for each operand in e4m3 included. Scales change along k
    if A_BLOCKS or COLUMNS_PER_SCALE is not 1; pointers to them may be None."""
    worker = tl.program_id(0)
    columns_b = 2 * n if GATED else n
    tiles_m = tl.cdiv(m, BLOCK_M)
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
        tile_m, tile_n = tile_coordinates(current, tiles_m, tiles_n)
        rows = tile_m * BLOCK_M + tile_rows
        columns = tile_columns(tile_n, n, BLOCK_N, GATED)
        acc = _accumulate(a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, rows, m, columns, columns_b, k, begin, end,
                          stride_a_m, stride_a_k, stride_b_k, stride_b_n,
                          stride_scale_a_m, stride_scale_a_k, stride_scale_b_k, stride_scale_b_n,
                          A_E4M3, B_E4M3, A_BLOCKS, COLUMNS_PER_SCALE, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES)  # fmt: skip
        complete = end - begin == iters_per_tile
        if not complete:
            inner = tile_rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            acc, complete = merge_split_tile(acc, partials_ptr, counters_ptr, inner, worker, split_tile, iters_per_tile,
                                             tail, num_workers, BLOCK_M * BLOCK_N)  # fmt: skip
        if complete:
            store_tile(out_ptr, bias_ptr, residual_ptr, acc * alpha, rows, tile_n, m, n,
                       stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                       ACTIVATION, GATED, BLOCK_M, BLOCK_N)  # fmt: skip

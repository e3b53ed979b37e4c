"""A weight's canonical codes -> its numbers in memory, at the speed of the stores: 16 bytes of codes a thread, and nothing of a row
passes through shared memory but its codes."""

import triton
import triton.language as tl

from evenshare.quant.kernels.dequantize import FLOAT_OFFSETS, INTEGER_ZEROS, dequantize


@triton.jit(do_not_specialize=["rows", "first", "block_rows", "factor"])
def dequantize_weight(codes_ptr, scales_ptr, zeros_ptr, out_ptr, offsets_ptr, rows, first, block_rows, k, row_bytes, factor,
                      stride_codes_n, stride_codes_k, stride_scales_n, stride_scales_g, stride_zeros_n, stride_zeros_g, stride_out_n,
                      BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, FORM: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """out [blocks * rows, k] = factor W, of each block of `block_rows` rows of W the `rows` rows from `first` on.

    codes [n, row_bytes], scales and zeros [n, groups]. A program, (row, block of columns, block of rows), has BLOCK_K columns of one
    row. GROUP_SIZE may exceed k: one group. offsets: None, or of each block, and past it, of the tokens that are its: a block without
    any is left out.
    """
    GROUPS: tl.constexpr = BLOCK_K // GROUP_SIZE if BLOCK_K > GROUP_SIZE else 1
    COLUMNS: tl.constexpr = BLOCK_K // GROUPS
    BYTES: tl.constexpr = COLUMNS * BITS // 8
    if offsets_ptr is not None:
        if tl.load(offsets_ptr + tl.program_id(2)) >= tl.load(offsets_ptr + tl.program_id(2) + 1):
            return
    row = tl.program_id(0)
    block = tl.program_id(1)
    source = tl.program_id(2).to(tl.int64) * block_rows + first + row

    groups = tl.arange(0, GROUPS)
    at = block * (GROUPS * BYTES) + groups[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    codes = tl.load(
        codes_ptr + source * stride_codes_n + at.to(tl.int64) * stride_codes_k, mask=at < row_bytes, other=0
    )
    codes = codes.to(tl.int32)
    begin = block * BLOCK_K + groups * COLUMNS
    group = (begin // GROUP_SIZE).to(tl.int64)
    scale = tl.load(scales_ptr + source * stride_scales_n + group * stride_scales_g, mask=begin < k, other=0.0)
    scale = scale.to(tl.float32)[:, None] * factor
    zero = scale
    if FORM == INTEGER_ZEROS or FORM == FLOAT_OFFSETS:
        zero = tl.load(zeros_ptr + source * stride_zeros_n + group * stride_zeros_g, mask=begin < k, other=0)
        zero = zero.to(tl.float32)[:, None]
    if FORM == FLOAT_OFFSETS:
        zero *= factor
    weight = dequantize(codes, scale, zero, 0, BITS, FORM)
    if BITS == 4:
        weight = tl.interleave(weight, dequantize(codes, scale, zero, 1, BITS, FORM))
    columns = begin[:, None] + tl.arange(0, COLUMNS)[None, :]
    out_ptr += (tl.program_id(2).to(tl.int64) * rows + row) * stride_out_n
    tl.store(out_ptr + columns, weight.to(out_ptr.dtype.element_ty), mask=columns < k)

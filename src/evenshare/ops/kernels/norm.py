"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450) of rows [outer, inner, D], each read once if it fits a block.

A sum or a mean is fp32, and the output is rounded once. A residual is added before the norm, and the sum rounded once for itself; the
norm takes it unrounded. Outputs may be the inputs: a program has read a block of its rows before it writes it.
"""

import triton
import triton.language as tl


@triton.jit
def _rows(num_rows, inner, BLOCK_M: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    outer = row // inner
    return outer, row - outer * inner, row < num_rows


@triton.jit
def _tile(rows, d, stride):
    return rows[:, None] + (d * stride)[None, :]


@triton.jit
def _load(x_row, residual_row, d, stride_x_dim, stride_residual_dim, inside, HAS_RESIDUAL: tl.constexpr):
    x = tl.load(_tile(x_row, d, stride_x_dim), mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(_tile(residual_row, d, stride_residual_dim), mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _store_normed(x, rstd, residual_row, out_row, weight_ptr, d, stride_residual_dim, stride_weight, stride_out_dim, inside,
                  columns, weight_offset, scale, HAS_RESIDUAL: tl.constexpr, FP8_MAX: tl.constexpr):  # fmt: skip
    if HAS_RESIDUAL:
        at = _tile(residual_row, d, stride_residual_dim)
        tl.store(at, x.to(residual_row.dtype.element_ty), mask=inside)
    weight = tl.load(weight_ptr + d * stride_weight, mask=columns, other=0.0).to(tl.float32) + weight_offset
    y = x * rstd[:, None] * weight[None, :]
    if FP8_MAX > 0:
        y = tl.clamp(y / scale, -FP8_MAX, FP8_MAX)
    tl.store(_tile(out_row, d, stride_out_dim), y.to(out_row.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm(x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, num_rows, inner, eps, weight_offset,
             stride_x_outer, stride_x_inner, stride_x_dim, stride_residual_outer, stride_residual_inner, stride_residual_dim,
             stride_weight, stride_out_outer, stride_out_inner, stride_out_dim,
             D: tl.constexpr, HAS_RESIDUAL: tl.constexpr, FP8_MAX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """out = x / rms(x) * (weight + weight_offset), in codes of `scale` if FP8_MAX > 0; HAS_RESIDUAL: of residual += x."""
    outer, within, valid = _rows(num_rows, inner, BLOCK_M)
    x_row = x_ptr + outer * stride_x_outer + within * stride_x_inner
    out_row = out_ptr + outer * stride_out_outer + within * stride_out_inner
    residual_row = x_row
    if HAS_RESIDUAL:
        residual_row = residual_ptr + outer * stride_residual_outer + within * stride_residual_inner
    scale = 1.0
    if FP8_MAX > 0:
        scale = tl.load(scale_ptr).to(tl.float32)
    if BLOCK_D >= D:
        d = tl.arange(0, BLOCK_D).to(tl.int64)
        columns = d < D
        inside = valid[:, None] & columns[None, :]
        x = _load(x_row, residual_row, d, stride_x_dim, stride_residual_dim, inside, HAS_RESIDUAL)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
        _store_normed(x, rstd, residual_row, out_row, weight_ptr, d, stride_residual_dim, stride_weight, stride_out_dim, inside,
                      columns, weight_offset, scale, HAS_RESIDUAL, FP8_MAX)  # fmt: skip
    else:
        squares = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
            inside = valid[:, None] & (d < D)[None, :]
            x = _load(x_row, residual_row, d, stride_x_dim, stride_residual_dim, inside, HAS_RESIDUAL)
            squares += x * x
        rstd = tl.rsqrt(tl.sum(squares, 1) / D + eps)
        for start in range(0, D, BLOCK_D):
            d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
            columns = d < D
            inside = valid[:, None] & columns[None, :]
            x = _load(x_row, residual_row, d, stride_x_dim, stride_residual_dim, inside, HAS_RESIDUAL)
            _store_normed(x, rstd, residual_row, out_row, weight_ptr, d, stride_residual_dim, stride_weight, stride_out_dim, inside,
                          columns, weight_offset, scale, HAS_RESIDUAL, FP8_MAX)  # fmt: skip


@triton.jit
def _store_layer(
    x, mean, rstd, out_row, weight_ptr, bias_ptr, d, stride_weight, stride_bias, stride_out_dim, inside, columns
):
    weight = tl.load(weight_ptr + d * stride_weight, mask=columns, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + d * stride_bias, mask=columns, other=0.0).to(tl.float32)
    y = (x - mean[:, None]) * rstd[:, None] * weight[None, :] + bias[None, :]
    tl.store(_tile(out_row, d, stride_out_dim), y.to(out_row.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm(x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, inner, eps, stride_x_outer, stride_x_inner, stride_x_dim,
               stride_weight, stride_bias, stride_out_outer, stride_out_inner, stride_out_dim,
               D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """out = (x - mean) / sqrt(variance + eps) * weight + bias; the variance is that of centred values."""
    outer, within, valid = _rows(num_rows, inner, BLOCK_M)
    x_row = x_ptr + outer * stride_x_outer + within * stride_x_inner
    out_row = out_ptr + outer * stride_out_outer + within * stride_out_inner
    if BLOCK_D >= D:
        d = tl.arange(0, BLOCK_D).to(tl.int64)
        columns = d < D
        inside = valid[:, None] & columns[None, :]
        x = _load(x_row, x_row, d, stride_x_dim, stride_x_dim, inside, False)
        mean = tl.sum(x, 1) / D
        centred = tl.where(columns[None, :], x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, 1) / D + eps)
        _store_layer(
            x, mean, rstd, out_row, weight_ptr, bias_ptr, d, stride_weight, stride_bias, stride_out_dim, inside, columns
        )
    else:
        sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
            inside = valid[:, None] & (d < D)[None, :]
            sums += _load(x_row, x_row, d, stride_x_dim, stride_x_dim, inside, False)
        mean = tl.sum(sums, 1) / D
        squares = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
            inside = valid[:, None] & (d < D)[None, :]
            x = _load(x_row, x_row, d, stride_x_dim, stride_x_dim, inside, False)
            centred = tl.where((d < D)[None, :], x - mean[:, None], 0.0)
            squares += centred * centred
        rstd = tl.rsqrt(tl.sum(squares, 1) / D + eps)
        for start in range(0, D, BLOCK_D):
            d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
            columns = d < D
            inside = valid[:, None] & columns[None, :]
            x = _load(x_row, x_row, d, stride_x_dim, stride_x_dim, inside, False)
            _store_layer(
                x,
                mean,
                rstd,
                out_row,
                weight_ptr,
                bias_ptr,
                d,
                stride_weight,
                stride_bias,
                stride_out_dim,
                inside,
                columns,
            )

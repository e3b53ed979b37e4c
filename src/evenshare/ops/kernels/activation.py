"""Gated activations: ACTIVATION(gate) * up of rows [gate | up], in fp32, rounded once."""

import triton
import triton.language as tl


@triton.jit
def gated_activation(x_ptr, out_ptr, num_rows, inner, width, stride_x_outer, stride_x_inner, stride_x_dim,
                     stride_out_outer, stride_out_inner, stride_out_dim,
                     ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    outer = row // inner
    within = row - outer * inner
    d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (row < num_rows)[:, None] & (d < width)[None, :]
    x_row = x_ptr + (outer * stride_x_outer + within * stride_x_inner)[:, None]
    gate = tl.load(x_row + (d * stride_x_dim)[None, :], mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_row + ((d + width) * stride_x_dim)[None, :], mask=inside, other=0.0).to(tl.float32)
    y = ACTIVATION(gate) * up
    out_at = out_ptr + (outer * stride_out_outer + within * stride_out_inner)[:, None] + (d * stride_out_dim)[None, :]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=inside)

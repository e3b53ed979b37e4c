"""What the transforms of an attention variant do with the D numbers of a head, for the code that is generated from them.

A tile of vectors has them along AXIS, padded past D; d holds the numbers 0, 1, 2, ... along that axis.
"""

import triton
import triton.language as tl

from evenshare.device.arithmetic import inside


@triton.jit
def element(rows, index, valid, D: tl.constexpr):
    """Elements `index` of the vectors that begin at the pointers `rows`, in fp32; 0 outside them and where not valid."""
    return tl.load(rows + index, mask=valid & inside(index, D), other=0.0).to(tl.float32)


@triton.jit
def row_sum(x, d, D: tl.constexpr, AXIS: tl.constexpr):
    return tl.sum(tl.where(d < D, x, 0.0), AXIS, keep_dims=True)


@triton.jit
def row_mean(x, d, D: tl.constexpr, AXIS: tl.constexpr):
    return row_sum(x, d, D, AXIS) / D


@triton.jit
def row_max(x, d, D: tl.constexpr, AXIS: tl.constexpr):
    return tl.max(tl.where(d < D, x, float("-inf")), AXIS, keep_dims=True)


@triton.jit
def row_min(x, d, D: tl.constexpr, AXIS: tl.constexpr):
    return tl.min(tl.where(d < D, x, float("inf")), AXIS, keep_dims=True)

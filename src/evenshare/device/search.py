"""Search among values that a program has in its registers: no round trips to global memory."""

import triton
import triton.language as tl


@triton.jit
def count_at_most(ascending, value, SIZE: tl.constexpr):
    """Elementwise: how many of the first SIZE - 1 of SIZE ascending values (a power of two) are <= value.

    That is a position, and the number of all that are <= value wherever value is below the last of them."""
    count = tl.zeros_like(value).to(tl.int32)
    half = SIZE // 2
    while half > 0:
        count += tl.where(tl.gather(ascending, count + (half - 1), 0) <= value, half, 0)
        half = half // 2
    return count


@triton.jit
def pick(values, position):
    """values[position] of a vector, for a scalar position: what every thread then knows."""
    return tl.sum(tl.gather(values, tl.zeros([1], tl.int32) + position, 0), 0)

"""A kernel that reads memory and does as little else as possible."""

import triton
import triton.language as tl


@triton.jit
def read_all(x_ptr, sums_ptr, num_blocks, BLOCK: tl.constexpr):
    """sums[w] = sum of the int32 blocks w, w + P, w + 2P, ... of x: one word is written for many blocks read."""
    worker = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for block in range(worker, num_blocks, tl.num_programs(0)):
        total += tl.load(x_ptr + tl.cast(block, tl.int64) * BLOCK + lanes)
    tl.store(sums_ptr + worker, tl.sum(total, 0))

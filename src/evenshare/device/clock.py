"""The clock that an attention kernel reads when its run is profiled (`report.profile`).

It is the GPU's %globaltimer: nanoseconds, the same on all SMs, in ticks of 32 ns to 1 us (`Summary.resolution_ns` says which).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer, smid

# Columns of the times, int64 [segments, CONSUMERS, TIME_COLUMNS]. What does not happen stays 0.
START = tl.constexpr(0)
# The first block of keys is there. The portable kernel does not see it arrive; hopper_prefill, which multiplies the next segment's
# first block beside the last one's values, notes it at the segment's start.
KEYS = tl.constexpr(1)
MERGE = tl.constexpr(2)  # the tile's last arriver begins to merge
END = tl.constexpr(3)
SM = tl.constexpr(4)
TIME_COLUMNS = tl.constexpr(5)
CONSUMERS = tl.constexpr(2)  # of a worker, at most: each has times of its own


@triton.jit
def record(times_ptr, segment, COLUMN: tl.constexpr, consumer: tl.constexpr = 0):
    """Note the time, by one thread of the caller's warps. Without times (None) this is no instruction."""
    if times_ptr is not None:
        times = times_ptr + (tl.cast(segment, tl.int64) * CONSUMERS + consumer) * TIME_COLUMNS
        tl.store(times + COLUMN, globaltimer())
        if COLUMN == START:
            tl.store(times + SM, smid().to(tl.int64))

"""The last-arriver protocol: how the contributors of a split tile agree on who merges. No one ever waits.

A contributor stores its fp32 partial with ordinary stores and calls `arrive`. Exactly one contributor of the tile gets
True: the last one. All partials are then visible to it; it reads them in tile order (its own too), so the result does
not depend on who was last, and the counter is zero again for the next launch.
"""

import triton
import triton.language as tl


@triton.jit
def arrive(counter_ptr, num_contributors):
    # Without this barrier no bar.sync is emitted before the atomic, and warps that have not stored yet are overtaken.
    tl.debug_barrier()
    seen = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    last = seen == num_contributors - 1
    if last:
        tl.store(counter_ptr, 0)
    return last

"""The last-arriver protocol: how the contributors of a split tile agree on who merges. No one ever waits.

A contributor stores its fp32 partial with ordinary stores and calls `arrive`. Exactly one contributor of the tile gets
True: the last one. All partials are then visible to it; it reads them in tile order (its own too), so the result does
not depend on who was last, and the counter is zero again for the next launch.
"""

import triton
import triton.language as tl

from evenshare.device.segments import first_contributor, partial_slot, slot_of_contributor


@triton.jit
def arrive(counter_ptr, num_contributors):
    # Without this barrier no bar.sync is emitted before the atomic, and warps that have not stored yet are overtaken.
    tl.debug_barrier()
    seen = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    last = seen == num_contributors - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def merge_split_tile(acc, partials_ptr, counters_ptr, inner, worker, split_tile, iters_per_tile, total, num_workers,
                     TILE_ELEMENTS: tl.constexpr):  # fmt: skip
    """Hand in `worker`'s partial sum of tile `split_tile` of a `UniformPlan`'s tail: (sum of all partials, True) for the last
    arriver, (its own partial, False) for the others.

    acc: fp32, TILE_ELEMENTS values. inner: their offsets within a slot. split_tile counts from the tail's first tile;
    total: iterations of the tail.
    """
    tile_begin = split_tile * iters_per_tile
    slot = partial_slot(worker, tile_begin, total, num_workers).to(tl.int64)
    tl.store(partials_ptr + slot * TILE_ELEMENTS + inner, acc)
    first = first_contributor(tile_begin, total, num_workers).to(tl.int32)
    last = first_contributor(tile_begin + iters_per_tile - 1, total, num_workers).to(tl.int32)
    is_last = arrive(counters_ptr + split_tile, last - first + 1)
    if is_last:
        acc = tl.zeros_like(acc)
        first_slot = partial_slot(first, tile_begin, total, num_workers)
        for i in range(first, last + 1):
            slot = slot_of_contributor(i, first, first_slot).to(tl.int64)
            acc += tl.load(partials_ptr + slot * TILE_ELEMENTS + inner)
    return acc, is_last

"""Partial sums of tiles that several workers share, in memory in the order of the threads' registers (Gluon).

A thread of an accumulator holds pairs of neighbouring columns in rows 8 apart. Row by row a warp's access would touch 8 lines for
256 bytes; in the threads' order it is one stretch, 16 bytes a thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from evenshare.device.gluon import barrier, halves
from evenshare.device.segments import first_contributor, slot_of_contributor

COLUMNS_AT_ONCE = gl.constexpr(64)  # of a sum that is read: registers beside the sum's


@gluon.jit
def _in_thread_order(x):
    """An accumulator [16 warps, columns] -> [columns / 8, 128 warps], four of each thread side by side: no register moves."""
    WARPS: gl.constexpr = x.shape[0] // 16
    NUM: gl.constexpr = x.shape[1] // 8
    x = gl.reshape(x, [WARPS, 2, 8, NUM, 4, 2])
    return gl.reshape(gl.permute(x, [3, 0, 2, 4, 1, 5]), [NUM, 128 * WARPS])


@gluon.jit
def _from_thread_order(x):
    """The inverse of `_in_thread_order`."""
    WARPS: gl.constexpr = x.shape[1] // 128
    NUM: gl.constexpr = x.shape[0]
    x = gl.permute(gl.reshape(x, [NUM, WARPS, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    return gl.reshape(x, [16 * WARPS, 8 * NUM])


@gluon.jit
def _pointers(ptr, like):
    """Of numbers in the threads' order: a thread's place, and from there on constants."""
    layout: gl.constexpr = like.type.layout
    within = gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, layout)).expand_dims(0)
    return (ptr + within) + gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, layout)).expand_dims(1) * like.shape[1]


@gluon.jit
def store_partial(ptr, acc):
    """acc [16 warps, columns] to the ptr of as many numbers, by all threads that hold it."""
    values = _in_thread_order(acc)
    gl.store(_pointers(ptr, values), values)


@gluon.jit
def arrive(counter_ptr, tile_begin, iters_per_tile, tail, num_workers):
    """A contributor has stored its partial of the tile of the tail's iterations from tile_begin on: (whether it is the last one to
    do so, the tile's first contributor, the last)."""
    first = first_contributor(tile_begin, tail, num_workers).to(gl.int32)
    last = first_contributor(tile_begin + iters_per_tile - 1, tail, num_workers).to(gl.int32)
    barrier()
    is_last = gl.atomic_add(counter_ptr, 1, sem="acq_rel") == last - first
    if is_last:
        gl.store(counter_ptr, 0)
    return is_last, first, last


@gluon.jit
def _joined(left, right):
    """As columns beside each other: no register moves."""
    return gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [left.shape[0], 2 * left.shape[1]])


@gluon.jit
def _sum(ptr, like, first, last, first_slot, SLOT: gl.constexpr, AT_ONCE: gl.constexpr):
    """AT_ONCE partials are under way together: one takes as long to arrive as several steps to be multiplied."""
    total = gl.zeros_like(like)
    for begin in range(first, last + 1, AT_ONCE):
        partials = ()
        for i in gl.static_range(AT_ONCE):
            slot = slot_of_contributor(begin + i, first, first_slot).to(gl.int64)
            partials = partials + (gl.load(_pointers(ptr + slot * SLOT, like), mask=begin + i <= last, other=0.0),)
        for i in gl.static_range(AT_ONCE):
            total += partials[i]
    return _from_thread_order(total)


@gluon.jit
def merge(acc, ptr, first, last, first_slot, SLOT: gl.constexpr, AT_ONCE: gl.constexpr):
    """The sum of all partials of a tile, of SLOT numbers each, in its order; like acc, which is one of them. Of up to 256 columns
    64 after another: loads want registers beside the sum's, 32 a thread for each of AT_ONCE."""
    like = acc
    if acc.shape[1] > COLUMNS_AT_ONCE:
        like, _r = halves(like)
    if acc.shape[1] > 2 * COLUMNS_AT_ONCE:
        like, _r = halves(like)
    part: gl.constexpr = like.shape[0] * like.shape[1]
    like = _in_thread_order(like)
    merged = _sum(ptr, like, first, last, first_slot, SLOT, AT_ONCE)
    if acc.shape[1] > COLUMNS_AT_ONCE:
        merged = _joined(merged, _sum(ptr + part, like, first, last, first_slot, SLOT, AT_ONCE))
    if acc.shape[1] > 2 * COLUMNS_AT_ONCE:
        c = _sum(ptr + 2 * part, like, first, last, first_slot, SLOT, AT_ONCE)
        d = _sum(ptr + 3 * part, like, first, last, first_slot, SLOT, AT_ONCE)
        merged = _joined(merged, _joined(c, d))
    return gl.convert_layout(merged, acc.type.layout, assert_trivial=True)

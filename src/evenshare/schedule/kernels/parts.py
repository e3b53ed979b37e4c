"""Tiles cut without regard to workers, on the device: `measure_parts` is one program, `fill_parts` a grid over segments."""

import triton
import triton.language as tl

from evenshare.schedule.kernels.segments import BAD_LENGTHS, SEGMENTS_OVERFLOW, clear_segments, store_segment

FIXED_SPLIT = tl.constexpr(1)
BATCH_INVARIANT = tl.constexpr(2)


@triton.jit
def _parts(n, parameter, CUT: tl.constexpr):
    """Parts of a tile of n iterations that is cut without regard to workers."""
    if CUT == FIXED_SPLIT:
        parts = tl.minimum(n, parameter)
    elif CUT == BATCH_INVARIANT:
        parts = n // parameter + (n % parameter > 0)  # rounding up by adding would pass 2^31
    else:
        parts = tl.minimum(n, 1)
    return parts


@triton.jit
def _upper_bound(array_ptr, size, value, mask):
    """Elementwise: the number of array[0:size] that are <= value (ascending array)."""
    low = tl.zeros_like(value).to(tl.int32)
    high = low + size
    span = size
    while span > 0:
        middle = (low + high) // 2
        open_ = low < high
        goes_right = tl.load(array_ptr + middle, mask=mask & open_, other=0) <= value
        low = tl.where(open_ & goes_right, middle + 1, low)
        high = tl.where(open_ & (goes_right == 0), middle, high)
        span = span // 2
    return low


@triton.jit(do_not_specialize=["max_rows", "inner", "parameter", "num_workers", "max_segments"])
def measure_parts(iterations_ptr, num_rows_ptr, part_cum_ptr, slot_cum_ptr, split_cum_ptr, worker_indptr_ptr, status_ptr,
                  max_rows, inner, parameter, num_workers, max_segments,
                  CUT: tl.constexpr, BLOCK: tl.constexpr, WORKER_BLOCK: tl.constexpr):  # fmt: skip
    """Inclusive prefix sums over rows, one tile of each row: parts, parts of split tiles, split tiles. Then worker_indptr.

    The sums are 64 bits wide, so that too many parts are seen as too many."""
    num_rows = tl.minimum(tl.load(num_rows_ptr), max_rows)
    index = tl.arange(0, BLOCK)
    part_total = tl.zeros([], tl.int64)
    slot_total = tl.zeros([], tl.int64)
    split_total = tl.zeros([], tl.int32)
    bad = tl.zeros([], tl.int32)
    for start in range(0, num_rows, BLOCK):
        row = start + index
        mask = row < num_rows
        n = tl.load(iterations_ptr + row, mask=mask, other=0)
        bad |= tl.max((n < 0).to(tl.int32), 0)
        parts = _parts(tl.maximum(n, 0), parameter, CUT).to(tl.int64)
        split = (parts > 1).to(tl.int32)
        tl.store(part_cum_ptr + row, part_total + tl.cumsum(parts, 0), mask=mask)
        tl.store(slot_cum_ptr + row, slot_total + tl.cumsum(parts * split, 0), mask=mask)
        tl.store(split_cum_ptr + row, split_total + tl.cumsum(split, 0), mask=mask)
        part_total += tl.sum(parts, 0)
        slot_total += tl.sum(parts * split, 0)
        split_total += tl.sum(split, 0)
    count = part_total * inner
    tl.store(status_ptr, (count > max_segments).to(tl.int32) * SEGMENTS_OVERFLOW | bad * BAD_LENGTHS)
    count = tl.where(count > max_segments, 0, count).to(tl.int32)
    workers = tl.arange(0, WORKER_BLOCK)
    indptr = workers * (count // num_workers) + tl.minimum(workers, count % num_workers)
    tl.store(worker_indptr_ptr + workers, indptr, mask=workers <= num_workers)


@triton.jit(do_not_specialize=["max_rows", "inner", "parameter", "num_workers", "max_segments"])
def fill_parts(iterations_ptr, num_rows_ptr, part_cum_ptr, slot_cum_ptr, split_cum_ptr, worker_indptr_ptr, segments_ptr,
               max_rows, inner, parameter, num_workers, max_segments, CUT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Part c of all goes to worker c mod P, as its (c // P)-th segment. Rows past the last segment become zero."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_rows = tl.minimum(tl.load(num_rows_ptr), max_rows)
    count = tl.load(worker_indptr_ptr + num_workers)
    mask = c < count
    # Row r holds the parts [inner * part_cum[r - 1], inner * part_cum[r]).
    row = tl.minimum(_upper_bound(part_cum_ptr, num_rows, c // inner, mask), num_rows - 1)
    before = mask & (row > 0)
    n = tl.load(iterations_ptr + row, mask=mask, other=1)
    parts = tl.maximum(_parts(n, parameter, CUT), 1)
    rest = c - tl.load(part_cum_ptr + row - 1, mask=before, other=0) * inner
    within = rest // parts
    j = rest - within * parts
    if CUT == BATCH_INVARIANT:
        begin = j * parameter
        end = tl.minimum(begin + parameter, n)
    else:
        begin = (j.to(tl.int64) * n // parts).to(tl.int32)
        end = ((j + 1).to(tl.int64) * n // parts).to(tl.int32)
    split = parts > 1
    slot_begin = tl.load(slot_cum_ptr + row - 1, mask=before, other=0) * inner + within * parts
    counter = tl.load(split_cum_ptr + row - 1, mask=before, other=0) * inner + within
    position = tl.load(worker_indptr_ptr + c % num_workers, mask=mask, other=0) + c // num_workers
    store_segment(segments_ptr, position, mask, row * inner + within, begin, end, tl.where(split, slot_begin + j, 0),
                  tl.where(split, slot_begin, 0), parts, tl.where(split, counter, 0))  # fmt: skip
    clear_segments(segments_ptr, count, max_segments, tl.program_id(0), tl.num_programs(0), BLOCK)

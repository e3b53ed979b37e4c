"""Even shares and level fill on the device: one launch with a program a worker, and before it, for level fill, one more.

Every program sums up all rows and finds all workers' boundaries for itself, then writes its own worker's segments. That is the same
work many times over, but done at once, in registers; a program that measures for all, and another launch that fills, would cost a
launch and the way through global memory. Nobody waits for anybody, and nothing is left to reset.

A row's tiles cost the same. A boundary is rank << 32 | iteration; a tile's rank is its number among those that are not empty.
"""

import triton
import triton.language as tl

from evenshare.device.search import count_at_most, pick
from evenshare.schedule.kernels.segments import BAD_LENGTHS, clear_segments, store_segment

LOW = tl.constexpr(0xFFFFFFFF)
MOST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _sum_rows(iterations_ptr, num_rows, max_rows, inner, overhead, BLOCK: tl.constexpr):
    """(cost of all tiles, rows that are not empty, largest cost of a tile, 1 if no row before those is empty, 1 if one is negative)."""
    index = tl.arange(0, BLOCK)
    cost = tl.zeros([BLOCK], tl.int64)
    count = tl.zeros([BLOCK], tl.int32)
    last = tl.zeros([BLOCK], tl.int32)  # row that is not empty, plus one; MOST after a negative one
    largest = tl.zeros([BLOCK], tl.int32)
    # A step ahead, the first one not even waiting for num_rows to arrive.
    following = tl.load(iterations_ptr + index, mask=index < max_rows, other=0)
    for start in range(0, num_rows, BLOCK):
        row = start + index
        n = tl.where(row < num_rows, following, 0)
        following = tl.load(iterations_ptr + row + BLOCK, mask=row + BLOCK < num_rows, other=0)
        there = n > 0
        cost += tl.where(there, n.to(tl.int64) + overhead, 0)
        count += there.to(tl.int32)
        last = tl.maximum(last, tl.where(there, row + 1, tl.where(n < 0, MOST, 0)))
        largest = tl.maximum(largest, n)
    filled = tl.sum(count, 0)
    until = tl.max(last, 0)
    largest_cost = tl.max(largest, 0).to(tl.int64) + overhead
    return tl.sum(cost, 0) * inner, filled, largest_cost, (until == filled).to(tl.int32), (until == MOST).to(tl.int32)


@triton.jit
def _find_rows(iterations_ptr, num_rows, number, dense, BLOCK: tl.constexpr):
    """Elementwise: the row that is not empty and has `number` such rows before it. number < their number."""
    found = number
    if dense == 0:
        before = tl.zeros([], tl.int32)
        for start in range(0, num_rows, BLOCK):
            row = start + tl.arange(0, BLOCK)
            there = (tl.load(iterations_ptr + row, mask=row < num_rows, other=0) > 0).to(tl.int32)
            here = number >= before
            found = tl.where(here, start + count_at_most(before + tl.cumsum(there, 0), number, BLOCK), found)
            before += tl.sum(there, 0)
    return found


@triton.jit
def _sum_block(iterations_ptr, start, num_rows, before, numbers_before, dense, inner, overhead, BLOCK: tl.constexpr):
    """Of BLOCK rows from start on: (iterations, cost of the row, inclusive prefix sum of it, number among those that are not empty)."""
    row = start + tl.arange(0, BLOCK)
    n = tl.maximum(tl.load(iterations_ptr + row, mask=row < num_rows, other=0), 0)
    cost = tl.where(n > 0, n.to(tl.int64) + overhead, 0) * inner
    number = row
    if dense == 0:
        number = numbers_before + tl.cumsum((n > 0).to(tl.int32), 0) - 1
    return n, cost, before + tl.cumsum(cost, 0), number


@triton.jit
def _find_in_rows(iterations_ptr, num_rows, bound_cost, dense, inner, overhead, BLOCK: tl.constexpr):
    """Elementwise, of the row in which bound_cost falls: (number among those that are not empty, iterations, cost of the rows before)."""
    begin = tl.zeros_like(bound_cost)
    found = tl.zeros_like(bound_cost)  # number << 32 | iterations
    before = tl.zeros([], tl.int64)
    numbers_before = tl.zeros([], tl.int32)
    for start in range(0, num_rows, BLOCK):
        n, cost, ends, number = _sum_block(
            iterations_ptr, start, num_rows, before, numbers_before, dense, inner, overhead, BLOCK
        )
        position = count_at_most(ends, bound_cost, BLOCK)
        here = bound_cost >= before  # and if it lies behind this block as well, a later one overwrites it
        begin = tl.where(here, tl.gather(ends - cost, position, 0), begin)
        found = tl.where(here, tl.gather((number.to(tl.int64) << 32) | n, position, 0), found)
        before += tl.sum(cost, 0)
        if dense == 0:
            numbers_before += tl.sum((n > 0).to(tl.int32), 0)
    return found >> 32, found & LOW, begin


@triton.jit
def _look_up_in_rows(iterations_ptr, ends_ptr, numbers_ptr, num_rows, bound_cost, mask):
    """The same from the prefix sums of measure_waves: a binary search among many rows."""
    low = tl.zeros_like(bound_cost).to(tl.int32)
    high = low + num_rows
    span = num_rows
    while span > 0:
        middle = (low + high) // 2
        open_ = low < high
        right = tl.load(ends_ptr + middle, mask=mask & open_, other=0) <= bound_cost
        low = tl.where(open_ & right, middle + 1, low)
        high = tl.where(open_ & (right == 0), middle, high)
        span = span // 2
    mask &= low < num_rows
    number = tl.load(numbers_ptr + low, mask=mask, other=0).to(tl.int64)
    n = tl.load(iterations_ptr + low, mask=mask, other=0).to(tl.int64)
    return number, n, tl.load(ends_ptr + low - 1, mask=mask & (low > 0), other=0)


@triton.jit(do_not_specialize=["max_rows", "inner", "overhead", "num_workers"])
def measure_waves(iterations_ptr, num_rows_ptr, totals_ptr, ends_ptr, numbers_ptr, loads_ptr, waves_ptr, status_ptr,
                  max_rows, inner, overhead, num_workers, BLOCK: tl.constexpr, WAVE_BLOCK: tl.constexpr):  # fmt: skip
    """Level fill: loads[rank] = cost of that whole tile and of the worker's ones before it; waves[w] = how many may be whole.

    totals = (cost of all tiles, ranks, whether no row is empty before one that is not), then each worker's cost if all its tiles were
    whole. ends, numbers: prefix sums over rows, of
    cost and of rows that are not empty, a block to a program."""
    w = tl.program_id(0)
    num_rows = tl.minimum(tl.load(num_rows_ptr), max_rows)
    total, rows, largest, dense, bad = _sum_rows(iterations_ptr, num_rows, max_rows, inner, overhead, BLOCK)
    if w == 0:
        tl.store(totals_ptr, total)
        tl.store(totals_ptr + 1, rows.to(tl.int64) * inner)
        tl.store(totals_ptr + 2, dense.to(tl.int64))
        tl.store(status_ptr, bad * BAD_LENGTHS)
    for start in range(w * BLOCK, num_rows, num_workers * BLOCK):
        before, numbers_before, _, _, _ = _sum_rows(iterations_ptr, start, start, inner, overhead, BLOCK)
        _, _, ends, number = _sum_block(
            iterations_ptr, start, num_rows, before, numbers_before, dense, inner, overhead, BLOCK
        )
        row = start + tl.arange(0, BLOCK)
        tl.store(ends_ptr + row, ends, mask=row < num_rows)
        tl.store(numbers_ptr + row, number, mask=row < num_rows)
    num_ranks = rows * inner
    num_waves = num_ranks // num_workers
    own_waves = (num_ranks - w + num_workers - 1) // num_workers
    load = tl.zeros([], tl.int64)
    fit = tl.zeros([], tl.int32)
    for start in range(0, own_waves, WAVE_BLOCK):
        wave = start + tl.arange(0, WAVE_BLOCK)
        mask = wave < own_waves
        rank = tl.where(mask, wave * num_workers + w, 0)
        row = _find_rows(iterations_ptr, num_rows, rank // inner, dense, BLOCK)
        cost = tl.where(mask, tl.load(iterations_ptr + row, mask=mask, other=0).to(tl.int64) + overhead, 0)
        loads = load + tl.cumsum(cost, 0)
        tl.store(loads_ptr + rank, loads, mask=mask)
        fit += tl.sum(((wave < num_waves) & (num_workers * (loads + largest) <= total)).to(tl.int32), 0)
        load += tl.sum(cost, 0)
    tl.store(waves_ptr + w, fit)
    tl.store(totals_ptr + 3 + w, load)


@triton.jit(do_not_specialize=["max_rows", "inner", "overhead", "num_workers", "max_segments", "cut_cost"])
def plan_shares(iterations_ptr, num_rows_ptr, totals_ptr, ends_ptr, numbers_ptr, loads_ptr, waves_ptr,
                worker_indptr_ptr, segments_ptr, status_ptr, max_rows, inner, overhead, num_workers, max_segments, cut_cost,
                LEVEL: tl.constexpr, BLOCK: tl.constexpr, WORKER_BLOCK: tl.constexpr, FILL_BLOCK: tl.constexpr):  # fmt: skip
    """Worker w = program w: whole tiles of the waves (LEVEL; else there are none), then its share of the tail."""
    w = tl.program_id(0)
    index = tl.arange(0, WORKER_BLOCK)
    is_worker = index < num_workers
    num_rows = tl.minimum(tl.load(num_rows_ptr), max_rows)
    if LEVEL:
        total = tl.load(totals_ptr)
        num_ranks = tl.load(totals_ptr + 1)
        dense = tl.load(totals_ptr + 2).to(tl.int32)
        waves = tl.min(tl.load(waves_ptr + index, mask=is_worker, other=MOST), 0)
        load = tl.load(
            loads_ptr + (waves - 1).to(tl.int64) * num_workers + index, mask=is_worker & (waves > 0), other=0
        )
        bound_cost = tl.sum(load, 0) + index.to(tl.int64) * total // num_workers - (tl.cumsum(load, 0) - load)
        number, length, row_begin = _look_up_in_rows(
            iterations_ptr, ends_ptr, numbers_ptr, num_rows, bound_cost, is_worker
        )
    else:
        total, rows, _, dense, bad = _sum_rows(iterations_ptr, num_rows, max_rows, inner, overhead, BLOCK)
        num_ranks = rows.to(tl.int64) * inner
        waves = tl.zeros([], tl.int32)
        bound_cost = index.to(tl.int64) * total // num_workers
        number, length, row_begin = _find_in_rows(iterations_ptr, num_rows, bound_cost, dense, inner, overhead, BLOCK)
        if w == 0:
            tl.store(status_ptr, bad * BAD_LENGTHS)
    # Where the workers' boundaries fall: the row, the tile in it, and what lies behind the tile's constant cost.
    own = tl.maximum(length + overhead, 1)
    within = (bound_cost - row_begin) // own
    inside = tl.maximum(bound_cost - row_begin - within * own - overhead, 0)
    bound = ((number * inner + within) << 32) | inside
    bound = tl.where(is_worker & (bound_cost < total), bound, num_ranks << 32)

    # A cut is a boundary inside a tile that is not the one before it; it counts once, and the first cut of a tile once more above.
    before = tl.gather(bound, tl.maximum(index - 1, 0), 0)
    is_cut = is_worker & ((bound & LOW) > 0) & ((index == 0) | (bound != before))
    is_first_cut = is_cut & ((index == 0) | (before >> 32 != bound >> 32) | ((before & LOW) == 0))
    cuts = is_cut.to(tl.int64) | (is_first_cut.to(tl.int64) << 32)
    lower = pick(bound, w)
    upper = pick(bound, w + 1)
    first_rank = lower >> 32
    last_rank = upper >> 32
    # In the tiles before the share's first; until the share begins; in all tiles until its last.
    cuts_below = tl.sum(tl.where(bound < (first_rank << 32), cuts, 0), 0)
    cuts_until = tl.sum(tl.where(index <= w, cuts, 0), 0)
    cuts_through = tl.sum(tl.where(bound <= (last_rank << 32 | LOW), cuts, 0), 0)
    # Every tile begins a segment and every cut one more.
    num_segments = (num_ranks + (tl.sum(cuts, 0) & LOW)).to(tl.int32)
    segment_begin = waves * (w - num_workers) + (first_rank + (cuts_until & LOW)).to(tl.int32)
    ends_in_cut = (((upper & LOW) > 0) & (upper != lower)).to(tl.int32)
    count = waves + (last_rank - first_rank).to(tl.int32) + ends_in_cut
    if LEVEL:
        whole_loads = tl.load(totals_ptr + 3 + index, mask=is_worker, other=0)
        if num_workers * (tl.max(whole_loads, 0) - cut_cost) <= total:
            num_segments = num_ranks.to(tl.int32)
            segment_begin = w * (num_segments // num_workers) + tl.minimum(w, num_segments % num_workers)
            count = (num_segments - w + num_workers - 1) // num_workers
            waves = count
    if w == 0:
        tl.store(worker_indptr_ptr, 0)
    tl.store(worker_indptr_ptr + 1 + w, segment_begin + count)

    # Of the share's tiles only the first and the last can be split: no boundary lies between its own two.
    first_cuts = tl.where(first_rank == last_rank, cuts_through, cuts_until) - cuts_below
    last_cuts = cuts_through - cuts_until
    for start in range(0, count, FILL_BLOCK):
        k = start + tl.arange(0, FILL_BLOCK)
        mask = k < count
        is_whole = k < waves
        is_first = k == waves
        rank = tl.where(is_whole, k * num_workers + w, first_rank.to(tl.int32) + k - waves)
        rank = tl.where(mask, rank, 0)
        is_last = (is_whole == 0) & (rank == last_rank)
        row = _find_rows(iterations_ptr, num_rows, rank // inner, dense, BLOCK)
        n = tl.load(iterations_ptr + row, mask=mask, other=0)
        begin = tl.where(is_first, lower & LOW, 0)
        end = tl.where(is_last, upper & LOW, n)
        own_cuts = tl.where(is_first, first_cuts, tl.where(is_last, last_cuts, 0)) & LOW
        earlier = tl.where(is_first, cuts_below, cuts_until)
        slot_begin = (earlier & LOW) + (earlier >> 32)
        slot = slot_begin + tl.where(begin > 0, (cuts_until - cuts_below) & LOW, 0)
        split = own_cuts > 0
        store_segment(segments_ptr, segment_begin + k, mask, row * inner + rank % inner, begin, end,
                      tl.where(split, slot, 0), tl.where(split, slot_begin, 0), own_cuts + 1, tl.where(split, earlier >> 32, 0))  # fmt: skip
    clear_segments(segments_ptr, num_segments, max_segments, w, num_workers, FILL_BLOCK)

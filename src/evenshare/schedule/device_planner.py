"""Plans on the device: the prefix-sum policies as two Triton launches, with the host planner's arrays bit for bit.

`measure_*` is one program: prefix sums over the rows, then (for shares) the workers' boundaries. `fill_*` is a grid over segments:
each finds its tile by binary search and writes its row. No sync, no allocation: scratch belongs to the `DevicePlanner`, so
`plan` can be captured in a CUDA graph. This file imports torch only when a planner is made, so its kernels compile without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from evenshare.schedule.plan import Plan
    from evenshare.schedule.policies import Policy
    from evenshare.schedule.space import RaggedSpace

SEGMENT_COLUMNS = tl.constexpr(8)  # schedule.plan
SEGMENTS_OVERFLOW = tl.constexpr(1)  # schedule.plan.Status
FIXED_SPLIT = tl.constexpr(1)
BATCH_INVARIANT = tl.constexpr(2)


@triton.jit
def _parts(n, parameter, CUT: tl.constexpr):
    """Parts of a tile of n iterations that is cut without regard to workers."""
    if CUT == FIXED_SPLIT:
        parts = tl.minimum(n, parameter)
    elif CUT == BATCH_INVARIANT:
        parts = (n + parameter - 1) // parameter
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


@triton.jit(do_not_specialize=["num_rows", "inner", "parameter", "num_workers", "max_segments"])
def measure_parts(iterations_ptr, part_cum_ptr, slot_cum_ptr, split_cum_ptr, worker_indptr_ptr, status_ptr,
                  num_rows, inner, parameter, num_workers, max_segments,
                  CUT: tl.constexpr, BLOCK: tl.constexpr, WORKER_BLOCK: tl.constexpr):  # fmt: skip
    """Inclusive prefix sums over rows, one tile of each row: parts, parts of split tiles, split tiles. Then worker_indptr."""
    index = tl.arange(0, BLOCK)
    part_total = tl.zeros([], tl.int32)
    slot_total = tl.zeros([], tl.int32)
    split_total = tl.zeros([], tl.int32)
    for start in range(0, num_rows, BLOCK):
        row = start + index
        mask = row < num_rows
        parts = _parts(tl.load(iterations_ptr + row, mask=mask, other=0), parameter, CUT)
        split = (parts > 1).to(tl.int32)
        tl.store(part_cum_ptr + row, part_total + tl.cumsum(parts, 0), mask=mask)
        tl.store(slot_cum_ptr + row, slot_total + tl.cumsum(parts * split, 0), mask=mask)
        tl.store(split_cum_ptr + row, split_total + tl.cumsum(split, 0), mask=mask)
        part_total += tl.sum(parts, 0)
        slot_total += tl.sum(parts * split, 0)
        split_total += tl.sum(split, 0)
    count = part_total.to(tl.int64) * inner
    tl.store(status_ptr, (count > max_segments).to(tl.int32) * SEGMENTS_OVERFLOW)
    count = tl.where(count > max_segments, 0, count).to(tl.int32)
    workers = tl.arange(0, WORKER_BLOCK)
    indptr = workers * (count // num_workers) + tl.minimum(workers, count % num_workers)
    tl.store(worker_indptr_ptr + workers, indptr, mask=workers <= num_workers)


@triton.jit(do_not_specialize=["num_rows", "inner", "parameter", "num_workers", "max_segments"])
def fill_parts(iterations_ptr, part_cum_ptr, slot_cum_ptr, split_cum_ptr, worker_indptr_ptr, segments_ptr,
               num_rows, inner, parameter, num_workers, max_segments, CUT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Part c of all goes to worker c mod P, as its (c // P)-th segment. Rows past the last segment become zero."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
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
    position = tl.where(mask, tl.load(worker_indptr_ptr + c % num_workers) + c // num_workers, c)
    _store_segment(segments_ptr, position, c < max_segments, mask, row * inner + within, begin, end,
                   tl.where(split, slot_begin + j, 0), tl.where(split, slot_begin, 0), parts, tl.where(split, counter, 0))  # fmt: skip


@triton.jit
def _store_segment(segments_ptr, position, mask, filled, tile, begin, end, slot, slot_begin, num_slots, counter):
    row = segments_ptr + position * SEGMENT_COLUMNS
    tl.store(row, tl.where(filled, tile, 0), mask=mask)
    tl.store(row + 1, tl.where(filled, begin, 0), mask=mask)
    tl.store(row + 2, tl.where(filled, end, 0), mask=mask)
    tl.store(row + 3, tl.where(filled, slot, 0), mask=mask)
    tl.store(row + 4, tl.where(filled, slot_begin, 0), mask=mask)
    tl.store(row + 5, tl.where(filled, num_slots, 0), mask=mask)
    tl.store(row + 6, tl.where(filled, counter, 0), mask=mask)
    tl.store(row + 7, tl.zeros_like(tile), mask=mask)


@triton.jit
def _cost_before(rank, cost_cum_ptr, rank_cum_ptr, iterations_ptr, num_rows, inner, overhead, mask):
    """(cost of all tiles before the rank-th non-empty one, that tile's own cost), both int64."""
    row = _upper_bound(rank_cum_ptr, num_rows, rank // inner, mask)
    inside = mask & (row < num_rows)
    own = tl.load(iterations_ptr + row, mask=inside, other=0).to(tl.int64) + overhead
    cost = tl.load(cost_cum_ptr + row - 1, mask=mask & (row > 0), other=0) * inner
    rows_before = tl.load(rank_cum_ptr + row - 1, mask=mask & (row > 0), other=0)
    cost += tl.where(inside, (rank - rows_before * inner) * own, 0)
    return cost, tl.where(inside, own, 0)


@triton.jit(do_not_specialize=["num_rows", "inner", "overhead", "num_workers"])
def measure_shares(iterations_ptr, cost_cum_ptr, rank_cum_ptr, bound_ptr, cut_cum_ptr, split_cum_ptr, waves_ptr,
                   worker_indptr_ptr, status_ptr, num_rows, inner, overhead, num_workers,
                   LEVEL: tl.constexpr, BLOCK: tl.constexpr, WORKER_BLOCK: tl.constexpr):  # fmt: skip
    """Prefix sums of cost and of non-empty rows; then each worker's boundary as rank << 32 | iteration, and prefix sums of
    the cuts and of the split tiles over the boundaries."""
    index = tl.arange(0, BLOCK)
    cost_total = tl.zeros([], tl.int64)
    rank_total = tl.zeros([], tl.int32)
    largest = tl.zeros([], tl.int32)
    for start in range(0, num_rows, BLOCK):
        row = start + index
        mask = row < num_rows
        n = tl.load(iterations_ptr + row, mask=mask, other=0)
        there = (n > 0).to(tl.int32)
        cost = (n + overhead * there).to(tl.int64)
        tl.store(cost_cum_ptr + row, cost_total + tl.cumsum(cost, 0), mask=mask)
        tl.store(rank_cum_ptr + row, rank_total + tl.cumsum(there, 0), mask=mask)
        cost_total += tl.sum(cost, 0)
        rank_total += tl.sum(there, 0)
        largest = tl.maximum(largest, tl.max(n + overhead * there, 0))
    tl.debug_barrier()  # the searches below read what other threads have stored
    total = cost_total * inner
    num_ranks = rank_total * inner
    w = tl.arange(0, WORKER_BLOCK)
    is_worker = w < num_workers

    load = tl.zeros([WORKER_BLOCK], tl.int64)
    waves = tl.zeros([], tl.int32)
    if LEVEL:
        trying = num_ranks >= num_workers
        while trying:
            _, own = _cost_before(
                waves * num_workers + w,
                cost_cum_ptr,
                rank_cum_ptr,
                iterations_ptr,
                num_rows,
                inner,
                overhead,
                is_worker,
            )
            tried = load + own
            trying = num_workers * (tl.max(tried, 0) + largest) <= total
            load = tl.where(trying, tried, load)
            waves += trying.to(tl.int32)
            trying = trying & ((waves + 1) * num_workers <= num_ranks)
    loads_before = tl.cumsum(load, 0) - load
    bound_cost = tl.sum(load, 0) + w.to(tl.int64) * total // num_workers - loads_before
    # Where the boundary falls: the row, then the tile in it, then what lies behind the tile's constant cost.
    row = _upper_bound(cost_cum_ptr, num_rows, bound_cost // inner, is_worker)
    found = is_worker & (row < num_rows)
    before = found & (row > 0)
    own = tl.load(iterations_ptr + row, mask=found, other=0).to(tl.int64) + overhead
    own = tl.maximum(own, 1)
    rest = bound_cost - tl.load(cost_cum_ptr + row - 1, mask=before, other=0) * inner
    within = rest // own
    inside = tl.maximum(rest - within * own - overhead, 0)
    rank = tl.load(rank_cum_ptr + row - 1, mask=before, other=0).to(tl.int64) * inner + within
    bound = tl.where(found, (rank << 32) | inside, num_ranks.to(tl.int64) << 32)
    tl.store(bound_ptr + w, bound, mask=w <= num_workers)
    tl.store(waves_ptr, waves)
    tl.debug_barrier()

    previous = tl.load(bound_ptr + w - 1, mask=is_worker & (w > 0), other=-1)
    following = tl.load(bound_ptr + w + 1, mask=is_worker, other=0)
    bound_rank = bound >> 32
    cuts_tile = (bound & 0xFFFFFFFF) > 0
    is_cut = is_worker & cuts_tile & (bound != previous)
    is_first_cut = is_cut & ((previous >> 32 != bound_rank) | ((previous & 0xFFFFFFFF) == 0))
    tl.store(cut_cum_ptr + w, tl.cumsum(is_cut.to(tl.int32), 0), mask=w <= num_workers)
    tl.store(split_cum_ptr + w, tl.cumsum(is_first_cut.to(tl.int32), 0), mask=w <= num_workers)
    tail = (following >> 32) - bound_rank + ((following & 0xFFFFFFFF) > 0).to(tl.int64)
    count = tl.where(is_worker, waves + tl.where(following == bound, 0, tail).to(tl.int32), 0)
    tl.store(worker_indptr_ptr + 1 + w, tl.cumsum(count, 0), mask=is_worker)
    tl.store(worker_indptr_ptr, 0)
    tl.store(status_ptr, 0)


@triton.jit(do_not_specialize=["num_rows", "inner", "num_workers", "max_segments"])
def fill_shares(iterations_ptr, rank_cum_ptr, bound_ptr, cut_cum_ptr, split_cum_ptr, waves_ptr, worker_indptr_ptr, segments_ptr,
                num_rows, inner, num_workers, max_segments, BLOCK: tl.constexpr):  # fmt: skip
    """Segment s: its worker by search in worker_indptr; whole tiles of the waves first, then the worker's share of the tail."""
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = s < tl.load(worker_indptr_ptr + num_workers)
    waves = tl.load(waves_ptr)
    w = _upper_bound(worker_indptr_ptr, num_workers + 1, s, mask) - 1
    w = tl.where(mask, w, 0)
    k = s - tl.load(worker_indptr_ptr + w)
    whole = k < waves
    lower = tl.load(bound_ptr + w)
    upper = tl.load(bound_ptr + w + 1)
    rank = tl.where(whole, k * num_workers + w, (lower >> 32).to(tl.int32) + k - waves)
    row = tl.minimum(_upper_bound(rank_cum_ptr, num_rows, rank // inner, mask), num_rows - 1)
    within = rank - tl.load(rank_cum_ptr + row - 1, mask=mask & (row > 0), other=0) * inner
    n = tl.load(iterations_ptr + row, mask=mask, other=0)
    begin = tl.where(whole | (k > waves), 0, lower & 0xFFFFFFFF).to(tl.int32)
    end = tl.where((whole == 0) & (rank == (upper >> 32)), upper & 0xFFFFFFFF, n).to(tl.int32)
    # The tile's cuts are the boundaries [first, last): same rank, iteration > 0.
    key = rank.to(tl.int64) << 32
    first = _upper_bound(bound_ptr, num_workers, key, mask)
    last = _upper_bound(bound_ptr, num_workers, key | 0xFFFFFFFF, mask)
    cuts_before = tl.load(cut_cum_ptr + first - 1, mask=mask & (first > 0), other=0)
    splits_before = tl.load(split_cum_ptr + first - 1, mask=mask & (first > 0), other=0)
    cuts = tl.load(cut_cum_ptr + last - 1, mask=mask & (last > 0), other=0) - cuts_before
    cuts_until = tl.load(cut_cum_ptr + w, mask=mask, other=0)
    split = cuts > 0
    slot_begin = cuts_before + splits_before
    slot = slot_begin + tl.where(begin > 0, cuts_until - cuts_before, 0)
    _store_segment(segments_ptr, s, s < max_segments, mask, row * inner + within, begin, end,
                   tl.where(split, slot, 0), tl.where(split, slot_begin, 0), cuts + 1, tl.where(split, splits_before, 0))  # fmt: skip


class DevicePlanner:
    """Plans spaces of one shape on their device, again and again, into the same arrays."""

    def __init__(self, space: RaggedSpace, policy: str | Policy, num_workers: int, *, max_iterations: int = 0) -> None:
        """space: fixes the device, the number of rows, inner and overhead; its iterations are not read here.

        max_iterations: over all tiles; a capacity that only batch_invariant needs.
        Raises ValueError for a policy that is no prefix sum (cost_sorted).
        """
        import torch

        from evenshare.schedule.plan import SEGMENT_COLUMNS as COLUMNS
        from evenshare.schedule.plan import Plan
        from evenshare.schedule.policies import DEVICE_POLICIES, Policy, capacity_of

        self.policy = Policy(policy) if isinstance(policy, str) else policy
        if self.policy.name not in DEVICE_POLICIES:
            raise ValueError(
                f"policy: got {self.policy.name!r}, want one of {', '.join(DEVICE_POLICIES)} on the device"
            )
        if num_workers < 1:
            raise ValueError(f"num_workers: got {num_workers}, want 1 or more")
        device = space.iterations.device
        self.inner, self.overhead, self.num_rows = space.inner, space.overhead, space.iterations.shape[0]
        capacity = capacity_of(self.policy, space.num_tiles, num_workers, max_iterations)

        def ints(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._rows = [ints(max(self.num_rows, 1), torch.int64), *(ints(max(self.num_rows, 1)) for _ in range(2))]
        self._workers = [ints(num_workers + 1, torch.int64), *(ints(num_workers + 1) for _ in range(2)), ints(1)]
        self.arrays = Plan(
            num_workers,
            capacity.max_segments,
            capacity.max_slots,
            capacity.max_counters,
            ints(num_workers + 1),
            ints(capacity.max_segments * COLUMNS).view(capacity.max_segments, COLUMNS),
            ints(1),
        )
        # The interpreter's time grows with the blocks.
        self._block, self._fill_block = (16, 16) if device.type == "cpu" else (1024, 128)

    def plan(self, iterations: torch.Tensor) -> Plan:
        """Deal int32 iterations [num_rows] on the planner's device; overwrites and returns the planner's arrays."""
        plan, policy = self.arrays, self.policy
        if iterations.shape != (self.num_rows,) or iterations.device != plan.segments.device:
            raise ValueError(
                f"iterations: got {tuple(iterations.shape)} on {iterations.device}, "
                f"want ({self.num_rows},) on {plan.segments.device}"
            )
        if self.num_rows == 0:
            return plan
        cost, first, second = self._rows
        workers = plan.num_workers
        grid = (triton.cdiv(plan.max_segments, self._fill_block),)
        worker_block = triton.next_power_of_2(workers + 1)
        if policy.name in ("stream_k", "level_fill"):
            bound, cuts, splits, waves = self._workers
            measure_shares[(1,)](
                iterations, cost, first, bound, cuts, splits, waves, plan.worker_indptr, plan.status, self.num_rows, self.inner,
                self.overhead, workers, LEVEL=policy.name == "level_fill", BLOCK=self._block, WORKER_BLOCK=worker_block,
            )  # fmt: skip
            fill_shares[grid](
                iterations, first, bound, cuts, splits, waves, plan.worker_indptr, plan.segments, self.num_rows, self.inner,
                workers, plan.max_segments, BLOCK=self._fill_block,
            )  # fmt: skip
            return plan
        cut = {"data_parallel": 0, "fixed_split": FIXED_SPLIT.value, "batch_invariant": BATCH_INVARIANT.value}[
            policy.name
        ]
        parameter = policy.num_splits if policy.name == "fixed_split" else policy.split_iterations
        measure_parts[(1,)](
            iterations, cost, first, second, plan.worker_indptr, plan.status, self.num_rows, self.inner, parameter, workers,
            plan.max_segments, CUT=cut, BLOCK=self._block, WORKER_BLOCK=worker_block,
        )  # fmt: skip
        fill_parts[grid](
            iterations, cost, first, second, plan.worker_indptr, plan.segments, self.num_rows, self.inner, parameter, workers,
            plan.max_segments, CUT=cut, BLOCK=self._fill_block,
        )  # fmt: skip
        return plan

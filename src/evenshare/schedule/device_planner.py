"""Plans on the device: the prefix-sum policies as two Triton launches, with the host planner's arrays bit for bit.

`measure_*` is one program: prefix sums over the rows, then (for shares) the workers' boundaries. `fill_*` is a grid over segments:
each finds its tile by binary search and writes its row. Level fill takes two launches more, since the loads of whole waves are sums
along each worker. No sync, no allocation: scratch belongs to the `DevicePlanner`, so `plan` can be captured in a CUDA graph. This
file imports torch only when a planner is made or called, so its kernels compile without it.
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
BAD_LENGTHS = tl.constexpr(4)
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


@triton.jit(do_not_specialize=["num_rows", "inner", "parameter", "num_workers", "max_segments"])
def measure_parts(iterations_ptr, part_cum_ptr, slot_cum_ptr, split_cum_ptr, worker_indptr_ptr, status_ptr,
                  num_rows, inner, parameter, num_workers, max_segments,
                  CUT: tl.constexpr, BLOCK: tl.constexpr, WORKER_BLOCK: tl.constexpr):  # fmt: skip
    """Inclusive prefix sums over rows, one tile of each row: parts, parts of split tiles, split tiles. Then worker_indptr.

    The sums are 64 bits wide, so that too many parts are seen as too many."""
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
def _sum_rows(iterations_ptr, cost_cum_ptr, rank_cum_ptr, num_rows, overhead, BLOCK: tl.constexpr):
    """Inclusive prefix sums of cost and of non-empty rows, one tile of each row -> (cost, non-empty rows, largest cost, bad)."""
    index = tl.arange(0, BLOCK)
    cost_total = tl.zeros([], tl.int64)
    rank_total = tl.zeros([], tl.int32)
    largest = tl.zeros([], tl.int64)
    bad = tl.zeros([], tl.int32)
    for start in range(0, num_rows, BLOCK):
        row = start + index
        mask = row < num_rows
        n = tl.load(iterations_ptr + row, mask=mask, other=0)
        bad |= tl.max((n < 0).to(tl.int32), 0)
        there = (n > 0).to(tl.int32)
        cost = tl.where(n > 0, n.to(tl.int64) + overhead, 0)
        tl.store(cost_cum_ptr + row, cost_total + tl.cumsum(cost, 0), mask=mask)
        tl.store(rank_cum_ptr + row, rank_total + tl.cumsum(there, 0), mask=mask)
        cost_total += tl.sum(cost, 0)
        rank_total += tl.sum(there, 0)
        largest = tl.maximum(largest, tl.max(cost, 0))
    return cost_total, rank_total, largest, bad


@triton.jit(do_not_specialize=["num_rows", "inner", "overhead", "num_workers"])
def measure_rows(iterations_ptr, cost_cum_ptr, rank_cum_ptr, totals_ptr, waves_ptr, status_ptr,
                 num_rows, inner, overhead, num_workers, BLOCK: tl.constexpr):  # fmt: skip
    """Level fill, first: prefix sums over rows; totals = (cost of all tiles, non-empty tiles, largest cost); all full waves."""
    cost, ranks, largest, bad = _sum_rows(iterations_ptr, cost_cum_ptr, rank_cum_ptr, num_rows, overhead, BLOCK)
    tl.store(totals_ptr, cost * inner)
    tl.store(totals_ptr + 1, ranks.to(tl.int64) * inner)
    tl.store(totals_ptr + 2, largest)
    tl.store(waves_ptr, ranks * inner // num_workers)
    tl.store(status_ptr, bad * BAD_LENGTHS)


@triton.jit(do_not_specialize=["num_rows", "inner", "overhead", "num_workers"])
def measure_waves(iterations_ptr, rank_cum_ptr, totals_ptr, loads_ptr, waves_ptr,
                  num_rows, inner, overhead, num_workers, BLOCK: tl.constexpr):  # fmt: skip
    """Level fill, second, one program a worker: loads[rank] = cost of that whole tile and of the worker's ones before it.

    The waves that fit are the fewest that fit any worker."""
    w = tl.program_id(0)
    total = tl.load(totals_ptr)
    num_waves = tl.load(totals_ptr + 1).to(tl.int32) // num_workers
    largest = tl.load(totals_ptr + 2)
    load = tl.zeros([], tl.int64)
    fit = tl.zeros([], tl.int32)
    for start in range(0, num_waves, BLOCK):
        wave = start + tl.arange(0, BLOCK)
        mask = wave < num_waves
        rank = tl.where(mask, wave * num_workers + w, 0)
        row = tl.minimum(_upper_bound(rank_cum_ptr, num_rows, rank // inner, mask), num_rows - 1)
        cost = tl.where(mask, tl.load(iterations_ptr + row, mask=mask, other=0).to(tl.int64) + overhead, 0)
        loads = load + tl.cumsum(cost, 0)
        tl.store(loads_ptr + rank, loads, mask=mask)
        fit += tl.sum((mask & (num_workers * (loads + largest) <= total)).to(tl.int32), 0)
        load += tl.sum(cost, 0)
    tl.atomic_min(waves_ptr, fit)


@triton.jit(do_not_specialize=["num_rows", "inner", "overhead", "num_workers"])
def measure_shares(iterations_ptr, cost_cum_ptr, rank_cum_ptr, totals_ptr, loads_ptr, bound_ptr, cut_cum_ptr, split_cum_ptr,
                   waves_ptr, worker_indptr_ptr, status_ptr, num_rows, inner, overhead, num_workers,
                   LEVEL: tl.constexpr, BLOCK: tl.constexpr, WORKER_BLOCK: tl.constexpr):  # fmt: skip
    """Prefix sums over rows (LEVEL: they are there, and so are the loads of the waves); then each worker's boundary as
    rank << 32 | iteration, and prefix sums of the cuts and of the split tiles over the boundaries."""
    w = tl.arange(0, WORKER_BLOCK)
    is_worker = w < num_workers
    if LEVEL:
        total = tl.load(totals_ptr)
        num_ranks = tl.load(totals_ptr + 1)
        waves = tl.load(waves_ptr)
        load = tl.load(loads_ptr + (waves - 1) * num_workers + w, mask=is_worker & (waves > 0), other=0)
    else:
        cost, ranks, _, bad = _sum_rows(iterations_ptr, cost_cum_ptr, rank_cum_ptr, num_rows, overhead, BLOCK)
        tl.debug_barrier()  # the searches below read what other threads have stored
        total = cost * inner
        num_ranks = ranks.to(tl.int64) * inner
        waves = tl.zeros([], tl.int32)
        load = tl.zeros([WORKER_BLOCK], tl.int64)
        tl.store(waves_ptr, waves)
        tl.store(status_ptr, bad * BAD_LENGTHS)
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
    bound = tl.where(found, (rank << 32) | inside, num_ranks << 32)
    tl.store(bound_ptr + w, bound, mask=w <= num_workers)
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
        self._level = self.policy.name == "level_fill"
        self._totals, self._loads = ints(3, torch.int64), ints(space.num_tiles if self._level else 0, torch.int64)
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
        """Deal int32 iterations [num_rows] on the planner's device; overwrites and returns the planner's arrays.

        Values are not read by the host: rows of negative length are taken as empty and set Status.BAD_LENGTHS, more parts than
        the capacity set Status.SEGMENTS_OVERFLOW and leave the plan empty.
        Raises ValueError for another shape, dtype, stride or device.
        """
        import torch

        device = self.arrays.segments.device
        if iterations.shape != (self.num_rows,) or iterations.dtype != torch.int32 or iterations.device != device:
            raise ValueError(
                f"iterations: got {iterations.dtype} {tuple(iterations.shape)} on {iterations.device}, "
                f"want torch.int32 ({self.num_rows},) on {device}"
            )
        if not iterations.is_contiguous():
            raise ValueError(f"iterations: got stride {iterations.stride(0)}, want 1")
        if self.num_rows > 0:
            with torch.cuda.device_of(iterations):  # the tensor's GPU, not the current one
                if self.policy.name in ("stream_k", "level_fill"):
                    self._plan_shares(iterations)
                else:
                    self._plan_parts(iterations)
        return self.arrays

    def _plan_shares(self, iterations: torch.Tensor) -> None:
        plan, block, fill_block = self.arrays, self._block, self._fill_block
        cost, rank, _ = self._rows
        bound, cuts, splits, waves = self._workers
        sizes = (self.num_rows, self.inner, self.overhead, plan.num_workers)
        if self._level:
            measure_rows[(1,)](iterations, cost, rank, self._totals, waves, plan.status, *sizes, BLOCK=block)
            measure_waves[(plan.num_workers,)](
                iterations, rank, self._totals, self._loads, waves, *sizes, BLOCK=fill_block
            )
        measure_shares[(1,)](
            iterations, cost, rank, self._totals, self._loads, bound, cuts, splits, waves, plan.worker_indptr, plan.status, *sizes,
            LEVEL=self._level, BLOCK=block, WORKER_BLOCK=triton.next_power_of_2(plan.num_workers + 1),
        )  # fmt: skip
        fill_shares[(triton.cdiv(plan.max_segments, fill_block),)](
            iterations, rank, bound, cuts, splits, waves, plan.worker_indptr, plan.segments, self.num_rows, self.inner,
            plan.num_workers, plan.max_segments, BLOCK=fill_block,
        )  # fmt: skip

    def _plan_parts(self, iterations: torch.Tensor) -> None:
        plan, policy, fill_block = self.arrays, self.policy, self._fill_block
        parts, slots, splits = self._rows
        cut, parameter = {
            "data_parallel": (0, 1),
            "fixed_split": (FIXED_SPLIT.value, policy.num_splits),
            "batch_invariant": (BATCH_INVARIANT.value, policy.split_iterations),
        }[policy.name]
        sizes = (self.num_rows, self.inner, parameter, plan.num_workers, plan.max_segments)
        measure_parts[(1,)](
            iterations, parts, slots, splits, plan.worker_indptr, plan.status, *sizes,
            CUT=cut, BLOCK=self._block, WORKER_BLOCK=triton.next_power_of_2(plan.num_workers + 1),
        )  # fmt: skip
        fill_parts[(triton.cdiv(plan.max_segments, fill_block),)](
            iterations, parts, slots, splits, plan.worker_indptr, plan.segments, *sizes, CUT=cut, BLOCK=fill_block,
        )  # fmt: skip

"""Plans on the host: each policy turns a space into segments in (tile, begin) order, `assemble` turns those into a `Plan`."""

from __future__ import annotations

import heapq
from dataclasses import replace

import torch

from evenshare.schedule.plan import SEGMENT_COLUMNS, Plan
from evenshare.schedule.policies import PlanCapacity, Policy, capacity_of
from evenshare.schedule.space import RaggedSpace

# (tile, begin, end, worker, rank), int64, in (tile, begin) order; a worker runs its segments by ascending rank.
Segments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_plan(
    space: RaggedSpace,
    policy: str | Policy,
    num_workers: int,
    *,
    num_splits: int | None = None,
    split_iterations: int | None = None,
    max_chunk: int | None = None,
    max_iterations: int | None = None,
    out: Plan | None = None,
) -> Plan:
    """Deal a space whose iterations are on the host.

    policy: a name or a `Policy`; the keywords override its parameters. max_iterations: capacity for policies that cut at fixed
    places, in iterations over all tiles; None: what this space has. out: a plan of the same capacity, on any device, whose tensors
    are overwritten in place (a CUDA graph that reads them goes on to read the new plan) and which is returned.
    Raises ValueError for an unknown policy, num_workers < 1, negative iterations, a space beyond the capacity, or an `out` of
    another capacity; nothing is written then.
    """
    policy = Policy(policy) if isinstance(policy, str) else policy
    given = {"num_splits": num_splits, "split_iterations": split_iterations, "max_chunk": max_chunk}
    policy = replace(policy, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    if num_workers < 1:
        raise ValueError(f"num_workers: got {num_workers}, want 1 or more")
    lengths = space.tile_iterations()
    if bool((lengths < 0).any()):
        raise ValueError(f"iterations: got {int(lengths.min())}, want 0 or more")
    total = int(lengths.sum())
    capacity = capacity_of(policy, space.num_tiles, num_workers, total if max_iterations is None else max_iterations)
    if policy.name == "cost_sorted" and policy.max_chunk == 0:
        policy = replace(policy, max_chunk=max(-(-total // num_workers), 1))
    if policy.name in ("stream_k", "level_fill"):
        segments = _shares(lengths, space, num_workers, level=policy.name == "level_fill")
    elif policy.name == "cost_sorted":
        segments = _cost_sorted(lengths, space.overhead, num_workers, policy.max_chunk)
    else:
        segments = _dealt_parts(lengths, policy, num_workers)
    if segments[0].numel() > capacity.max_segments:
        raise ValueError(
            f"space: got {segments[0].numel()} segments, want at most the capacity of {capacity.max_segments}"
        )
    plan = assemble(segments, space.num_tiles, num_workers, capacity)
    return plan if out is None else _overwrite(out, plan)


def _overwrite(out: Plan, plan: Plan) -> Plan:
    for name in ("num_workers", "max_segments", "max_slots", "max_counters"):
        if getattr(out, name) != getattr(plan, name):
            raise ValueError(f"out: got a plan with {name} {getattr(out, name)}, want {getattr(plan, name)}")
    for name in ("worker_indptr", "segments", "status"):
        getattr(out, name).copy_(getattr(plan, name), non_blocking=True)
    return out


def assemble(segments: Segments, num_tiles: int, num_workers: int, capacity: PlanCapacity) -> Plan:
    """Number the partials and counters in tile order, then store the segments in worker order."""
    tile, begin, end, worker, rank = segments
    count = torch.bincount(tile, minlength=num_tiles)
    split = count > 1
    slot_begin = torch.cumsum(torch.where(split, count, 0), 0) - torch.where(split, count, 0)
    counter = torch.cumsum(split.long(), 0) - split.long()
    first = torch.cumsum(count, 0) - count  # index of the tile's first segment
    is_partial = split[tile]
    index = torch.arange(tile.numel())
    slot = torch.where(is_partial, slot_begin[tile] + index - first[tile], 0)
    rows = torch.stack(
        [
            tile,
            begin,
            end,
            slot,
            torch.where(is_partial, slot_begin[tile], 0),
            count[tile],
            torch.where(is_partial, counter[tile], 0),
            torch.zeros_like(tile),
        ],
        1,
    )
    by_rank = torch.argsort(rank, stable=True)
    order = by_rank[torch.argsort(worker[by_rank], stable=True)]
    table = torch.zeros(capacity.max_segments, SEGMENT_COLUMNS, dtype=torch.int32)
    table[: tile.numel()] = rows[order]
    indptr = torch.zeros(num_workers + 1, dtype=torch.int32)
    indptr[1:] = torch.cumsum(torch.bincount(worker, minlength=num_workers), 0)
    status = torch.zeros(1, dtype=torch.int32)
    return Plan(num_workers, capacity.max_segments, capacity.max_slots, capacity.max_counters, indptr, table, status)


def _dealt_parts(lengths: torch.Tensor, policy: Policy, num_workers: int) -> Segments:
    """Tiles cut without regard to workers; part c goes to worker c mod P."""
    if policy.name == "data_parallel":
        parts = (lengths > 0).long()
    elif policy.name == "fixed_split":
        parts = lengths.clamp(max=policy.num_splits)
    else:
        parts = -(-lengths // policy.split_iterations)
    tile = torch.repeat_interleave(torch.arange(lengths.numel()), parts)
    index = torch.arange(tile.numel())
    j = index - (torch.cumsum(parts, 0) - parts)[tile]
    n, s = lengths[tile], parts[tile]
    if policy.name == "batch_invariant":
        begin, end = j * policy.split_iterations, torch.minimum((j + 1) * policy.split_iterations, n)
    else:
        begin, end = j * n // s, (j + 1) * n // s
    return tile, begin, end, index % num_workers, index


def _shares(lengths: torch.Tensor, space: RaggedSpace, num_workers: int, level: bool) -> Segments:
    """Whole tiles in waves (none unless `level`), then the rest in shares that bring every worker to the same cost.

    With `level`, if no worker is more than cut_cost above that cost when all tiles are dealt in waves, all of them are.

    In cost space tile t begins with `overhead` units of constant cost and goes on with its iterations. A boundary inside the
    constant part moves to the tile's begin: nobody pays a prologue for nothing.
    """
    tiles = torch.nonzero(lengths).flatten()
    n = lengths[tiles]
    overhead = space.overhead
    cost = n + overhead
    cost_begin = torch.cumsum(cost, 0) - cost
    total = int(cost.sum())
    if level and tiles.numel() and num_workers * (_largest_load(cost, num_workers) - space.cut_cost) <= total:
        index = torch.arange(tiles.numel())
        return tiles, torch.zeros_like(n), n, index % num_workers, index
    waves, load = _whole_waves(cost, num_workers) if level else (0, torch.zeros(num_workers, dtype=torch.int64))
    num_whole = waves * num_workers
    # Worker w ends where the workers up to it have w * total / P of the whole cost, their whole tiles counted.
    workers = torch.arange(num_workers + 1)
    loads_before = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(load, 0)])
    whole_cost = int(load.sum())
    bound = whole_cost + workers * total // num_workers - loads_before
    # Boundaries in iterations: position of the tile plus what lies behind its constant cost.
    position = torch.cumsum(n, 0) - n
    at = torch.searchsorted(cost_begin + cost, bound[:-1], right=True)
    inside = (bound[:-1] - cost_begin[at] - overhead).clamp(min=0) if tiles.numel() else bound[:-1]
    iterations = int(n.sum())
    bound_at = torch.cat([(position[at] + inside) if tiles.numel() else inside, torch.tensor([iterations])])

    tail_begin = int(position[num_whole]) if num_whole < tiles.numel() else iterations
    starts = position[num_whole:]
    cuts = torch.unique(torch.cat([starts, bound_at, torch.tensor([iterations])]))
    cuts = cuts[cuts >= tail_begin]
    low, high = cuts[:-1], cuts[1:]
    at = torch.searchsorted(position, low, right=True) - 1
    worker = torch.searchsorted(bound_at[1:], low, right=True)
    whole = torch.arange(num_whole)
    tile = torch.cat([tiles[whole], tiles[at]])
    begin = torch.cat([torch.zeros_like(whole), low - position[at]])
    end = torch.cat([n[whole], high - position[at]])
    return tile, begin, end, torch.cat([whole % num_workers, worker]), torch.arange(tile.numel())


def _largest_load(cost: torch.Tensor, num_workers: int) -> int:
    """Of whole tiles dealt in waves."""
    padded = torch.nn.functional.pad(cost, (0, -cost.numel() % num_workers))
    return int(padded.reshape(-1, num_workers).sum(0).max())


def _whole_waves(cost: torch.Tensor, num_workers: int) -> tuple[int, torch.Tensor]:
    """(waves, load of each worker): as many waves as leave every worker at least the largest tile's cost of the even share.

    So each tile of the tail is cut at most once or twice; for equal tiles this is the two-tile Stream-K + data-parallel schedule
    (Stream-K, section 5.2), and plain data-parallel if the tiles are a multiple of the workers.
    """
    full = cost.numel() // num_workers
    loads = torch.cumsum(cost[: full * num_workers].reshape(full, num_workers), 0)
    if full == 0:
        return 0, torch.zeros(num_workers, dtype=torch.int64)
    fits = num_workers * (loads.amax(1) + cost.max()) <= cost.sum()
    waves = int(fits.sum())  # loads grow with the waves, so the ones that fit come first
    return waves, loads[waves - 1] if waves else torch.zeros(num_workers, dtype=torch.int64)


def _cost_sorted(lengths: torch.Tensor, overhead: int, num_workers: int, max_chunk: int) -> Segments:
    """FlashInfer, algorithm 1: chunks of at most max_chunk iterations, longest first, each to the least loaded worker."""
    parts = -(-lengths // max_chunk)
    tile = torch.repeat_interleave(torch.arange(lengths.numel()), parts)
    j = torch.arange(tile.numel()) - (torch.cumsum(parts, 0) - parts)[tile]
    n, s = lengths[tile], parts[tile]
    begin, end = j * n // s, (j + 1) * n // s
    order = torch.argsort(end - begin, descending=True, stable=True)
    costs = (end - begin + overhead)[order].tolist()
    dealt = []  # the worker of each chunk, in that order; plain ints, since indexing a tensor costs a microsecond and more
    queue = [(0, w) for w in range(num_workers)]
    for cost in costs:
        load, w = queue[0]
        dealt.append(w)
        heapq.heapreplace(queue, (load + cost, w))
    worker, rank = torch.empty_like(tile), torch.empty_like(tile)
    worker[order] = torch.tensor(dealt, dtype=torch.int64)
    rank[order] = torch.arange(tile.numel())
    return tile, begin, end, worker, rank

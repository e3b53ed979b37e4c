"""Closed-form plans of equal tiles."""

from __future__ import annotations

import torch

from evenshare.schedule.host_planner import assemble
from evenshare.schedule.plan import Plan, UniformPlan
from evenshare.schedule.policies import Policy, capacity_of


def uniform_plan(num_tiles: int, iters_per_tile: int, num_workers: int, split: bool = True) -> UniformPlan:
    """Level fill of equal tiles: whole waves, then a tail of fewer than two tiles a worker, in even shares.

    This is Stream-K's two-tile schedule (section 5.2). Without `split`, or if the tiles are a multiple of the workers, all
    tiles are dealt whole. Never more workers than iterations: the closed form of a tile's contributors has no empty shares.
    Raises ValueError for negative sizes or num_workers < 1.
    """
    if num_tiles < 0 or iters_per_tile < 0:
        raise ValueError(f"num_tiles, iters_per_tile: got {num_tiles} and {iters_per_tile}, want 0 or more")
    if num_workers < 1:
        raise ValueError(f"num_workers: got {num_workers}, want 1 or more")
    num_workers = min(num_workers, max(num_tiles * iters_per_tile, 1))
    if not split or iters_per_tile == 0 or num_tiles % num_workers == 0:
        return UniformPlan(num_workers, num_tiles, iters_per_tile, num_tiles)
    num_whole = max(num_tiles // num_workers - 1, 0) * num_workers
    return UniformPlan(num_workers, num_tiles, iters_per_tile, num_whole)


def expand(plan: UniformPlan) -> Plan:
    """The segments that kernels walk in closed form, as a `Plan`; its slots are side by side, the closed form's are 2w, 2w + 1."""
    workers, iters = plan.num_workers, plan.iters_per_tile
    tail_tiles = plan.num_tiles - plan.num_whole
    total = tail_tiles * iters
    bound = torch.arange(workers + 1) * total // workers
    cuts = torch.unique(torch.cat([bound, torch.arange(tail_tiles + 1) * iters]))
    low, high = cuts[:-1], cuts[1:]
    whole = torch.arange(plan.num_whole)
    tile = torch.cat([whole, plan.num_whole + low // max(iters, 1)])
    begin = torch.cat([torch.zeros_like(whole), low % max(iters, 1)])
    end = begin + torch.cat([torch.full_like(whole, iters), high - low])
    worker = torch.cat([whole % workers, torch.searchsorted(bound[1:], low, right=True)])
    capacity = capacity_of(Policy("level_fill"), plan.num_tiles, workers)
    return assemble((tile, begin, end, worker, torch.arange(tile.numel())), plan.num_tiles, workers, capacity)

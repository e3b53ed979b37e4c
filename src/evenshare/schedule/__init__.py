"""Iteration spaces and policies: who computes what (first version: even share on the host)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from evenshare.schedule.plan import Plan, Status, UniformPlan  # noqa: F401


@dataclass(frozen=True)
class RaggedSpace:
    iterations: torch.Tensor
    inner: int = 1
    overhead: int = 0


def make_plan(space: RaggedSpace, policy: str, num_workers: int, **_: Any) -> Plan:
    """Even share in iteration space."""
    n = space.iterations.long().repeat_interleave(space.inner)
    end = n.cumsum(0)
    start = end - n
    total = int(end[-1]) if len(end) else 0
    bounds = torch.arange(num_workers + 1) * total // num_workers
    cuts = torch.unique(torch.cat([start[n > 0], bounds, torch.tensor([total])]))
    lo, hi = cuts[:-1], cuts[1:]
    tile = torch.searchsorted(end, lo, right=True)
    worker = torch.searchsorted(bounds[1:], lo, right=True)
    count = torch.bincount(tile, minlength=len(n))
    split = count[tile] > 1
    slot = torch.where(split, split.long().cumsum(0) - 1, 0)
    first = torch.zeros(len(n), dtype=torch.long).scatter_reduce(0, tile, slot, "amin", include_self=False)
    counter_of = torch.where(count > 1, (count > 1).long().cumsum(0) - 1, 0)
    cols = [tile, lo - start[tile], hi - start[tile], slot, torch.where(split, first[tile], 0), count[tile], counter_of[tile], tile * 0]
    max_segments = len(n) + num_workers
    segments = torch.zeros(max_segments, 8, dtype=torch.int32)
    segments[: len(tile)] = torch.stack(cols, 1).int()
    indptr = torch.searchsorted(worker, torch.arange(num_workers + 1)).int()
    return Plan(num_workers, max_segments, 2 * num_workers, num_workers, indptr, segments, torch.zeros(1, dtype=torch.int32))


def _to(self: Plan, device: Any) -> Plan:
    return dataclasses.replace(
        self, worker_indptr=self.worker_indptr.to(device), segments=self.segments.to(device), status=self.status.to(device)
    )


Plan.to = _to  # type: ignore[attr-defined]
DevicePlanner: Any = None

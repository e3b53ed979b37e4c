"""A plan played on ideal workers: when each segment runs, who merges, how long it takes. Time is in iterations."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

from evenshare.schedule.plan import BEGIN, COUNTER, END, NUM_SLOTS, TILE, Plan

Kind = Literal["whole", "partial", "merge"]


@dataclass(frozen=True)
class Costs:
    """What is paid besides iterations, in the time of one iteration."""

    segment: float = 0.0  # prologue and epilogue, each time a worker begins with a tile
    store: float = 0.0  # storing a partial and arriving
    merge: float = 0.0  # reading one partial and adding it; the last arriver pays it for every partial of the tile

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) >= 0:
                raise ValueError(f"{field.name}: got {getattr(self, field.name)}, want 0 or more")


class Event(NamedTuple):
    """A worker is busy with `tile` over the times [begin, end)."""

    tile: int
    begin: float
    end: float
    kind: Kind


@dataclass(frozen=True)
class Timeline:
    """What every worker does when, and what the merging moves."""

    workers: tuple[tuple[Event, ...], ...]  # per worker, in order of time
    iterations: int  # useful work, all workers together
    num_segments: int
    num_split_tiles: int
    num_partials: int  # each is written once and read once, by the merger
    iteration_time: float = 1.0  # of one iteration, in the unit of the events

    @property
    def makespan(self) -> float:
        """Time until the last worker is done."""
        return max((events[-1].end for events in self.workers if events), default=0.0)

    @property
    def utilisation(self) -> float:
        """Part of all workers' time that goes into iterations, in (0, 1]; waiting, prologues and merging are the rest. Empty: 1."""
        useful = self.iterations * self.iteration_time
        return useful / (len(self.workers) * self.makespan) if self.makespan else 1.0

    @property
    def idle(self) -> float:
        """Part of all workers' time in which nothing happens."""
        return 1.0 - self.share("whole", "partial", "merge") if self.makespan else 0.0

    def share(self, *kinds: Kind) -> float:
        """Part of all workers' time that goes into events of these kinds."""
        busy = sum(event.end - event.begin for events in self.workers for event in events if event.kind in kinds)
        return busy / (len(self.workers) * self.makespan) if self.makespan else 0.0

    def scaled(self, factor: float) -> Timeline:
        """The same in a unit of time that is `factor` times shorter."""
        workers = tuple(
            tuple(event._replace(begin=event.begin * factor, end=event.end * factor) for event in events)
            for events in self.workers
        )
        return replace(self, workers=workers, iteration_time=self.iteration_time * factor)


def simulate(plan: Plan, costs: Costs = Costs()) -> Timeline:
    """Play a plan whose tensors are on any device (they are copied to the host).

    Every worker starts at 0 and runs its segments back to back. Of a split tile's contributors the one that finishes last merges
    at once and then goes on; nobody waits. Contributors that finish together arrive in the order of their workers.
    Raises ValueError if the plan leaves a split tile without its last arriver.
    """
    indptr = plan.worker_indptr.tolist()
    rows = plan.segments[: indptr[-1]].tolist()
    timeline: list[list[Event]] = [[] for _ in range(plan.num_workers)]
    arrived: dict[int, int] = {}
    split = 0

    def start(worker: int, place: int, now: float) -> None:
        if place == indptr[worker + 1]:
            return
        row = rows[place]
        partial = row[NUM_SLOTS] > 1
        end = now + costs.segment + row[END] - row[BEGIN] + (costs.store if partial else 0.0)
        timeline[worker].append(Event(row[TILE], now, end, "partial" if partial else "whole"))
        heapq.heappush(running, (end, worker, place))

    running: list[tuple[float, int, int]] = []  # (end, worker, place of its segment)
    for worker in range(plan.num_workers):
        start(worker, indptr[worker], 0.0)
    while running:
        now, worker, place = heapq.heappop(running)
        row = rows[place]
        if row[NUM_SLOTS] > 1:
            arrived[row[COUNTER]] = arrived.get(row[COUNTER], 0) + 1
            if arrived[row[COUNTER]] == row[NUM_SLOTS]:
                del arrived[row[COUNTER]]
                split += 1
                end = now + costs.merge * row[NUM_SLOTS]
                timeline[worker].append(Event(row[TILE], now, end, "merge"))
                now = end
        start(worker, place + 1, now)
    if arrived:
        raise ValueError(f"plan: counters {sorted(arrived)} wait for partials that no worker stores")
    return Timeline(
        workers=tuple(map(tuple, timeline)),
        iterations=sum(row[END] - row[BEGIN] for row in rows),
        num_segments=len(rows),
        num_split_tiles=split,
        num_partials=sum(row[NUM_SLOTS] > 1 for row in rows),
    )

"""`evenshare.profile`: when each worker of a plan really does what, beside what the simulator predicts."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from evenshare.attention.executors import TritonExecutor
from evenshare.attention.launch import partial_elements
from evenshare.attention.plan import AttentionPlan
from evenshare.attention.problem import Problem
from evenshare.attention.tiles import TileConfig
from evenshare.device.clock import END, KEYS, MERGE, SM, START
from evenshare.report.timeline import draw_timelines, format_time, save_timelines
from evenshare.schedule.plan import BEGIN, COUNTER, NUM_SLOTS, SEGMENT_COLUMNS, TILE, Plan
from evenshare.schedule.plan import END as END_ITERATION
from evenshare.schedule.simulator import Costs, Event, Timeline, simulate


class Segment(NamedTuple):
    """What a worker did to the iterations [begin, end) of a tile. Times in ns, from the first segment's start."""

    worker: int
    sm: int
    tile: int
    begin: int
    end: int
    split: bool  # whether the tile has other segments
    start_ns: int  # its worker turns to it
    keys_ns: int | None  # its first block of keys is there; None: the kernel does not see it arrive
    merge_ns: int | None  # its worker, the last at this tile, begins to merge; None: another one merges, or nobody
    end_ns: int  # its output, or its partial, is written


@dataclass(frozen=True)
class Summary:
    """A profile in numbers. Shares are of all workers' time, from the first segment's start to the last one's end."""

    makespan_ns: float
    idle: float  # share
    merging: float  # share
    first_keys: float | None  # share that goes by between a segment's start and its first keys; None: not recorded
    longest_worker: int  # the one with the most work
    longest_worker_ns: float
    resolution_ns: int  # of the GPU's clock
    predicted_idle: float
    predicted_merging: float
    predicted_iteration_ns: float  # what one iteration takes if the prediction is right


@dataclass(frozen=True)
class Profile:
    """Where the time of one run went; made by `profile`."""

    title: str
    segments: tuple[Segment, ...]  # worker by worker, in order of time
    simulated: Timeline  # of the same plan, in iterations
    costs: Costs  # that the simulator went by
    partial_bytes: int | None = None  # of a split tile's partial; None: not recorded

    def timeline(self) -> Timeline:
        """What was measured, in ns."""
        workers: list[list[Event]] = [[] for _ in self.simulated.workers]
        for s in self.segments:
            merge = s.end_ns if s.merge_ns is None else s.merge_ns
            events = workers[s.worker]
            events.append(Event(s.tile, s.start_ns, merge, "partial" if s.split else "whole"))
            if s.merge_ns is not None:
                events.append(Event(s.tile, merge, s.end_ns, "merge"))
        return replace(self.simulated, workers=tuple(map(tuple, workers)), iteration_time=self._iteration_ns())

    def predicted(self) -> Timeline:
        """What the simulator says, by the tile's own cost model, in ns: scaled so that it ends when the run did."""
        return self.simulated.scaled(self._iteration_ns())

    def _iteration_ns(self) -> float:
        end = max((s.end_ns for s in self.segments), default=0)
        return end / self.simulated.makespan if end else 1.0

    @property
    def summary(self) -> Summary:
        measured, predicted = self.timeline(), self.predicted()
        busy = [sum(event.end - event.begin for event in events) for events in measured.workers]
        longest = max(range(len(busy)), key=busy.__getitem__, default=0)
        waits = [s.keys_ns - s.start_ns for s in self.segments if s.keys_ns is not None]
        all_time = len(busy) * measured.makespan
        return Summary(
            makespan_ns=measured.makespan,
            idle=measured.idle,
            merging=measured.share("merge"),
            first_keys=sum(waits) / all_time if waits and all_time else None,
            longest_worker=longest,
            longest_worker_ns=busy[longest] if busy else 0.0,
            resolution_ns=math.gcd(*(t for s in self.segments for t in s[-4:] if t is not None)),
            predicted_idle=predicted.idle,
            predicted_merging=predicted.share("merge"),
            predicted_iteration_ns=self._iteration_ns(),
        )

    def draw(self, path: Path | str) -> None:
        """Write a PNG, SVG or PDF: what was measured above, what was predicted below. Raises ValueError for another suffix."""
        timelines = {"measured": self.timeline().scaled(1e-3), "predicted": self.predicted().scaled(1e-3)}
        figure = draw_timelines(timelines, title=self.title, axis="time (us)", columns=1, describe=_shares)
        save_timelines(figure, Path(path))

    def save(self, path: Path | str) -> None:
        """Write title, summary, what the prediction goes by, and segments as JSON."""
        content = {
            "title": self.title,
            "summary": asdict(self.summary),
            "num_workers": len(self.simulated.workers),
            "costs": asdict(self.costs),
            "partial_bytes": self.partial_bytes,
            "segments": [segment._asdict() for segment in self.segments],
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n")

    @staticmethod
    def load(path: Path | str) -> Profile:
        """Read what `save` wrote, and predict the same plan again. Raises ValueError for another file."""
        try:
            content = json.loads(Path(path).read_text())
            segments = tuple(map(_read_segment, content["segments"]))
            costs = Costs(**content["costs"])
            schedule = _schedule_of(segments, content["num_workers"])
            partial_bytes = content.get("partial_bytes")
            if not (partial_bytes is None or (isinstance(partial_bytes, int) and partial_bytes > 0)):
                raise ValueError(f"partial_bytes: got {partial_bytes!r}, want a whole number from 1 on")
            return Profile(str(content["title"]), segments, simulate(schedule, costs), costs, partial_bytes)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            cause = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"profile: got {str(path)!r} ({cause}), want a file that Profile.save wrote") from None

    @property
    def tile_iterations(self) -> tuple[int, ...]:
        """The iterations of each tile."""
        iterations = [0] * max((s.tile + 1 for s in self.segments), default=0)
        for s in self.segments:
            iterations[s.tile] += s.end - s.begin
        return tuple(iterations)


def profile(
    plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, warmup: int = 1, **options: Any
) -> Profile:
    """Run a plan and record when each worker begins, merges and ends each of its segments.

    q, k, v and the options are those of `AttentionPlan.run`; an `out` gets the same bits as from `run`, and must not be q.
    warmup: runs before the one that counts; the first compiles a kernel that reads the clock. The plan's own runs stay as they
    are, and as fast. Use the plan's stream; syncs. Keys that a warm-up left in the L2 arrive faster than those of a real step.

    Raises ValueError for a plan that does not run on a CUDA GPU, and what `AttentionPlan.run` raises.

        recorded = evenshare.profile(plan, q, k_cache, v_cache)
        print(recorded.summary)
        recorded.draw("profile.png")
    """
    if not (isinstance(warmup, int) and warmup >= 0):
        raise ValueError(f"warmup: got {warmup!r}, want 0 or more runs")
    if plan.target.device.type != "cuda":
        raise ValueError(
            f"plan: got one for the {plan.target.device}, want one for a CUDA GPU, whose kernels read a clock"
        )
    timed, executor = plan.timed()
    for _ in range(warmup):
        timed.run(q, k, v, **options)
    return record(timed, executor, q, k, v, **options)


def record(timed: AttentionPlan, executor: TritonExecutor, q: Any, k: Any, v: Any, **options: Any) -> Profile:
    """One run of what `AttentionPlan.timed` returns."""
    assert executor.forward is not None
    assert executor.forward.times is not None
    assert executor.schedule is not None
    times = executor.forward.times.zero_()
    timed.run(q, k, v, **options)
    title = f"{executor.tile.kernel}, {executor.schedule.num_workers} workers"
    problem, tile = executor.problem, executor.tile
    return make_profile(executor.schedule, times, costs_of(problem, tile), title, 4 * partial_elements(problem, tile))


def make_profile(
    schedule: Plan, times: torch.Tensor, costs: Costs, title: str, partial_bytes: int | None = None
) -> Profile:
    """times: as the kernels write them (`device.clock`). Raises RuntimeError if a segment has none."""
    indptr = schedule.worker_indptr.tolist()
    rows = schedule.segments[: indptr[-1]].tolist()
    clock = times[: indptr[-1]].cpu()
    if not (clock[:, 0, [START.value, END.value]] > 0).all():
        raise RuntimeError("profile: the kernel left segments without a time")
    recorded = clock.tolist()
    zero = min((_first(consumers, START.value) or 0 for consumers in recorded), default=0)
    segments = []
    for worker in range(schedule.num_workers):
        end = 0
        for i in range(indptr[worker], indptr[worker + 1]):
            row, consumers = rows[i], recorded[i]
            start, keys, merge = (
                None if time is None else time - zero
                for time in (_first(consumers, column.value) for column in (START, KEYS, MERGE))
            )
            # A worker of two consumers is with the last segment until both have left it.
            start = max(start or 0, end)
            end = max(times[END.value] for times in consumers) - zero
            split = row[NUM_SLOTS] > 1
            keys, merge = (None if time is None else max(time, start) for time in (keys, merge))
            segments.append(
                Segment(worker, consumers[0][SM.value], row[TILE], row[BEGIN], row[END_ITERATION], split, start, keys, merge, end)
            )  # fmt: skip
    return Profile(title, tuple(segments), simulate(schedule, costs), costs, partial_bytes)


def _schedule_of(segments: tuple[Segment, ...], num_workers: int) -> Plan:
    """The plan that these segments ran, its slots left out."""
    order = [s.worker for s in segments]
    if order != sorted(order) or not {*order} <= {*range(num_workers)}:
        raise ValueError(
            f"segments: got workers out of order or beyond num_workers, want ascending ones below {num_workers}"
        )
    parts, per_worker = Counter(s.tile for s in segments), Counter(order)
    rows = torch.zeros(len(segments), SEGMENT_COLUMNS, dtype=torch.int32)
    columns = [(s.tile, s.begin, s.end, parts[s.tile], s.tile) for s in segments]
    rows[:, [TILE, BEGIN, END_ITERATION, NUM_SLOTS, COUNTER]] = torch.tensor(columns, dtype=torch.int32).reshape(-1, 5)
    indptr = torch.tensor([0, *accumulate(per_worker[w] for w in range(num_workers))], dtype=torch.int32)
    return Plan(num_workers, len(rows), len(rows), len(parts), indptr, rows, torch.zeros(1, dtype=torch.int32))


def _read_segment(fields: dict[str, Any]) -> Segment:
    for name in Segment._fields:
        value = fields[name]
        optional = name in ("keys_ns", "merge_ns") and value is None
        if not (optional or (isinstance(value, int) and value >= 0)):
            raise ValueError(f"{name}: got {value!r}, want a whole number from 0 on")
    return Segment(**fields)


def costs_of(problem: Problem, tile: TileConfig) -> Costs:
    """The planner's overhead; storing a partial is half of its price of a cut, merging one what reading its bytes takes, if those
    of keys and values take an iteration."""
    block_bytes = tile.block_n * (problem.head_dim + problem.head_dim_v) * (problem.kv_dtype or problem.dtype).itemsize
    return Costs(tile.overhead, tile.cut_cost / 2, 4 * partial_elements(problem, tile) / block_bytes)


def _first(consumers: list[list[int]], column: int) -> int | None:
    """The earliest time in a column, of the consumers that noted one."""
    return min((times[column] for times in consumers if times[column]), default=None)


def _shares(timeline: Timeline) -> str:
    return (
        f"makespan {format_time(timeline.makespan)} us, idle {timeline.idle:.0%}, merging {timeline.share('merge'):.1%}"
    )

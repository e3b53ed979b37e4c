"""Microseconds on a GPU, by events around calls or around replays of a graph, with a cold L2; and the host's, of a call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.results import percentile

Call = Callable[[], object]
BUDGET_US = 200_000.0  # device time that the samples of one candidate may take
MIN_SAMPLES, MAX_SAMPLES = 11, 101


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    median: float
    spread: float  # half the range between the quartiles, relative to the median


def summarise(samples: Sequence[float]) -> Timing:
    """Median and spread of samples in microseconds; NaN without samples."""
    median = percentile(samples, 50)
    quartiles = percentile(samples, 75) - percentile(samples, 25)
    return Timing(median, quartiles / 2 / median if median else math.nan)


def num_samples(one_call_us: float) -> int:
    """How many calls fit the budget."""
    return max(MIN_SAMPLES, min(MAX_SAMPLES, int(BUDGET_US / max(one_call_us, 1.0))))


@cache
def _l2_sweep(device: torch.device) -> torch.Tensor:
    size = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.zeros(max(size, 32 << 20), dtype=torch.float32, device=device)


def clear_l2() -> None:
    """Read a buffer four times the L2's size. It also keeps the GPU busy while the host queues the next call.

    Read, not written: lines left modified would be written back at the expense of the call that is timed.
    """
    _l2_sweep(torch.device("cuda", torch.cuda.current_device())).sum()


@dataclass(frozen=True)
class Candidate:
    """What takes part in a measurement."""

    run: Call
    num_calls: int = 1  # that one run makes, one after the other


def as_graph(calls: Call | Sequence[Call]) -> Candidate:
    """Replays of a captured graph, so that the host's part is left out.

    One call: the L2 is cleared before each replay. Several calls: they are captured one after the other and the time is divided
    by their number; they must rotate over inputs that together pass the L2.
    """
    calls = [calls] if callable(calls) else list(calls)
    for call in calls:
        call()  # compiles and allocates outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return Candidate(graph.replay, len(calls))


def as_events(calls: Call | Sequence[Call]) -> Candidate:
    """The call itself: what a caller without graphs sees of the device. Of several calls the first is timed."""
    return Candidate(calls if callable(calls) else calls[0])


def time_interleaved(candidates: Mapping[str, Candidate], samples: int | None = None) -> dict[str, Timing]:
    """Device time of every candidate between two events, the L2 cleared before each sample. samples: of each; None: what fits
    the budget.

    A card lowers its clocks under load, and the next call pays for the last one's power. So candidates take turns, each once a
    round and every other round backwards, which gives all of them the same neighbours. Nothing syncs between samples: the sweep of
    the L2 keeps the host ahead of the device.
    """
    for candidate in candidates.values():
        for _ in range(3):
            candidate.run()
    estimates = [_sample(candidate.run) for candidate in candidates.values()]
    torch.cuda.synchronize()
    mean_us = sum(map(_elapsed_us, estimates)) / max(len(estimates), 1)
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in candidates}
    for i in range(samples or num_samples(mean_us)):
        for name in list(candidates)[:: -1 if i % 2 else 1]:
            pairs[name].append(_sample(candidates[name].run))
    torch.cuda.synchronize()
    whole = {name: summarise([_elapsed_us(pair) for pair in found]) for name, found in pairs.items()}
    return {name: Timing(timing.median / candidates[name].num_calls, timing.spread) for name, timing in whole.items()}


def time_events(calls: Call | Sequence[Call]) -> Timing:
    """`as_events`, alone."""
    return time_interleaved({"": as_events(calls)})[""]


def time_graph(calls: Call | Sequence[Call]) -> Timing:
    """`as_graph`, alone."""
    return time_interleaved({"": as_graph(calls)})[""]


def time_host(calls: Mapping[str, Call], queued: int = 200, rounds: int = 15) -> dict[str, Timing]:
    """Host time of one call: `queued` calls without a sync, the candidates in turn.

    The calls must be so small that the device keeps up: a full launch queue makes the host wait.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(queued):
                call()
            end = time.perf_counter()
            if i:  # the first round warms up
                samples[name].append((end - begin) / queued * 1e6)
    torch.cuda.synchronize()
    return {name: summarise(found) for name, found in samples.items()}


def copies_past_l2(bytes_per_call: int) -> int:
    """How many sets of inputs, used in turn, pass three times the L2, so that none is found there again."""
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, math.ceil(3 * size / max(bytes_per_call, 1)))


def _sample(call: Call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    clear_l2()
    begin.record()
    call()
    end.record()
    return begin, end


def _elapsed_us(pair: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
    return pair[0].elapsed_time(pair[1]) * 1e3

"""Time on a GPU: CUDA events around calls, or around replays of a captured graph, with a cold L2. Microseconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.results import percentile

Call = Callable[[], object]
BUDGET_US = 200_000.0  # device time that one measurement may take
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


def time_events(calls: Call | Sequence[Call]) -> Timing:
    """One call between two events, the L2 cleared before each: what a caller without graphs sees of the device.

    Of several calls, which rotate over inputs for `time_graph`, the first is timed.
    """
    call = calls if callable(calls) else calls[0]
    for _ in range(3):
        call()
    estimate = _sample(call)
    torch.cuda.synchronize()
    pairs = [_sample(call) for _ in range(num_samples(_elapsed_us(estimate)))]
    torch.cuda.synchronize()
    return summarise([_elapsed_us(pair) for pair in pairs])


def time_graph(calls: Call | Sequence[Call]) -> Timing:
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
    whole = time_events(graph.replay)
    return Timing(whole.median / len(calls), whole.spread)


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

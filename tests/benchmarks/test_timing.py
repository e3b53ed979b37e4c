"""Timing arithmetic, and the order of samples by a fake clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import (
    MAX_SAMPLES,
    MIN_SAMPLES,
    Candidate,
    Timing,
    as_events,
    as_graph,
    num_samples,
    summarise,
    time_host,
    time_interleaved,
)


def test_summary_is_median_and_half_the_quartile_range() -> None:
    summary = summarise([10.0, 8.0, 12.0, 100.0, 9.0])
    assert summary == Timing(10.0, (12.0 - 9.0) / 2 / 10.0)
    assert math.isnan(summarise([]).median)


def test_number_of_samples_fits_the_budget() -> None:
    assert num_samples(0.0) == MAX_SAMPLES
    assert num_samples(1e9) == MIN_SAMPLES
    assert num_samples(5_000.0) == 40


def test_candidates_take_turns_with_the_same_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    durations = {
        "a": 10_000.0,
        "b": 40_000.0,
        "c": 100_000.0,
    }  # us, 50000 on average: a budget of 4 samples, so the fewest

    def sample(call: Callable[[], object]) -> float:
        call()
        return durations[ran[-1]]

    monkeypatch.setattr(timing, "_sample", sample)
    monkeypatch.setattr(timing, "_elapsed_us", lambda pair: pair)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    candidates = {name: Candidate(lambda name=name: ran.append(name), 2 if name == "b" else 1) for name in durations}  # type: ignore[misc]
    found = time_interleaved(candidates)
    assert {name: t.median for name, t in found.items()} == {"a": 10_000.0, "b": 20_000.0, "c": 100_000.0}
    assert all(t.spread == 0 for t in found.values())
    assert "".join(ran) == "aaabbbccc" + "abc" + ("abccba" * MIN_SAMPLES)[: 3 * MIN_SAMPLES]
    assert time_interleaved({}) == {}


def test_host_time_leaves_the_first_round_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    counts = {"a": 0, "b": 0}

    def call(name: str, seconds: float) -> None:
        nonlocal now
        counts[name] += 1
        now += seconds if counts[name] > 5 else 1.0  # compiles at first

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = time_host({"a": lambda: call("a", 3e-6), "b": lambda: call("b", 5e-6)}, queued=5, rounds=4)
    assert counts == {"a": 25, "b": 25}
    assert found["a"].median == pytest.approx(3.0)
    assert found["b"].median == pytest.approx(5.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_graphs_and_events_see_the_same_kernel() -> None:
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    call = partial(torch.mm, a, a, out=out)
    found = time_interleaved({"graph": as_graph(call), "twice": as_graph([call, call]), "events": as_events(call)})
    assert found["events"].median == pytest.approx(found["graph"].median, rel=0.3)
    assert found["twice"].median == pytest.approx(found["graph"].median, rel=0.3)
    assert 0 < time_host({"mm": call}, queued=10, rounds=3)["mm"].median < 1000

"""The corpus: its shapes, what is measured of one, what a stopped run leaves, the summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks import gemm_corpus, timing
from benchmarks.gemm_corpus import Shape, Times
from benchmarks.timing import Candidate, Timing
from evenshare.device.target import Target, select_target
from evenshare.gemm import hopper
from tests.gemm.helpers import H200


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    if torch.cuda.is_available():
        pytest.skip("the clock is a fake one, and the products run in the interpreter")
    monkeypatch.setattr(timing, "as_graph", _run_once)
    monkeypatch.setattr(timing, "time_interleaved", lambda calls, samples: _clock(calls))
    return select_target("cpu", "triton")


def _run_once(call: timing.Call) -> Candidate:
    call()
    return Candidate(call)


def _clock(calls: Mapping[str, Candidate]) -> dict[str, Timing]:
    return {name: Timing(10.0 + i, 0.0) for i, name in enumerate(calls)}


def test_the_corpus_is_the_papers() -> None:
    shapes = gemm_corpus.corpus(8)
    assert len(shapes) == 32_824
    sizes = [size for shape in shapes for size in (shape.m, shape.n, shape.k)]
    assert min(sizes) == 128
    assert max(sizes) == 8192
    assert not any(size % 8 for size in sizes)
    halfway = sum(size < 1024 for size in sizes) / len(
        sizes
    )  # of log-uniform sizes, half lie below the geometric middle
    assert halfway == pytest.approx(0.5, abs=0.01)
    assert shapes == gemm_corpus.corpus(8)
    assert any(shape.k % 8 for shape in gemm_corpus.corpus(1))


def test_a_sample_is_spread_over_the_work() -> None:
    shapes = gemm_corpus.corpus(8)
    sample = gemm_corpus.stratified(shapes, 100)
    assert len(set(sample)) == 100
    flops = sorted(shape.flops for shape in shapes)
    share = sum(shape.flops < flops[len(flops) // 2] for shape in sample) / len(sample)
    assert share == pytest.approx(0.5, abs=0.02)
    assert gemm_corpus.stratified(shapes[:50], 50) != shapes[:50]
    assert set(gemm_corpus.stratified(shapes[:50], 50)) == set(shapes[:50])


def test_what_is_measured_is_checked(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    times = gemm_corpus.measure(Shape(24, 16, 40), target)
    assert (times.m, times.n, times.k) == (24, 16, 40)
    assert (times.cublas, times.ours) == (10.0, 11.0)
    assert math.isnan(times.data_parallel)  # no Hopper GPU: no kernel whose tiles one could choose
    monkeypatch.setattr(gemm_corpus, "matmul", lambda a, b, out: out.zero_())
    with pytest.raises(RuntimeError, match=r"ours: relative error 1\.00e\+00 to cuBLAS"):
        gemm_corpus.measure(Shape(24, 16, 40), target)


def test_baselines_plan_what_their_names_say() -> None:
    planners = gemm_corpus.planners(H200)
    whole = planners["data_parallel"](1024, 1024, 8192, False, 132)
    assert whole.tile == hopper.TILES[0]
    assert whole.shares.num_whole == whole.shares.num_tiles
    for i, tile in enumerate(hopper.TILES):
        assert planners[f"tile {i}"](1024, 1024, 8192, False, 132).tile == tile
    split = planners["tile 0"](1024, 1024, 8192, False, 132).shares
    assert split.num_whole < split.num_tiles


def test_a_stopped_run_goes_on(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [Shape(8, 16, 32), Shape(24, 8, 16), Shape(16, 16, 16)]
    calls: list[Shape] = []

    def measure(shape: Shape, target: Target) -> Times:
        calls.append(shape)
        return Times(shape.m, shape.n, shape.k, 1.5, 3.0, math.nan, 2.0, 1.25)

    monkeypatch.setattr(gemm_corpus, "measure", measure)
    path = tmp_path / "times.csv"
    first = list(gemm_corpus.measured(path, shapes[:2], target, "abc"))
    again = list(gemm_corpus.measured(path, shapes, target, "abc"))
    assert calls == shapes
    assert repr(again[:2]) == repr(first)  # NaN differs from itself
    list(gemm_corpus.measured(path, shapes[:1], target, "def"))  # another commit's times are no times of this one
    assert calls == [*shapes, shapes[0]]


def test_a_run_stops_in_time_and_goes_on(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [Shape(8 * i, 16, 32) for i in range(1, 6)]
    clock = iter(range(100))
    monkeypatch.setattr(gemm_corpus.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(gemm_corpus, "measure", lambda shape, target: Times(shape.m, shape.n, shape.k, 1.5, 3.0))
    path = tmp_path / "times.csv"
    first = list(gemm_corpus.measured(path, shapes, target, "abc", deadline=2))
    assert [times.m for times in first] == [8, 16, 24]
    assert list(gemm_corpus.read_times(path, "abc")) == shapes[:3]
    again = list(gemm_corpus.measured(path, shapes, target, "abc"))
    assert [times.m for times in again] == [8, 16, 24, 32, 40]


def test_the_summary() -> None:
    rounded = [Times(128, 128, 128, 2.0, 4.0, 8.0, 3.0, 2.0), Times(8192, 8192, 8192, 4.0, 2.0, 4.0, 5.0, 4.0)]
    unrounded = [Times(129, 131, 137, 5.0, 4.0)]
    rows = {row.case: row for row in gemm_corpus.table(rounded, unrounded)}
    assert rows["2 shapes, cublas's time / ours: geomean"].ours == pytest.approx(1.0)
    assert rows["2 shapes, cublas's time / ours: mean"].ours == pytest.approx(1.25)
    assert rows["2 shapes, cublas's time / ours: standard deviation"].ours == pytest.approx(0.75)
    assert rows["1 shapes, cublas, compute-bound's time / ours: least"].missed
    assert rows["2 shapes, data_parallel's time / ours: most"].ours == 4.0
    assert not rows["2 shapes, data_parallel's time / ours: most"].missed
    assert rows["1 shapes, cublas, unrounded's time / ours: geomean"].ours == pytest.approx(0.8)
    assert not any("nan" in str(row.ours) for row in rows.values())

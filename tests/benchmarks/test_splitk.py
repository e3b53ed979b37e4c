"""The split-K experiment with tiny weights: what it times is right, its gains, its picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from benchmarks import harness, pictures, plot_splitk, splitk
from benchmarks.results import Report, Row, write_report
from evenshare.quant.packing import step_size

SPLITS = [f"split-K {splits}" for splits in (2, 4, 8, 16)]


@pytest.fixture(autouse=True)
def _few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitk, "copies_past_l2", lambda size: 2)
    splitk.make_weights.cache_clear()


def make_row(size: int, m: int, even: float, data_parallel: float, split: float) -> Row:
    peers = {splitk.DATA_PARALLEL: data_parallel, **dict.fromkeys(SPLITS, split)}
    return Row(f"n=k={size} m={m}", "us", "lower", even, peers=peers, timing="graph", flops=2.0 * m * size**2)


def make_report(*rows: Row, name: str = "splitk") -> Report:
    return Report(name, "NVIDIA H200", "580.1", {}, "abc", "2026-01-01", {}, list(rows))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fixture's bench is on the CPU, in the interpreter")
def test_every_planner_is_checked_and_timed(bench: harness.Bench) -> None:
    splitk.fill(bench, [splitk.Case(384, 3)])
    assert bench.failed == []
    row, mean, peak = bench.rows
    assert row.case == "n=k=384 m=3"
    assert list(row.peers) == [splitk.DATA_PARALLEL, *SPLITS]
    assert row.flops == 2 * 3 * 384 * 384
    assert row.bytes == 384 * 192 + 2 * 384 * 3 + 2 * 2 * 3 * 384
    assert (mean.ours, peak.ours) == (0, 0)  # the fixture's clock says the same of all
    assert "TFLOP/s, * the best" in bench.console.export_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fixture's bench is on the CPU, in the interpreter")
def test_a_planner_that_drops_work_is_found(bench: harness.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = splitk.PLANNERS["split-K 2"]
    monkeypatch.setitem(splitk.PLANNERS, "split-K 2", lambda m, n, steps, *rest: whole(m, n, steps - 1, *rest))
    with pytest.raises(RuntimeError, match="split-K 2: relative error"):
        splitk.measure(bench, splitk.Case(384, 1))


def test_cases_are_the_papers() -> None:
    titles = [case.title for case in splitk.CASES]
    assert len(set(titles)) == 30
    assert titles[0] == "n=k=512 m=1"
    assert titles[-1] == "n=k=16384 m=16"


@pytest.mark.parametrize("planner", splitk.PLANNERS)
@pytest.mark.parametrize("case", splitk.CASES, ids=lambda case: case.title)
def test_plans_of_all_cases_deal_all_work(planner: str, case: splitk.Case) -> None:
    num_steps = -(-case.size // step_size(4))
    _, shares = splitk.PLANNERS[planner](case.m, case.size, num_steps, 2, 132)
    assert (shares.num_tiles, shares.iters_per_tile) == (case.size // 64, num_steps)
    tail = shares.num_tiles - shares.num_whole
    assert tail == 0 or tail * num_steps >= shares.num_workers  # no program without work
    assert tail == 0 or planner != splitk.DATA_PARALLEL


def test_gains_are_over_data_parallel() -> None:
    mean, peak = splitk.gains([make_row(512, 1, 10.0, 20.0, 16.0), make_row(512, 2, 10.0, 40.0, 40.0)])
    assert mean.ours == pytest.approx(200.0)
    assert mean.peers == pytest.approx(dict.fromkeys(SPLITS, 12.5))
    assert (peak.ours, peak.peers["split-K 4"]) == (pytest.approx(300.0), pytest.approx(25.0))
    assert (mean.unit, mean.better) == ("%", "higher")
    assert "2 cases, mean gain over data-parallel" in mean.case


def test_the_picture_comes_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [make_row(size, m, 5.0 + m, 9.0, 7.0) for size in (512, 1024) for m in (1, 16)]
    report = make_report(*rows, *splitk.gains(rows))
    curves = plot_splitk.read_curves(report)
    assert list(curves) == [1, 16]
    assert curves[1][splitk.EVEN_SHARE] == pytest.approx({512: 2 * 512**2 / 6e6, 1024: 2 * 1024**2 / 6e6})
    assert curves[16]["split-K 8"][1024] == pytest.approx(32 * 1024**2 / 7e6)
    path = write_report(report, tmp_path / "splitk.json")
    assert plot_splitk.main([str(path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'splitk.png'}\n"
    assert imread(tmp_path / "splitk.png")[..., :3].min() < 0.5  # something is drawn


def test_nothing_to_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_report(make_report(), tmp_path / "empty.json")
    assert plot_splitk.main([str(path)]) == 2
    assert "got splitk without cases" in capsys.readouterr().err
    assert plot_splitk.main([str(write_report(make_report(name="gemm"), tmp_path / "gemm.json"))]) == 2
    assert "got no report of splitk" in capsys.readouterr().err
    monkeypatch.setattr(pictures, "RESULTS", tmp_path)
    assert plot_splitk.main([]) == 2
    assert "got no splitk-*.json" in capsys.readouterr().err

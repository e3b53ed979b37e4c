"""`evenshare calibrate`: the fit on synthetic times, the products that are timed, the command on a GPU."""

from __future__ import annotations

import itertools
import random
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from evenshare.cli import app
from evenshare.device.target import Target
from evenshare.gemm import costs
from evenshare.gemm.costs import TileCosts, count_work
from evenshare.gemm.kernels import hopper_skinny
from evenshare.report.calibrate import RUNS, Run, Sample, fit, make_work
from evenshare.report.calibrate_kernels import timed_tiles
from evenshare.schedule.uniform import expand, uniform_plan
from tests.emulator import Emulated

LAUNCH = 3.0


def samples_of(costs: TileCosts, noise: float = 0.0) -> list[Sample]:
    """Times of all runs on 132 workers."""
    generator = random.Random(0)
    works = [make_work(run, 132).shares for run in RUNS]
    return [Sample(work, (LAUNCH + costs.makespan(work)) * generator.uniform(1 - noise, 1 + noise)) for work in works]


@pytest.mark.parametrize(
    "wanted",
    [
        TileCosts(0.8, 12.5, 0.9, 6.2, 0.78),
        TileCosts(0.5, 1.0, 0.4, 0.3, 0.4),
        TileCosts(2.0, 0.0, 0.1, 0.0, 0.05),
        TileCosts(0.0, 3.0, 1.0, 0.5, 1.0),
    ],
)
def test_the_fit_finds_the_constants(wanted: TileCosts) -> None:
    found, error = fit(samples_of(wanted))
    assert astuple(found) == pytest.approx(astuple(wanted), abs=1e-6)
    assert error < 1e-6


def test_the_fit_bears_noise() -> None:
    wanted = TileCosts(1.0, 8.0, 0.6, 4.0, 0.5)
    found, error = fit(samples_of(wanted, noise=0.03))
    assert found.whole_c == pytest.approx(wanted.whole_c, rel=0.1)
    assert found.c == pytest.approx(wanted.c, rel=0.15)
    assert found.d == pytest.approx(wanted.d, rel=0.15)
    assert error < 0.03


def test_no_constant_is_negative() -> None:
    """Cuts that cost less than nothing, as noise has it."""
    shares = [make_work(run, 132).shares for run in RUNS]
    plain = TileCosts(1.0, 0.0, 0.5, 0.0, 0.5)
    found, _ = fit([Sample(one, 50.0 + plain.makespan(one) - 4.0 * count_work(one)[1]) for one in shares])
    assert found.b == 0.0
    assert min(astuple(found)) >= 0.0
    assert found.c == pytest.approx(0.5, rel=0.2)


def test_errors() -> None:
    shares = make_work(RUNS[0], 132).shares
    for us, count in ((1.0, 5), (0.0, 6)):
        with pytest.raises(ValueError, match="want more than 5 times, all positive"):
            fit([Sample(shares, us)] * count)


@pytest.mark.parametrize(("max_workers", "one_row"), [(132, False), (132, True), (5, False), (1, False)])
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_runs_are_what_they_say(run: Run, max_workers: int, one_row: bool) -> None:
    work = make_work(run, max_workers, one_row)
    shares = work.shares
    assert work.tiles_m * work.tiles_n == shares.num_tiles
    assert work.tiles_m == 1 or not one_row
    assert shares.num_workers <= max_workers
    waves, is_cut, share, further, whole = count_work(shares)
    if not run.cut:
        assert (is_cut, share, further) == (0, 0, 0)
        assert whole == waves * run.iters == run.tiles * run.iters
    elif max_workers == 132:
        assert (is_cut, whole) == (1, 0)
        assert share < run.iters


def test_the_work_counted_is_that_of_the_plans_segments() -> None:
    """Iterations and contributors, of plans of every kind."""
    for tiles, iters, workers in itertools.product((1, 3, 7, 12, 40), (1, 5, 16), (1, 4, 9, 12)):
        shares = uniform_plan(tiles, iters, workers)
        _, is_cut, share, further, whole = count_work(shares)
        plan = expand(shares)
        segments = plan.segments[: int(plan.worker_indptr[shares.num_workers])]
        lengths = segments[:, 2] - segments[:, 1]
        bounds = plan.worker_indptr.tolist()
        most = max(int(lengths[begin:end].sum()) for begin, end in itertools.pairwise(bounds[: shares.num_workers + 1]))
        assert share + whole == most
        parts = torch.bincount(segments[:, 0].long(), minlength=tiles).max() - 1
        assert int(parts) <= further <= int(parts) + 1
        assert bool(is_cut) >= bool(parts)


def test_all_tiles_that_plans_look_up_are_timed() -> None:
    hopper = [tile.key for tile in timed_tiles(Target("triton", torch.device("cpu"), 132, (9, 0), False))]
    shipped = set(costs.read_table(costs.SHIPPED / "nvidia-h200.json")[1])
    assert shipped <= set(hopper)
    assert len(set(hopper)) == len(hopper)
    other = [tile.key for tile in timed_tiles(Target("triton", torch.device("cpu"), 108, (8, 0), False))]
    assert set(other) == {key for key in hopper if not key.kernel.startswith("hopper")}


def test_a_timed_product_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_skinny, "matmul", Emulated(hopper_skinny.matmul))
    monkeypatch.setattr(Emulated, "seeds", itertools.count())
    target = Target("triton", torch.device("cpu"), 4, (9, 0), False)
    tile = next(tile for tile in timed_tiles(target) if tile.key.kernel == "hopper_skinny")
    for run in (Run(2, 2), Run(3 / 4, 5, True)):
        tile.prepare(make_work(run, tile.max_workers, tile.one_row), target.device)()


def test_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = CliRunner().invoke(app, ["calibrate"])
    assert result.exit_code == 2
    assert "needs a CUDA GPU" in result.output


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    path = tmp_path / "table.json"
    result = CliRunner().invoke(app, ["calibrate", "--out", str(path), "--seconds", "1"])
    assert result.exit_code == 0, result.output
    owner, models = costs.read_table(path)
    assert owner == torch.cuda.get_device_name()
    assert models
    assert all(model.c > 0 for model in models.values())

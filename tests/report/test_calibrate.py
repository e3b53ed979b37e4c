"""`evenshare calibrate`: the fit on synthetic times, the products that are timed, the command on a GPU."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from evenshare.cli import app
from evenshare.device.target import Target
from evenshare.gemm import costs
from evenshare.gemm.kernels import hopper_skinny
from evenshare.report.calibrate import RUNS, Run, Sample, fit, make_work
from evenshare.report.calibrate_kernels import timed_tiles
from evenshare.schedule.cost_model import CostModel
from evenshare.schedule.uniform import expand
from tests.emulator import Emulated

LAUNCH = 3.0


def time_of(run: Run, model: CostModel) -> float:
    split = model.b * (run.peers > 1) + model.d * (run.peers - 1)
    return LAUNCH + run.waves * (model.a + model.c * run.iters_per_share) + split


@pytest.mark.parametrize(
    "constants", [(0.8, 12.5, 0.78, 6.2), (0.5, 1.0, 0.4, 0.3), (2.0, 0.0, 0.1, 0.0), (0.0, 3.0, 1.0, 0.5)]
)
def test_the_fit_finds_the_constants(constants: tuple[float, ...]) -> None:
    model, error = fit([Sample(run, time_of(run, CostModel(*constants))) for run in RUNS])
    assert (model.a, model.b, model.c, model.d) == pytest.approx(constants, abs=1e-6)
    assert error < 1e-6


def test_the_fit_bears_noise() -> None:
    wanted = CostModel(1.0, 8.0, 0.5, 4.0)
    noise = random.Random(0)
    model, error = fit([Sample(run, time_of(run, wanted) * noise.uniform(0.97, 1.03)) for run in RUNS])
    assert model.c == pytest.approx(wanted.c, rel=0.1)
    assert model.d == pytest.approx(wanted.d, rel=0.1)
    assert model.a + model.b == pytest.approx(wanted.a + wanted.b, rel=0.3)
    assert error < 0.03


def test_no_constant_is_negative() -> None:
    """Cuts that cost less than nothing, as noise has it."""
    model, _ = fit([Sample(run, 10.0 + run.waves * run.iters_per_share - 0.5 * (run.peers > 1)) for run in RUNS])
    assert model.b == 0.0
    assert model.c == pytest.approx(1.0, rel=0.1)
    assert model.d >= 0.0


def test_errors() -> None:
    with pytest.raises(ValueError, match="want at least five times, all positive"):
        fit([Sample(RUNS[0], 1.0)] * 4)
    with pytest.raises(ValueError, match="want at least five times, all positive"):
        fit([Sample(RUNS[0], 0.0)] * 5)


@pytest.mark.parametrize(("max_workers", "one_row"), [(132, False), (132, True), (5, False), (1, False)])
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_every_worker_of_a_run_does_the_same(run: Run, max_workers: int, one_row: bool) -> None:
    work = make_work(run, max_workers, one_row)
    shares = work.shares
    assert work.tiles_m * work.tiles_n == shares.num_tiles
    assert not one_row or work.tiles_m == 1
    assert shares.num_workers <= max(max_workers, run.peers)
    plan = expand(shares)
    segments = plan.segments[: int(plan.worker_indptr[shares.num_workers])]
    lengths = (segments[:, 2] - segments[:, 1]).unique().tolist()
    assert lengths == [run.iters_per_share]
    per_worker = plan.worker_indptr[1 : shares.num_workers + 1] - plan.worker_indptr[: shares.num_workers]
    assert per_worker.unique().tolist() == [run.waves]


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
    for run in (Run(2, 1, 2), Run(1, 4, 1)):
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

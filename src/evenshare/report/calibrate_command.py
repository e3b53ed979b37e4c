"""The command `evenshare calibrate`: the costs by which GEMM plans are made, measured on this machine's GPU."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Annotated

import torch
import triton
import typer

from evenshare.device.target import select_target
from evenshare.gemm.costs import CONSTANTS, TileCosts, TileKey, user_table, write_table
from evenshare.report.arguments import stop
from evenshare.report.calibrate import RUNS, Sample, fit, make_work
from evenshare.report.calibrate_kernels import TimedTile, time_us, timed_tiles


def calibrate_command(
    out: Annotated[
        Path | None, typer.Option(help="File to write [default: in the cache, where plans look]", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(help="No tile is begun after so long; those left keep what they had")] = 110,
    device: Annotated[str, typer.Option(help="cuda or cuda:N")] = "cuda",
) -> None:
    """Measure what tiles, iterations and cuts of each GEMM kernel cost on a GPU, and write the table that plans follow.

    A table elsewhere is used where the environment variable EVENSHARE_GEMM_TABLE names it.
    """
    if not torch.cuda.is_available():
        stop("calibrate: needs a CUDA GPU, and torch sees none here", 2)
    target = select_target(device, "triton")
    name = torch.cuda.get_device_name(target.device)
    begin = time.monotonic()
    models: dict[TileKey, TileCosts] = {}
    tiles = list(timed_tiles(target))
    print(f"{name}: {len(tiles)} tiles, microseconds")
    print(f"{'':>7}  {'kernel':14} {'operands':8} {'tile':>12} {' '.join(f'{name:>8}' for name in CONSTANTS)}  error")
    for number, tile in enumerate(tiles, 1):
        if time.monotonic() - begin > seconds:
            print(f"{seconds:g} s are over: {len(tiles) - len(models)} tiles keep what they had")
            break
        model, error = measure(tile, target.device)
        models[tile.key] = model
        size = "x".join(map(str, tile.key[2:]))
        constants = " ".join(f"{getattr(model, name):8.3f}" for name in CONSTANTS)
        print(
            f"{number:>2} / {len(tiles)}  {tile.key.kernel:14} {tile.key.operands:8} {size:>12} {constants}  {error:.1%}"
        )
    path = user_table(name) if out is None else out
    write_table(
        path,
        name,
        models,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        torch=torch.__version__,
        triton=triton.__version__,
    )
    print(f"{path}: {len(models)} tiles, {time.monotonic() - begin:.0f} s")


def measure(tile: TimedTile, device: torch.device) -> tuple[TileCosts, float]:
    """(constants, their relative error)."""
    works = [make_work(run, tile.max_workers, tile.one_row) for run in RUNS]
    with torch.cuda.device(device):
        return fit([Sample(work.shares, time_us(tile.prepare(work, device), device)) for work in works])

"""From times of a tile's products to the constants of its costs (`gemm.costs`), without a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evenshare.gemm.costs import CONSTANTS, TileCosts, count_work
from evenshare.schedule.plan import UniformPlan
from evenshare.schedule.uniform import uniform_plan


class Run(NamedTuple):
    """A product by its size."""

    tiles: float  # for each worker
    iters: int  # of a tile
    cut: bool = False  # all workers get an even share; otherwise tiles are whole


class Work(NamedTuple):
    """A run on a device: its tiles and who computes them."""

    tiles_m: int
    tiles_n: int
    shares: UniformPlan


class Sample(NamedTuple):
    shares: UniformPlan
    us: float


# Whole tiles tell a and whole_c apart from what a launch costs, cut ones the rest. Shares begin anywhere in a tile, as in plans.
RUNS = (
    *(Run(1, iters) for iters in (8, 32, 96)),
    *(Run(tiles, iters) for tiles, iters in ((2, 16), (4, 8))),
    *(Run(tiles, iters, True) for tiles in (7 / 8, 3 / 8) for iters in (16, 64)),
    *(Run(1 / 8, iters, True) for iters in (32, 128)),
    *(Run(1 / 32, iters, True) for iters in (64, 256)),
)


def make_work(run: Run, max_workers: int, one_row: bool = False) -> Work:
    """The run's tiles in a grid as square as it gets or in one row."""
    tiles = max(int(run.tiles * max_workers), 1)
    rows = 1 if one_row else max(i for i in range(1, math.isqrt(tiles) + 1) if tiles % i == 0)
    return Work(rows, tiles // rows, uniform_plan(tiles, run.iters, max_workers, split=run.cut))


def fit(samples: Sequence[Sample]) -> tuple[TileCosts, float]:
    """(the constants of least squared relative error, that error in root mean square).

    A time is that of the worker with most to do (`gemm.costs.count_work`) and of a launch, the same for every plan, fitted and
    dropped. No constant is negative: one that would be is 0, and the others are fitted anew.

    Raises ValueError for fewer samples than constants or a time that is not positive.
    """
    if len(samples) <= len(CONSTANTS) or not all(us > 0 for _, us in samples):
        raise ValueError(
            f"samples: got {[us for _, us in samples]}, want more than {len(CONSTANTS)} times, all positive"
        )
    columns = np.array([(1, *count_work(shares)) for shares, _ in samples], dtype=float)
    scaled = columns / np.array([us for _, us in samples])[:, None]  # of a relative error
    free = list(range(columns.shape[1]))
    while True:
        found = np.zeros(columns.shape[1])
        found[free] = np.linalg.lstsq(scaled[:, free], np.ones(len(samples)), rcond=None)[0]
        if found.min() >= 0:
            break
        free.remove(int(found.argmin()))
    error = float(np.sqrt(np.mean((scaled @ found - 1) ** 2)))
    return TileCosts(*map(float, found[1:])), error

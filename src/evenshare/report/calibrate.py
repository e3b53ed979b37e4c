"""From times of a tile's products to the constants of its cost model (`schedule.cost_model`), without a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evenshare.schedule.cost_model import CostModel
from evenshare.schedule.plan import UniformPlan
from evenshare.schedule.uniform import uniform_plan


class Run(NamedTuple):
    """A product in which every worker does the same: `waves` whole tiles, or one of `peers` shares of a tile."""

    waves: int
    peers: int
    iters_per_share: int


class Sample(NamedTuple):
    run: Run
    us: float


class Work(NamedTuple):
    """A run on a device: its tiles and who computes them."""

    tiles_m: int
    tiles_n: int
    shares: UniformPlan


# Whole tiles tell a and c apart from what a launch costs, cut ones b and d.
RUNS = (
    *(Run(1, 1, iters) for iters in (8, 32, 96)),
    *(Run(waves, 1, iters) for waves, iters in ((2, 16), (4, 8))),
    *(Run(1, peers, iters) for peers in (2, 4, 8, 16) for iters in (4, 16)),
)


def make_work(run: Run, max_workers: int, one_row: bool = False) -> Work:
    """As many tiles as give all workers, or nearly all, their part of `run`, in a grid as square as it gets or in one row."""
    tiles = max(max_workers // run.peers, 1)
    workers, tiles = tiles * run.peers, tiles * run.waves
    rows = 1 if one_row else max(i for i in range(1, math.isqrt(tiles) + 1) if tiles % i == 0)
    shares = uniform_plan(tiles, run.iters_per_share * run.peers, workers, split=run.peers > 1)
    return Work(rows, tiles // rows, shares)


def fit(samples: Sequence[Sample]) -> tuple[CostModel, float]:
    """(the model of least squared relative error, that error in root mean square).

    time = launch + waves (a + c iters_per_share) + b [peers > 1] + d (peers - 1). launch, the same for every plan, is fitted and
    dropped. No constant is negative: one that would be is 0, and the others are fitted anew.

    Raises ValueError for fewer samples than constants or a time that is not positive.
    """
    if len(samples) < 5 or not all(us > 0 for _, us in samples):
        raise ValueError(f"samples: got {[us for _, us in samples]}, want at least five times, all positive")
    columns = np.array([(1, run.waves, run.peers > 1, run.waves * run.iters_per_share, run.peers - 1)
                        for run, _ in samples], dtype=float)  # fmt: skip
    times = np.array([us for _, us in samples])
    scaled = columns / times[:, None]  # of a relative error
    free = list(range(5))
    while True:
        found = np.zeros(5)
        found[free] = np.linalg.lstsq(scaled[:, free], np.ones(len(samples)), rcond=None)[0]
        if found.min() >= 0:
            break
        free.remove(int(found.argmin()))
    error = float(np.sqrt(np.mean((scaled @ found - 1) ** 2)))
    _, a, b, c, d = map(float, found)
    return CostModel(a, b, c, d), error

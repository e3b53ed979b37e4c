"""From a problem to tile sizes and shares, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from evenshare.schedule.plan import UniformPlan
from evenshare.schedule.uniform import uniform_plan


@dataclass(frozen=True)
class TileConfig:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    workers_per_sm: int  # programs that run at once on one SM


def choose_tile(m: int, itemsize: int) -> TileConfig:
    """Tile sizes for m rows of x with `itemsize` bytes an element.

    Few rows read the weight once and are bound by its loads: 16 rows, the smallest mma, and four programs an SM, which keep
    enough loads in flight. Many rows unpack every weight once per row tile: tall tiles. All of them compile without spills
    for sm_80 and sm_90; float32 has no mma and keeps its operands in registers, so its tiles end at 64 rows.
    """
    if m <= 16:
        return TileConfig(16, 64, 4, 4, 4)
    if m <= 32:
        return TileConfig(32, 64, 4, 4, 3) if itemsize == 2 else TileConfig(32, 64, 4, 3, 3)
    if itemsize == 4:
        return TileConfig(64, 64, 8, 3, 1)
    if m <= 64:
        return TileConfig(64, 64, 4, 3, 2)
    return TileConfig(128, 64, 8, 3, 1)


@lru_cache(maxsize=4096)
def plan_matmul(m: int, n: int, num_steps: int, itemsize: int, num_sms: int) -> tuple[TileConfig, UniformPlan]:
    """Tile and shares of y [m, n] over `num_steps` k-steps on `num_sms` SMs."""
    tile = choose_tile(m, itemsize)
    num_tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
    num_workers = min(num_sms * tile.workers_per_sm, num_tiles * num_steps)  # no share may be empty
    return tile, uniform_plan(num_tiles, num_steps, num_workers)

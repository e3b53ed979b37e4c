"""From a problem to tile sizes and shares, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
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


# (m, n, num_steps, itemsize, num_sms) -> tile and shares of y [m, n] over `num_steps` k-steps on `num_sms` SMs.
Planner = Callable[[int, int, int, int, int], tuple[TileConfig, UniformPlan]]

# Fewer k-steps than this do not pay for a partial and its merge (4096 x 4096, m = 1, H200: 14.9 us at 8 steps a share, 16.5 at 4).
MIN_STEPS_PER_SHARE = 8


def choose_tile(m: int, itemsize: int) -> TileConfig:
    """Tile sizes for m rows of x with `itemsize` bytes an element.

    Few rows read the weight once and are bound by its loads: 16 rows, the smallest mma, and several programs an SM, which keep
    enough loads in flight. Many rows unpack every weight once per row tile: tall and wide tiles. float32 has no mma and keeps
    its operands in registers: larger tiles than 64 x 64 spill.
    """
    if m <= 16:
        return TileConfig(16, 64, 4, 3, 6)
    if m <= 32:
        return TileConfig(32, 64, 4, 3, 3)
    if itemsize == 4:
        return TileConfig(64, 64, 8, 3, 1)
    if m <= 64:
        return TileConfig(64, 128, 4, 3, 2)
    return TileConfig(128, 128, 8, 3, 1)


@lru_cache(maxsize=4096)
def plan_matmul(m: int, n: int, num_steps: int, itemsize: int, num_sms: int) -> tuple[TileConfig, UniformPlan]:
    """Tile and shares of y [m, n] over `num_steps` k-steps on `num_sms` SMs. No share is empty."""
    tile = choose_tile(m, itemsize)
    num_tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
    num_workers = max(num_tiles, num_tiles * num_steps // MIN_STEPS_PER_SHARE)
    return tile, uniform_plan(num_tiles, num_steps, min(num_workers, num_sms * tile.workers_per_sm))


@lru_cache(maxsize=4096)
def plan_split_k(
    splits: int, m: int, n: int, num_steps: int, itemsize: int, num_sms: int
) -> tuple[TileConfig, UniformPlan]:
    """As `plan_matmul`, but every tile in `splits` parts, a program for each, whatever the number of SMs (arXiv 2402.00025). One
    part is data-parallel. Even shares are measured against it; those of as many workers as there are parts are just the parts.
    """
    tile = choose_tile(m, itemsize)
    num_tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
    return tile, uniform_plan(num_tiles, num_steps, num_tiles * splits)


def plan_grouped(
    num_tokens: int, num_experts: int, n: int, num_steps: int, itemsize: int, num_sms: int
) -> tuple[TileConfig, int]:
    """Tile and number of programs for rows that are dealt to experts on the device: enough for any way of dealing them. A worker
    has two partials at most, and fewer than two split tiles a worker exist."""
    tile = choose_tile(-(-num_tokens // num_experts), itemsize)
    row_tiles = num_tokens // tile.block_m + min(num_experts, num_tokens)
    most = row_tiles * -(-n // tile.block_n) * max(1, num_steps // MIN_STEPS_PER_SHARE)
    return tile, min(most, num_sms * tile.workers_per_sm)

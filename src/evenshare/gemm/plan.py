"""From a problem to tile sizes and shares, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from evenshare.gemm.costs import DERIVED, CostTable, TileCosts, TileKey
from evenshare.schedule.cost_model import choose_num_shares
from evenshare.schedule.plan import UniformPlan
from evenshare.schedule.uniform import uniform_plan


@dataclass(frozen=True)
class TileConfig:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    workers_per_sm: int  # programs that run at once on one SM


@dataclass(frozen=True)
class GemmPlan:
    """What a launch needs to know of out [m, n] = a [m, k] b [k, n]."""

    tile: TileConfig
    shares: UniformPlan

    @property
    def partial_elements(self) -> int:
        """fp32 values of all partials."""
        return self.shares.max_slots * self.tile.block_m * self.tile.block_n


# float32 has no exact mma: the operands of its multiply-adds live in registers, so its tiles are small.
FLOAT32_TILES = (TileConfig(16, 64, 32, 4, 3, 2), TileConfig(64, 64, 32, 8, 3, 2))
# 16 rows is the smallest mma. Small tiles give small problems more workers and shorter chains; 128 x 128 reads operands least.
# All of them fit the 99 KB of shared memory of sm_86 and sm_89 and compile without spills for sm_80 and sm_90.
HALF_TILES = (
    TileConfig(16, 64, 128, 4, 4, 2),
    TileConfig(64, 64, 64, 4, 4, 2),
    TileConfig(128, 128, 64, 8, 3, 1),
)
# TF32 has one: tiles as of 16-bit operands, of half the k.
TF32_TILES = (
    TileConfig(16, 64, 64, 4, 4, 2),
    TileConfig(64, 64, 32, 4, 4, 2),
    TileConfig(128, 128, 32, 8, 3, 1),
)
# fp8 codes are widened to 16 bits in registers, and their products scaled before they are added: larger tiles would spill.
FP8_TILES = (
    TileConfig(16, 64, 128, 4, 4, 2),
    TileConfig(64, 64, 64, 4, 4, 2),
    TileConfig(128, 64, 64, 8, 4, 1),
)
TILES = {1: FP8_TILES, 2: HALF_TILES, 4: FLOAT32_TILES}  # by the bytes of an operand's element
# Operands without 16-byte rows are loaded element by element, and a pointer for each takes two registers: 64 wide would spill.
UNALIGNED_BLOCK_K = 32
INTERPRETER_TILE = TileConfig(16, 16, 16, 1, 1, 1)  # small, so that short inputs are split


def choose_tile(
    m: int, n: int, itemsize: int, num_sms: int, aligned: bool = True, tf32: bool = False, batch: int = 1
) -> TileConfig:
    """Tile sizes for `batch` times out [m, n]; itemsize: an operand's bytes; aligned: they can be loaded 16 at a time."""
    few_rows, small, *large = TF32_TILES if tf32 else TILES[itemsize]
    tile = few_rows if m <= few_rows.block_m else small
    for candidate in large:
        # The large tile only where it neither leaves an SM without a tile of its own nor pads half of its rows.
        if m > candidate.block_m // 2 and batch * _num_tiles(m, n, candidate) >= num_sms:
            tile = candidate
    return tile if aligned else replace(tile, block_k=min(tile.block_k, UNALIGNED_BLOCK_K))


def _num_tiles(m: int, n: int, tile: TileConfig) -> int:
    return -(-m // tile.block_m) * -(-n // tile.block_n)


def tile_key(tile: TileConfig, itemsize: int, tf32: bool = False) -> TileKey:
    operands = "tf32" if tf32 else {1: "fp8", 2: "16-bit", 4: "fp32"}[itemsize]
    kernel = "scaled_matmul" if itemsize == 1 else "matmul"
    return TileKey(kernel, operands, tile.block_m, tile.block_n, tile.block_k)


def choose_shares(costs: TileCosts, num_tiles: int, iters_per_tile: int, max_workers: int) -> UniformPlan:
    """Workers, and whether to cut tiles: only where levelling the finish is worth what cuts cost."""
    workers = max_workers
    if num_tiles < max_workers:
        workers = max(choose_num_shares(costs, num_tiles, iters_per_tile, max_workers), num_tiles)
    whole = uniform_plan(num_tiles, iters_per_tile, min(num_tiles, max_workers), split=False)
    return min((whole, uniform_plan(num_tiles, iters_per_tile, workers)), key=costs.makespan)


@lru_cache(maxsize=4096)
def plan_matmul(
    m: int,
    n: int,
    k: int,
    itemsize: int,
    num_sms: int,
    aligned: bool = True,
    interpreted: bool = False,
    tf32: bool = False,
    batch: int = 1,
    costs: CostTable = DERIVED,
) -> GemmPlan:
    """Plan for `batch` products out [m, n] = a [m, k] b [k, n], m and n at least 1, on `num_sms` SMs.

    itemsize: bytes of an element of a and b. aligned: they can be loaded 16 bytes at a time. interpreted: by Triton's interpreter.
    tf32: float32 operands are rounded to it. costs: of the device.

    k = 0 makes tiles without iterations, all of them whole. Section 5.1 of arXiv 2301.03598 chooses the number of shares.
    """
    if interpreted:
        tile = INTERPRETER_TILE
        num_tiles, iters = batch * _num_tiles(m, n, tile), -(-k // tile.block_k)
        return GemmPlan(tile, uniform_plan(num_tiles, iters, max(1, min(num_sms, num_tiles * max(iters, 1)))))
    tile = choose_tile(m, n, itemsize, num_sms, aligned, tf32, batch)
    num_tiles, iters = batch * _num_tiles(m, n, tile), -(-k // tile.block_k)
    model = costs.model(tile_key(tile, itemsize, tf32))
    return GemmPlan(tile, choose_shares(model, num_tiles, iters, num_sms * tile.workers_per_sm))


MIN_STEPS_PER_SHARE = 4  # of a group's tile: fewer do not pay for a partial and its merge; an estimate


def plan_grouped(
    m: int,
    num_groups: int,
    n: int,
    k: int,
    itemsize: int,
    num_sms: int,
    aligned: bool = True,
    interpreted: bool = False,
) -> tuple[TileConfig, int]:
    """Tile and number of programs for m rows that are dealt to groups on the device: enough for any way of dealing them. A worker
    has two partials at most, and fewer than two split tiles a worker exist."""
    tile = INTERPRETER_TILE if interpreted else choose_tile(-(-m // num_groups), n, itemsize, num_sms, aligned)
    row_tiles = m // tile.block_m + min(num_groups, m)
    most = row_tiles * -(-n // tile.block_n) * max(1, -(-k // tile.block_k) // MIN_STEPS_PER_SHARE)
    return tile, min(most, num_sms * tile.workers_per_sm)

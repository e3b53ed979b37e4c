"""The kernels whose tiles `evenshare calibrate` times, and how."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from evenshare.device.target import HOPPER, Target
from evenshare.gemm import hopper, hopper_scaled, hopper_skinny, launch
from evenshare.gemm import plan as portable
from evenshare.gemm.costs import TileKey
from evenshare.gemm.epilogue import Epilogue
from evenshare.gemm.scales import Scales
from evenshare.report.calibrate import Work

Call = Callable[[], None]
NUM_SAMPLES, WARM_UP = 15, 2
UNSCALED = Scales(None, None, 1.0, 1)
DTYPES = {"16-bit": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32, "tf32": torch.float32}


@dataclass(frozen=True)
class TimedTile:
    """One tile of one kernel."""

    key: TileKey
    max_workers: int
    one_row: bool  # its tiles hold all rows
    launch: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Work], None]  # of a [m, k], b [k, n], out [m, n]

    def prepare(self, work: Work, device: torch.device) -> Call:
        """The product that `work` asks for, whole tiles of random operands; b is a weight's transpose."""
        m, n = work.tiles_m * self.key.block_m, work.tiles_n * self.key.block_n
        k = work.shares.iters_per_tile * self.key.block_k
        dtype = DTYPES[self.key.operands]
        a, weight = (torch.randn(rows, k, device=device, dtype=torch.bfloat16).to(dtype) for rows in (m, n))
        out = torch.empty(m, n, device=device, dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16)
        return lambda: self.launch(a, weight.t(), out, work)


def timed_tiles(target: Target) -> Iterator[TimedTile]:
    """All whose constants plans on this device look up."""
    if target.capability == HOPPER:
        yield from _hopper_tiles(target)
    for itemsize, tiles in portable.TILES.items():
        for tile in tiles:
            yield _portable_tile(target, tile, itemsize)
    for tile in portable.TF32_TILES:
        yield _portable_tile(target, tile, 4, tf32=True)


def _hopper_tiles(target: Target) -> Iterator[TimedTile]:
    def planned(plan: Any) -> Any:
        return lambda *_: plan

    def dense(tile: hopper.HopperTile) -> Callable[..., None]:
        return lambda a, b, out, work: hopper.matmul(
            a, b, Epilogue(), out, target, planned(hopper.HopperPlan(tile, work.shares))
        )

    def scaled(tile: hopper.HopperTile) -> Callable[..., None]:
        return lambda a, b, out, work: hopper_scaled.matmul(
            a, b, UNSCALED, Epilogue(), out, target, planned(hopper.HopperPlan(tile, work.shares))
        )

    def skinny(tile: hopper_skinny.SkinnyTile) -> Callable[..., None]:
        return lambda a, b, out, work: hopper_skinny.matmul(
            a, b, Epilogue(), out, target, planned(hopper_skinny.SkinnyPlan(tile, work.shares))
        )

    for tile in hopper.TILES:
        yield TimedTile(hopper.tile_key(tile), target.num_sms, False, dense(tile))
    for rows in hopper_skinny.BLOCK_M:
        for strips in (1, 2):
            few = hopper_skinny.SkinnyTile(rows, strips)
            yield TimedTile(hopper_skinny.tile_key(few), target.num_sms, True, skinny(few))
    for tile in hopper_scaled.TILES:
        yield TimedTile(hopper_scaled.tile_key(tile), target.num_sms, False, scaled(tile))


def _portable_tile(target: Target, tile: portable.TileConfig, itemsize: int, tf32: bool = False) -> TimedTile:
    def dense(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, work: Work) -> None:
        plan = portable.GemmPlan(tile, work.shares)
        launch.matmul(a[None], b[None], Epilogue(), out[None], target, "tf32" if tf32 else "ieee", plan)

    def scaled(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, work: Work) -> None:
        launch.scaled_matmul(a, b, UNSCALED, Epilogue(), out, target, portable.GemmPlan(tile, work.shares))

    key = portable.tile_key(tile, itemsize, tf32)
    workers = target.num_sms * tile.workers_per_sm
    return TimedTile(key, workers, False, scaled if itemsize == 1 else dense)


def time_us(call: Call, device: torch.device) -> float:
    """Median microseconds of a launch that finds nothing in the L2."""
    for _ in range(WARM_UP):
        call()
    swept = torch.zeros(
        torch.cuda.get_device_properties(device).L2_cache_size, device=device
    )  # four times the L2's bytes
    pairs = []
    for _ in range(NUM_SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        swept.sum()  # read, and the GPU is busy while the host queues the launch
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in pairs)

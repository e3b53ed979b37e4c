"""The Hopper kernel's side of a product of fp8 codes: which ones it takes, its tiles and its launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from evenshare.device.activations import is_gated
from evenshare.device.epilogue import get_activation
from evenshare.device.launcher import Box, Launch, get_launcher
from evenshare.device.target import HOPPER, Target
from evenshare.device.workspace import stream_workspace
from evenshare.gemm.costs import CostTable, TileKey, costs_of
from evenshare.gemm.epilogue import Epilogue
from evenshare.gemm.hopper import PIECE_BYTES, HopperPlan, HopperTile, Planner, leaves_by_tma, plan_tile
from evenshare.gemm.kernels import hopper_scaled
from evenshare.gemm.scales import Scales

PANEL = hopper_scaled.PANEL.value  # the k of a step
TILES = (HopperTile(128, 256, 2, 3), HopperTile(128, 128, 2, 6), HopperTile(64, 128, 1, 8), HopperTile(64, 64, 1, 12))


@lru_cache(maxsize=4096)
def plan_matmul(m: int, n: int, k: int, gated: bool, num_sms: int, costs: CostTable) -> HopperPlan:
    """As `hopper.plan_matmul`."""
    timed = [plan_tile(tile, tile_key(tile), costs, m, n, k, gated, num_sms) for tile in TILES]
    return min(timed, key=lambda found: found[1])[0]


def tile_key(tile: HopperTile) -> TileKey:
    return TileKey("hopper_scaled", "fp8", tile.block_m, tile.block_n, PANEL)


def refusal(a: torch.Tensor, b: torch.Tensor, scales: Scales, gated: bool, target: Target) -> str | None:
    """Why this product runs on the portable kernel instead, or None."""
    if target.capability != HOPPER:
        return "the kernel is for compute capability 9.0"
    if a.shape[1] == 0:
        return "there is nothing to multiply"
    for name, operand, dim in (("a", a, 1), ("b", b, 0)):
        if operand.stride(dim) != 1 or operand.stride(1 - dim) % PIECE_BYTES or operand.data_ptr() % PIECE_BYTES:
            return f"wgmma takes fp8 operands whose k is contiguous, and TMA whole 16 bytes of it: {name} is laid out otherwise"
    if gated and scales.columns_per_scale > 1 and b.shape[1] // 2 % scales.columns_per_scale:
        return "the second half of a gated weight begins within a block of scales"
    return None


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: Scales,
    epilogue: Epilogue,
    out: torch.Tensor,
    target: Target,
    planner: Planner | None = None,
) -> None:
    """As `launch.scaled_matmul` for a product that `refusal` does not refuse. planner: as for `hopper.matmul`."""
    bias, activation, residual, _, _ = epilogue
    (m, n), k, gated = out.shape, a.shape[1], is_gated(activation)
    plan = (
        planner(m, n, k, gated, target.num_sms)
        if planner
        else plan_matmul(m, n, k, gated, target.num_sms, costs_of(target.device))
    )
    by_tma = leaves_by_tma(out, plan.tile.block_n // 2 if gated else plan.tile.block_n)
    launch = _bind(
        hopper_scaled.scaled_matmul,
        plan,
        activation,
        by_tma,
        a.device,
        (m, n, k),
        scales.factor,
        (scales.a_blocks, scales.columns_per_scale > 1),
        (a.stride(0), b.stride(1)),
        (*scales.strides, *out.stride(), *((0, 0) if residual is None else residual.stride())),
    )
    tile, shares = plan.tile, plan.shares
    workspace = stream_workspace(
        shares.max_slots * tile.block_m * tile.block_n, shares.max_counters * tile.consumers, a.device
    )
    launch(
        a,
        b.t(),
        out if by_tma else None,
        None if by_tma else out,
        scales.a,
        scales.b,
        None if bias is None else bias.contiguous(),
        residual,
        workspace.partials,
        workspace.counters,
    )


@lru_cache(maxsize=4096)
def _bind(
    kernel: Any,
    plan: HopperPlan,
    activation: str | None,
    by_tma: bool,
    device: torch.device,
    sizes: tuple[int, int, int],
    factor: float,
    blocks: tuple[bool, bool],
    operand_strides: tuple[int, int],
    strides: tuple[int, ...],
) -> Launch:
    """A launch for every product of these sizes and strides; its arguments are the tensors."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    (m, n, k), gated = sizes, is_gated(activation)
    tile, shares = plan.tile, plan.shares
    rows = tile.block_m // tile.consumers
    columns = tile.block_n // 2 if gated else tile.block_n
    codes, halves = (NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2) for bits in (8, 16))
    width = min(columns, 128)
    boxes = {
        0: Box((m, k), (operand_strides[0], 1), (rows, PANEL), codes),
        1: Box((2 * n if gated else n, k), (operand_strides[1], 1), (width, PANEL), codes),
    }
    if by_tma:
        boxes[2] = Box((m, n), (strides[4], 1), (rows, columns), halves)
    launcher = get_launcher(
        kernel,
        10,
        A_BLOCKS=blocks[0],
        B_BLOCKS=blocks[1],
        ACTIVATION=get_activation(activation),
        GATED=gated,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CONSUMERS=tile.consumers,
        STAGES=tile.num_stages,
        num_warps=4,
        launch_pdl=True,
    )
    plan_arguments = (shares.num_workers, shares.num_tiles, shares.iters_per_tile, shares.num_whole)
    return launcher.bind(device, (shares.num_workers,), (factor, m, n, *strides, *plan_arguments), boxes)

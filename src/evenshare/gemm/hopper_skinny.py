"""The Hopper kernel's side of a product of few rows: which ones it takes, its tiles and its launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from evenshare.device.activations import is_gated
from evenshare.device.epilogue import get_activation
from evenshare.device.launcher import Box, Launch, get_launcher
from evenshare.device.target import Target
from evenshare.device.workspace import stream_workspace
from evenshare.gemm.costs import CostTable, TileKey, costs_of
from evenshare.gemm.epilogue import Epilogue
from evenshare.gemm.hopper import major, unfit
from evenshare.gemm.kernels import hopper_skinny
from evenshare.gemm.plan import choose_shares
from evenshare.schedule.plan import UniformPlan

PANEL, STEP, STRIP = (c.value for c in (hopper_skinny.PANEL, hopper_skinny.STEP, hopper_skinny.STRIP))
BLOCK_M = (8, 16, 32, 64)  # rows of a: as few as hold them
SHARED_BYTES = (227 << 10) - 2048  # of an SM, less barriers and alignment


@dataclass(frozen=True)
class SkinnyTile:
    block_m: int
    strips: int  # of 64 columns of b

    @property
    def num_stages(self) -> int:
        """All of shared memory holds steps."""
        return SHARED_BYTES // (2 * STEP * (self.strips * STRIP + self.block_m))

    @property
    def partial_elements(self) -> int:
        return self.strips * STRIP * self.block_m


@dataclass(frozen=True)
class SkinnyPlan:
    tile: SkinnyTile
    shares: UniformPlan


def tile_key(tile: SkinnyTile) -> TileKey:
    return TileKey("hopper_skinny", "16-bit", tile.block_m, tile.strips * STRIP, STEP)


# As `hopper.Planner`.
Planner = Callable[[int, int, int, bool, int], SkinnyPlan]


@lru_cache(maxsize=4096)
def plan_matmul(m: int, n: int, k: int, gated: bool, num_sms: int, costs: CostTable) -> SkinnyPlan:
    """Tile and shares of out [m, n], m at most 64; a pure function, as `hopper.plan_matmul`."""
    block_m = next(size for size in BLOCK_M if m <= size)
    timed = []
    for strips in (2,) if gated else (1, 2):
        tile = SkinnyTile(block_m, strips)
        model = costs.model(tile_key(tile))
        shares = choose_shares(model, -(-n // (STRIP if gated else strips * STRIP)), -(-k // STEP), num_sms)
        timed.append((SkinnyPlan(tile, shares), model.makespan(shares)))
    return min(timed, key=lambda found: found[1])[0]


def refusal(a: torch.Tensor, b: torch.Tensor, target: Target) -> str | None:
    """Why this product runs on another kernel instead, or None."""
    if (reason := unfit(a, target)) is not None:
        return reason
    if a.shape[0] > BLOCK_M[-1]:
        return f"the kernel takes up to {BLOCK_M[-1]} rows"
    if major(a) != 1:
        return "a has no contiguous rows of whole 16 bytes"
    if major(b) is None:
        return "b has no dimension of stride 1 beside one of whole 16 bytes"
    return None


def takes(a: torch.Tensor, b: torch.Tensor, batch: int, target: Target) -> bool:
    """As `hopper.takes`."""
    fills = batch == 1 or -(-b.shape[1] // STRIP) >= target.num_sms
    return fills and refusal(a, b, target) is None


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Epilogue,
    out: torch.Tensor,
    target: Target,
    planner: Planner | None = None,
) -> None:
    """As `launch.matmul` for one product that `refusal` does not refuse. planner: as for `hopper.matmul`."""
    bias, activation, residual, alpha, beta = epilogue
    (m, n), k, gated = out.shape, a.shape[1], is_gated(activation)
    plan = (
        planner(m, n, k, gated, target.num_sms)
        if planner
        else plan_matmul(m, n, k, gated, target.num_sms, costs_of(target.device))
    )
    b_k_major = major(b) == 0
    b = b.t() if b_k_major else b
    launch = _bind(
        hopper_skinny.matmul,
        plan,
        activation,
        b_k_major,
        a.device,
        (m, n, k),
        (float(alpha), float(beta)),
        (a.stride(0), b.stride(0), *out.stride(), *((0, 0) if residual is None else residual.stride())),
    )
    shares = plan.shares
    workspace = stream_workspace(shares.max_slots * plan.tile.partial_elements, shares.max_counters, a.device)
    bias = None if bias is None else bias.contiguous()
    launch(a, b, out, bias, residual, workspace.partials, workspace.counters)


@lru_cache(maxsize=4096)
def _bind(
    kernel: Any,
    plan: SkinnyPlan,
    activation: str | None,
    b_k_major: bool,
    device: torch.device,
    sizes: tuple[int, int, int],
    factors: tuple[float, float],
    strides: tuple[int, ...],
) -> Launch:
    """A launch for every product of these sizes and strides; its arguments are the tensors."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    (m, n, k), gated = sizes, is_gated(activation)
    tile, shares = plan.tile, plan.shares
    columns = 2 * n if gated else n
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    of_b = ((columns, k), (STRIP, PANEL)) if b_k_major else ((k, columns), (STEP, STRIP))
    boxes = {
        0: Box((m, k), (strides[0], 1), (tile.block_m, PANEL), layout),
        1: Box(of_b[0], (strides[1], 1), of_b[1], layout),
    }
    launcher = get_launcher(
        kernel,
        7,
        B_K_MAJOR=b_k_major,
        ACTIVATION=get_activation(activation),
        GATED=gated,
        STRIPS=tile.strips,
        BLOCK_M=tile.block_m,
        STAGES=tile.num_stages,
        num_warps=4,
        launch_pdl=True,
    )
    plan_arguments = (shares.num_workers, shares.num_tiles, shares.iters_per_tile, shares.num_whole)
    return launcher.bind(device, (shares.num_workers,), (*factors, m, n, *strides[2:], *plan_arguments), boxes)

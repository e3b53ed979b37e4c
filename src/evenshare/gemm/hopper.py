"""The Hopper kernel's side of a matrix product: which ones it takes, its tiles and its launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from evenshare.gemm.kernels import hopper_matmul
from evenshare.gemm.plan import choose_shares
from evenshare.schedule.plan import UniformPlan

PANEL = hopper_matmul.PANEL.value  # the k of a step
# Where `hopper_skinny` refuses them. 16 x 4096 x 4096 on an H200: 15 us on the portable kernel, 22 on this one.
FEW_ROWS = 16
PIECE_BYTES = 16  # what TMA wants addresses and strides to be multiples of


@dataclass(frozen=True)
class HopperTile:
    block_m: int
    block_n: int
    consumers: int  # of four warps each
    num_stages: int


TILES = (
    HopperTile(128, 256, 2, 3),
    HopperTile(128, 128, 2, 5),
    HopperTile(64, 256, 1, 4),
    HopperTile(64, 128, 1, 7),
    HopperTile(64, 64, 1, 10),
)


@dataclass(frozen=True)
class HopperPlan:
    tile: HopperTile
    shares: UniformPlan


# (m, n, k, gated, num_sms) -> tile and shares of out [m, n].
Planner = Callable[[int, int, int, bool, int], HopperPlan]


@lru_cache(maxsize=4096)
def plan_matmul(m: int, n: int, k: int, gated: bool, num_sms: int, costs: CostTable) -> HopperPlan:
    """Tile and shares of out [m, n], a pure function: those whose slowest worker is done first, by the device's costs."""
    # Half of a gated tile is a whole panel of b, which may have contiguous rows.
    tiles = [tile for tile in TILES if not gated or tile.block_n >= 2 * PANEL]
    timed = [plan_tile(tile, tile_key(tile), costs, m, n, k, gated, num_sms) for tile in tiles]
    return min(timed, key=lambda found: found[1])[0]


def tile_key(tile: HopperTile) -> TileKey:
    return TileKey("hopper_matmul", "16-bit", tile.block_m, tile.block_n, PANEL)


def plan_tile(
    tile: HopperTile, key: TileKey, costs: CostTable, m: int, n: int, k: int, gated: bool, num_sms: int
) -> tuple[HopperPlan, float]:
    """(shares of tiles of this kind, when the slowest worker is done, in microseconds)."""
    model = costs.model(key)
    shares = choose_shares(model, count_tiles(tile, m, n, gated), -(-k // key.block_k), num_sms)
    return HopperPlan(tile, shares), model.makespan(shares)


def count_tiles(tile: HopperTile, m: int, n: int, gated: bool) -> int:
    return -(-m // tile.block_m) * -(-(2 * n if gated else n) // tile.block_n)


def unfit(a: torch.Tensor, target: Target) -> str | None:
    """Why no 16-bit kernel for Hopper multiplies a [m, k], or None."""
    if target.capability != HOPPER:
        return "the kernel is for compute capability 9.0"
    if a.dtype not in (torch.float16, torch.bfloat16):
        return "the kernel takes 16-bit operands"
    return "there is nothing to multiply" if a.shape[1] == 0 else None


def refusal(a: torch.Tensor, b: torch.Tensor, target: Target) -> str | None:
    """Why this product runs on the portable kernel instead, or None."""
    if (reason := unfit(a, target)) is not None:
        return reason
    if a.shape[0] <= FEW_ROWS:
        return f"up to {FEW_ROWS} rows are read faster by the portable kernel's small tiles"
    for name, operand in (("a", a), ("b", b)):
        if major(operand) is None:
            return f"{name} has no dimension of stride 1 beside one of whole 16 bytes"
    return None


def takes(a: torch.Tensor, b: torch.Tensor, batch: int, target: Target) -> bool:
    """Whether `batch` products like a [m, k] b [k, n] come here, one by one: where each fills the GPU."""
    fills = batch == 1 or count_tiles(TILES[-1], a.shape[0], b.shape[1], False) >= target.num_sms
    return fills and refusal(a, b, target) is None


def major(t: torch.Tensor) -> int | None:
    """The dimension that is contiguous, if TMA takes the tensor."""
    piece = PIECE_BYTES // t.element_size()
    if t.data_ptr() % PIECE_BYTES:
        return None
    return next((dim for dim in (1, 0) if t.stride(dim) == 1 and t.stride(1 - dim) % piece == 0), None)


def leaves_by_tma(out: torch.Tensor, columns: int) -> bool:
    """Whether TMA takes out in tiles of so many columns. It writes whole pieces: of a row that ends within one, it would write past
    the end. Rows of a box are as wide as the swizzle."""
    return out.element_size() == 2 and columns >= PANEL and major(out) == 1 and out.shape[1] * 2 % PIECE_BYTES == 0


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Epilogue,
    out: torch.Tensor,
    target: Target,
    planner: Planner | None = None,
) -> None:
    """As `launch.matmul` for one product that `refusal` does not refuse. planner: who computes what; None: `plan_matmul`."""
    bias, activation, residual, alpha, beta = epilogue
    (m, n), k, gated = out.shape, a.shape[1], is_gated(activation)
    plan = (
        planner(m, n, k, gated, target.num_sms)
        if planner
        else plan_matmul(m, n, k, gated, target.num_sms, costs_of(target.device))
    )
    a_k_major, b_k_major = major(a) == 1, major(b) == 0
    a, b = a if a_k_major else a.t(), b.t() if b_k_major else b
    by_tma = leaves_by_tma(out, plan.tile.block_n // 2 if gated else plan.tile.block_n)
    launch = _bind(
        hopper_matmul.matmul,
        plan,
        activation,
        a_k_major,
        b_k_major,
        by_tma,
        a.device,
        (m, n, k),
        (float(alpha), float(beta)),
        (a.stride(0), b.stride(0), *out.stride(), *((0, 0) if residual is None else residual.stride())),
    )
    tile, shares = plan.tile, plan.shares
    workspace = stream_workspace(
        shares.max_slots * tile.block_m * tile.block_n, shares.max_counters * tile.consumers, a.device
    )
    bias = None if bias is None else bias.contiguous()
    launch(
        a, b, out if by_tma else None, None if by_tma else out, bias, residual, workspace.partials, workspace.counters
    )


@lru_cache(maxsize=4096)
def _bind(
    kernel: Any,
    plan: HopperPlan,
    activation: str | None,
    a_k_major: bool,
    b_k_major: bool,
    by_tma: bool,
    device: torch.device,
    sizes: tuple[int, int, int],
    factors: tuple[float, float],
    strides: tuple[int, ...],
) -> Launch:
    """A launch for every product of these sizes and strides; its arguments are the tensors."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    (m, n, k), gated = sizes, is_gated(activation)
    tile, shares = plan.tile, plan.shares
    rows = tile.block_m // tile.consumers
    columns = tile.block_n // 2 if gated else tile.block_n
    stride_a, stride_b, *stride_out = strides[:4]
    n_in = 2 * n if gated else n
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    def box(outer: int, inner: int, stride: int, block: tuple[int, int]) -> Box:
        return Box((outer, inner), (stride, 1), block, layout)

    boxes = {
        0: box(m, k, stride_a, (rows, PANEL)) if a_k_major else box(k, m, stride_a, (PANEL, PANEL)),
        1: box(n_in, k, stride_b, (columns, PANEL)) if b_k_major else box(k, n_in, stride_b, (PANEL, PANEL)),
    }
    if by_tma:
        boxes[2] = box(m, n, stride_out[0], (rows, columns))
    launcher = get_launcher(
        kernel,
        8,
        A_K_MAJOR=a_k_major,
        B_K_MAJOR=b_k_major,
        ACTIVATION=get_activation(activation),
        GATED=gated,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CONSUMERS=tile.consumers,
        STAGES=tile.num_stages,
        num_warps=4,
        launch_pdl=True,
    )
    static = (
        *factors,
        m,
        n,
        *strides[2:],
        shares.num_workers,
        shares.num_tiles,
        shares.iters_per_tile,
        shares.num_whole,
    )
    return launcher.bind(device, (shares.num_workers,), static, boxes)

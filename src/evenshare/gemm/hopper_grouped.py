"""The Hopper kernel's side of grouped products: which ones it takes, their tiles and the launches."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from evenshare.device.activations import is_gated
from evenshare.device.epilogue import get_activation
from evenshare.device.launcher import Box, Launch, get_launcher
from evenshare.device.target import Target
from evenshare.device.workspace import stream_workspace
from evenshare.gemm.costs import DERIVED, CostTable, costs_of
from evenshare.gemm.hopper import PANEL, TILES, leaves_by_tma, major, tile_key, unfit
from evenshare.gemm.kernels import hopper_grouped, row_tiles
from evenshare.gemm.plan import MIN_STEPS_PER_SHARE

CONSUMERS, ROWS = hopper_grouped.CONSUMERS.value, hopper_grouped.ROWS.value
BLOCK_M = CONSUMERS * ROWS
FEW_ROWS = 64  # of a group on average: half a tile's, which the portable kernel has in lower tiles
TILES_AT_ONCE = 16  # entries of the table that a program writes


class GroupedTile(NamedTuple):
    """Columns, stages of the ring, and the k-steps that cutting the last tiles has to save."""

    block_n: int
    num_stages: int
    cut_steps: int


def choose_tile(m: int, num_groups: int, n: int, num_sms: int, costs: CostTable = DERIVED) -> GroupedTile:
    """Of m rows in num_groups groups, n columns: the GEMM's widest where every SM gets two of them, else half as wide a one.
    costs: those of the GEMM's tiles."""
    num_row_tiles = -(-m // BLOCK_M) + num_groups // 2  # a group's last one is half full on average
    wide, narrow = TILES[:2]
    tile = wide if num_row_tiles * -(-n // wide.block_n) >= 2 * num_sms else narrow
    model = costs.model(tile_key(tile))
    return GroupedTile(tile.block_n, tile.num_stages, round((model.b + 2 * model.d) / model.c))


def refusal(x: torch.Tensor, w: torch.Tensor, num_groups: int, target: Target) -> str | None:
    """Why x [m, k] w [groups here, k, n] of num_groups groups runs on the portable kernel instead, or None."""
    if (reason := unfit(x, target)) is not None:
        return reason
    if x.shape[0] <= FEW_ROWS * num_groups:
        return f"up to {FEW_ROWS} rows a group are read faster by the portable kernel's lower tiles"
    if major(x) != 1:
        return "x has no rows of contiguous columns at multiples of 16 bytes"
    if w.shape[0] * w.shape[2] >= 1 << 31 or major(w[0]) != 0 or w.stride(0) != w.shape[2] * w.stride(2):
        return "w has no columns of contiguous rows at multiples of 16 bytes, those of all groups side by side"
    return None


def matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
    target: Target,
    first_group: int = 0,
) -> None:
    """As `launch.grouped_matmul` without gather and scatter, for what `refusal` does not refuse."""
    (num_here, _, n_in), (m, k), n, num_groups = w.shape, x.shape, out.shape[1], offsets.shape[0] - 1
    m_here = -(-m * num_here // num_groups)  # as far as the host knows
    tile = choose_tile(m_here, num_here, n_in, target.num_sms, costs_of(target.device))
    most = m // BLOCK_M + min(num_here, m)
    table = offsets.new_empty(most, 4)
    with torch.cuda.device_of(x):
        row_tiles.row_tiles[(max(-(-most // TILES_AT_ONCE), target.num_sms),)](
            offsets,
            table,
            out,
            m,
            n,
            *out.stride(),
            num_groups,
            first_group,
            num_here,
            BLOCK_M=BLOCK_M,
            GROUPS=triton.next_power_of_2(num_here),
            TILES=TILES_AT_ONCE,
        )
    by_tma = leaves_by_tma(out, tile.block_n // 2 if is_gated(activation) else tile.block_n)
    launch = _bind(
        hopper_grouped.grouped_matmul,
        tile,
        activation,
        by_tma,
        x.device,
        (m, n, k, num_here * n_in, target.num_sms),
        (x.stride(0), w.stride(2), *out.stride()),
    )
    elements = 2 * target.num_sms * BLOCK_M * tile.block_n
    workspace = stream_workspace(elements, 2 * target.num_sms * CONSUMERS, x.device)
    bias = None if bias is None else bias.contiguous()
    launch(x, w, out if by_tma else None, out, bias, table, workspace.partials, workspace.counters)


@lru_cache(maxsize=4096)
def _bind(
    kernel: Any,
    tile: GroupedTile,
    activation: str | None,
    by_tma: bool,
    device: torch.device,
    sizes: tuple[int, int, int, int, int],
    strides: tuple[int, ...],
) -> Launch:
    """A launch for every product of these sizes and strides; its arguments are the tensors."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    (m, n, k, columns_b, num_workers), gated = sizes, is_gated(activation)
    columns = tile.block_n // 2 if gated else tile.block_n
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    boxes = {
        0: Box((m, k), (strides[0], 1), (ROWS, PANEL), layout),
        1: Box((columns_b, k), (strides[1], 1), (columns, PANEL), layout),
    }
    if by_tma:
        boxes[2] = Box((m, n), (strides[2], 1), (ROWS, columns), layout)
    launcher = get_launcher(
        kernel,
        8,
        ACTIVATION=get_activation(activation),
        GATED=gated,
        BLOCK_N=tile.block_n,
        STAGES=tile.num_stages,
        num_warps=4,
        launch_pdl=True,
    )
    static = (n, *strides[2:], num_workers, -(-k // PANEL), MIN_STEPS_PER_SHARE, tile.cut_steps)
    return launcher.bind(device, (num_workers,), static, boxes)

"""4-bit products on Hopper: the kernel for few tokens, or tiles that are cut along k, and the launch of `kernels.hopper_w4a16`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from evenshare.device.activations import is_gated
from evenshare.device.epilogue import get_activation
from evenshare.device.launcher import Box, Launch, get_launcher
from evenshare.device.target import Target
from evenshare.device.workspace import stream_workspace
from evenshare.quant import hopper_few
from evenshare.quant.hopper_weight import BAND, BLOCK, STEP, Geometry, for_tma, pack
from evenshare.quant.kernels import hopper_w4a16
from evenshare.quant.weight import QuantizedWeight
from evenshare.schedule.plan import UniformPlan
from evenshare.schedule.uniform import uniform_plan

STRIP, PIECES = hopper_w4a16.STRIP.value, hopper_w4a16.PIECES.value
SHARED_BYTES = (227 << 10) - 2048  # of an SM, less barriers and alignment
MAX_STAGES = 12
MIN_STEPS_PER_SHARE = 2  # a partial is 64 columns of W in bytes
BLOCK_M = (8, 16, 32, 64, 128)  # tokens of a tile
LAUNCH_US, STEP_US = {64: 11.7, 128: 22.9}, {64: 0.62, 128: 0.66}  # with the partials of cut tiles


@dataclass(frozen=True)
class HopperTile:
    block_m: int  # tokens
    strips: int  # of 64 rows of W, each with a consumer of its own
    num_stages: int


def make_tile(block_m: int, weight: Geometry) -> HopperTile:
    """Few tokens leave registers for more rows of W. All of shared memory holds steps."""
    strips = 4 if block_m <= 16 else 2
    scale_bits = max(STEP // weight.group_size, 1) * strips * STRIP * (weight.scale_bits + weight.zero_bits)
    stage_bytes = strips * STRIP * STEP // 2 + block_m * STEP * 2 + scale_bits // 8
    return HopperTile(block_m, strips, min(SHARED_BYTES // stage_bytes, MAX_STAGES))


@dataclass(frozen=True)
class HopperPlan:
    tile: HopperTile
    shares: UniformPlan


@lru_cache(maxsize=4096)
def plan_matmul(m: int, n: int, weight: Geometry, num_sms: int) -> HopperPlan:
    """Tile and shares of m tokens by n rows of W, a pure function. As few tokens a tile as hold m; of more than 64 those that are
    done first, because the partials of 128 cost as much as many steps."""
    sizes = [next((size for size in BLOCK_M if m <= size), BLOCK_M[-1])]
    if m > BLOCK_M[-2]:
        sizes.append(BLOCK_M[-2])
    plans = [_plan_tile(make_tile(size, weight), m, n, weight, num_sms) for size in sizes]
    return min(plans, key=_microseconds) if len(plans) > 1 else plans[0]


def _plan_tile(tile: HopperTile, m: int, n: int, weight: Geometry, num_sms: int) -> HopperPlan:
    num_steps = weight.num_blocks * BLOCK // STEP
    num_tiles = -(-m // tile.block_m) * -(-n // (tile.strips * STRIP))
    num_workers = max(num_tiles, num_tiles * num_steps // MIN_STEPS_PER_SHARE)
    return HopperPlan(tile, uniform_plan(num_tiles, num_steps, min(num_workers, num_sms)))


def _microseconds(plan: HopperPlan) -> float:
    """By the times of four weights with 64 and 128 tokens on an H200."""
    shares = plan.shares
    steps = shares.num_tiles * shares.iters_per_tile / shares.num_workers
    return LAUNCH_US[plan.tile.block_m] + STEP_US[plan.tile.block_m] * steps


def matmul(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    target: Target,
) -> None:
    """As `launch.matmul`, for what `hopper_weight.refusal` does not refuse."""
    packed = pack(weight, is_gated(activation))
    if weight.permutation is not None:
        x = weight.gather(x)
    x = for_tma(x)
    few = hopper_few.make_tile(x.shape[0], packed.geometry)
    if few is not None:
        hopper_few.matmul(few, x, packed, weight.n, bias, activation, residual, out, target.num_sms)
        return
    m, n_out = out.shape
    plan = plan_matmul(m, weight.n, packed.geometry, target.num_sms)
    strides = (x.stride(0), *out.stride(), *((0, 0) if residual is None else residual.stride()))
    launch = _bind(hopper_w4a16.w4a16, plan, activation, packed.geometry, x.device, (m, n_out, x.shape[1]), strides)
    shares = plan.shares
    workspace = stream_workspace(
        shares.max_slots * plan.tile.strips * STRIP * plan.tile.block_m,
        shares.max_counters * plan.tile.strips,
        x.device,
    )
    bias = None if bias is None else bias.contiguous()
    launch(
        x,
        packed.words,
        packed.scales,
        packed.zeros,
        bias,
        residual,
        out,
        workspace.partials,
        workspace.counters,
    )


@lru_cache(maxsize=4096)
def _bind(
    kernel: Any,
    plan: HopperPlan,
    activation: str | None,
    weight: Geometry,
    device: torch.device,
    sizes: tuple[int, int, int],
    strides: tuple[int, ...],
) -> Launch:
    """A launch for every product of these sizes and strides; its arguments are the tensors."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    m, n_out, k = sizes
    tile, shares = plan.tile, plan.shares

    def layout(width: int, bits: int, rank: int) -> NVMMASharedLayout:
        return NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=bits, rank=rank)

    piece = PIECES * tile.strips
    num_bands, num_blocks = weight.num_bands, weight.num_blocks
    padded_n = num_bands * BAND

    def per_group(bits: int) -> Box:
        shape = (num_blocks * BLOCK // weight.group_size, padded_n // piece, piece)
        box = (STEP // weight.group_size, PIECES, piece)
        return Box(shape, (padded_n, piece, 1), box, layout(piece * bits // 8, bits, 3))

    bands = tile.strips * STRIP // BAND
    words = Box(
        (num_bands, num_blocks, BAND // 4, 32),
        (num_blocks * 128, 128, 32, 1),
        (bands, 1, BAND // 4, 32),
        layout(128, 32, 4),
    )
    boxes = {
        0: Box((m, k), (strides[0], 1), (tile.block_m, BLOCK), layout(128, 16, 2)),
        1: words,
        2: per_group(weight.scale_bits),
    }
    if weight.zero_bits:
        boxes[3] = per_group(weight.zero_bits)
    launcher = get_launcher(
        kernel,
        9,
        GROUP_SIZE=weight.group_size,
        FORM=weight.form,
        ACTIVATION=get_activation(activation),
        GATED=is_gated(activation),
        STRIPS=tile.strips,
        BLOCK_M=tile.block_m,
        STAGES=tile.num_stages,
        num_warps=4,
        launch_pdl=True,
    )
    static = (
        m,
        n_out,
        *strides[1:],
        shares.num_workers,
        shares.num_tiles,
        shares.iters_per_tile,
        shares.num_whole,
    )
    return launcher.bind(device, (shares.num_workers,), static, boxes)

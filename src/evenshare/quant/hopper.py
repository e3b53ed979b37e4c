"""The Hopper kernel's side of a 4-bit product: which weights it takes, their packed form, its tiles and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from evenshare.device.activations import is_gated
from evenshare.device.epilogue import get_activation
from evenshare.device.launcher import Box, Launch, get_launcher
from evenshare.device.target import HOPPER, Target
from evenshare.device.workspace import stream_workspace
from evenshare.quant.encodings import CODEBOOKS
from evenshare.quant.kernels import hopper_w4a16
from evenshare.quant.kernels.dequantize import FLOAT_OFFSETS, INTEGER_ZEROS
from evenshare.quant.packing import FORMS
from evenshare.quant.weight import QuantizedWeight
from evenshare.schedule.plan import UniformPlan
from evenshare.schedule.uniform import uniform_plan

ROW_MULTIPLE = 256  # rows of W are padded to the widest tile
STEP, BLOCK, STRIP, PIECES = (
    c.value for c in (hopper_w4a16.STEP, hopper_w4a16.BLOCK, hopper_w4a16.STRIP, hopper_w4a16.PIECES)
)
SHARED_BYTES = (227 << 10) - 2048  # of an SM, less barriers and alignment
MAX_STAGES = 12
MIN_STEPS_PER_SHARE = 2  # a partial is 64 columns of W in bytes
BLOCK_M = (8, 16, 32, 64, 128)  # tokens of a tile
LAUNCH_US, STEP_US = {64: 11.7, 128: 22.9}, {64: 0.62, 128: 0.66}  # with the partials of cut tiles
PIECE_BYTES = 16  # what TMA wants addresses and strides to be multiples of


@dataclass(frozen=True)
class Geometry:
    """What a kernel is compiled and its descriptors are made for."""

    form: int
    group_size: int  # at most the columns of a step: a larger one is repeated
    scale_bits: int
    zero_bits: int  # 0: there are none
    num_strips: int
    num_blocks: int


@dataclass(frozen=True)
class HopperWeight:
    """Operands of `kernels.hopper_w4a16`. Padding is zero, scales included, so padded weights are zero."""

    words: torch.Tensor  # int32 [strips, blocks, 16, 32]: 64 x 64 codes in the order of the tensor cores' registers
    scales: torch.Tensor  # [groups, padded rows]
    zeros: torch.Tensor | None  # as scales: offsets, or zero points in int16
    geometry: Geometry


def refusal(dtype: torch.dtype, weight: QuantizedWeight, target: Target) -> str | None:
    """Why products of activations of `dtype` run on the portable kernel instead, or None."""
    if target.capability != HOPPER:
        return "the kernel is for compute capability 9.0"
    if weight.bits != 4:
        return "the kernel takes 4-bit codes"
    if dtype not in (torch.float16, torch.bfloat16):
        return "the kernel takes 16-bit x"
    return None


def for_tma(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it, whose rows lie as TMA wants them."""
    piece = PIECE_BYTES // x.element_size()
    if x.stride(1) == 1 and x.stride(0) % piece == 0 and x.data_ptr() % PIECE_BYTES == 0:
        return x
    return x.new_empty(x.shape[0], x.shape[1] + -x.shape[1] % piece)[:, : x.shape[1]].copy_(x)


def pack(weight: QuantizedWeight, gated: bool) -> HopperWeight:
    """The weight's packed form, from its cache or made now; as `packing.pack`. gated: of each 16 rows 8 are the gate's, 8 up's."""
    key = ("hopper", gated)
    found = weight.packed.get(key)
    if found is None:
        if weight.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "weight: got one that is not packed inside a CUDA graph's capture, want prepare(weight, ..., activation=...) before"
            )
        found = weight.packed[key] = _pack(weight, gated)
        if weight.device.type == "cuda":
            torch.cuda.current_stream(weight.device).synchronize()
    return found


def _rows(values: torch.Tensor, gated: bool) -> torch.Tensor:
    """[n, ...] in the kernel's order of rows, padded with zeros."""
    halves = values.unflatten(0, (2, -1)) if gated else values.unsqueeze(0)
    multiple = ROW_MULTIPLE // halves.shape[0]
    padding = [0, 0] * (halves.dim() - 2) + [0, -halves.shape[1] % multiple]
    halves = F.pad(halves, padding)
    return halves.unflatten(1, (-1, 8)).transpose(0, 1).flatten(0, 2) if gated else halves[0]


def _pack(weight: QuantizedWeight, gated: bool) -> HopperWeight:
    codes = _rows(F.pad(weight.unpacked_codes(), (0, -weight.stored_k % STEP)), gated)
    # [strip, block, warp, row, quad, step of 16, half of it, upper or lower 8 rows, pair]
    codes = codes.view(-1, 4, 2, 8, codes.shape[1] // BLOCK, 4, 2, 4, 2).permute(0, 4, 1, 3, 7, 5, 6, 2, 8)
    in_table = weight.encoding in CODEBOOKS
    words = torch.zeros(codes.shape[:6], dtype=torch.int32, device=weight.device)
    for half in range(2):
        for lower in range(2):
            for pair in range(2):
                nibble = 2 * (2 * half + lower) + pair if in_table else 2 * half + lower + 4 * pair
                words |= codes[..., half, lower, pair].to(torch.int32) << 4 * nibble
    num_steps = words.shape[1] * BLOCK // STEP
    repeats = max(weight.group_size // STEP, 1) if weight.num_groups > 1 else num_steps
    group_size = STEP if weight.num_groups == 1 else min(weight.group_size, STEP)
    num_groups = num_steps * STEP // group_size

    def columns(per_group: torch.Tensor) -> torch.Tensor:
        spread = _rows(per_group.repeat_interleave(repeats, 1)[:, :num_groups], gated)
        return F.pad(spread, (0, num_groups - spread.shape[1])).t().contiguous()

    if weight.offsets is not None:
        zeros, form = columns(weight.offsets.to(weight.scales.dtype)), FLOAT_OFFSETS
    elif weight.zeros is not None:
        zeros, form = columns(weight.zeros.to(torch.int16)), INTEGER_ZEROS
    else:
        zeros, form = None, FORMS[weight.encoding]
    words = words.view(*words.shape[:2], 16, 32)
    bits = (0 if values is None else 8 * values.element_size() for values in (weight.scales, zeros))
    geometry = Geometry(form.value, group_size, *bits, *words.shape[:2])
    return HopperWeight(words, columns(weight.scales), zeros, geometry)


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
    """As `launch.matmul`, for what `refusal` does not refuse."""
    packed = pack(weight, is_gated(activation))
    if weight.permutation is not None:
        x = weight.gather(x)
    x = for_tma(x)
    from evenshare.quant import hopper_few

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
    num_strips, num_blocks = weight.num_strips, weight.num_blocks
    padded_n = num_strips * STRIP

    def per_group(bits: int) -> Box:
        shape = (num_blocks * BLOCK // weight.group_size, padded_n // piece, piece)
        box = (STEP // weight.group_size, PIECES, piece)
        return Box(shape, (padded_n, piece, 1), box, layout(piece * bits // 8, bits, 3))

    words = Box(
        (num_strips, num_blocks, 16, 32), (num_blocks * 512, 512, 32, 1), (tile.strips, 1, 16, 32), layout(128, 32, 4)
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

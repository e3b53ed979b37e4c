"""4-bit weights as the Hopper kernels read them: which they take, and the packed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from evenshare.device.target import HOPPER, Target
from evenshare.quant.encodings import CODEBOOKS
from evenshare.quant.kernels import hopper_unpack
from evenshare.quant.kernels.dequantize import FLOAT_OFFSETS, INTEGER_ZEROS
from evenshare.quant.packing import FORMS
from evenshare.quant.weight import QuantizedWeight

ROW_MULTIPLE = 256  # rows of W are padded to the widest tile
STEP, BLOCK, BAND = (c.value for c in (hopper_unpack.STEP, hopper_unpack.BLOCK, hopper_unpack.BAND))
PIECE_BYTES = 16  # what TMA wants addresses and strides to be multiples of


@dataclass(frozen=True)
class Geometry:
    """What a kernel is compiled and its descriptors are made for."""

    form: int
    group_size: int  # at most the columns of a step: a larger one is repeated
    scale_bits: int
    zero_bits: int  # 0: there are none
    num_bands: int
    num_blocks: int


@dataclass(frozen=True)
class HopperWeight:
    """Operands of `kernels.hopper_w4a16` and `kernels.hopper_few`. Padding is zero, scales included, so padded weights are zero."""

    words: (
        torch.Tensor
    )  # int32 [bands of 16 rows, blocks of 64 columns, 4, 32]: in the order of the tensor cores' registers
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
    # [band, block, row, quad, step of 16, half of it, upper or lower 8 rows, pair]
    codes = codes.view(-1, 2, 8, codes.shape[1] // BLOCK, 4, 2, 4, 2).permute(0, 3, 2, 6, 4, 5, 1, 7)
    in_table = weight.encoding in CODEBOOKS
    words = torch.zeros(codes.shape[:5], dtype=torch.int32, device=weight.device)
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
    words = words.view(*words.shape[:2], BAND // 4, 32)
    bits = (0 if values is None else 8 * values.element_size() for values in (weight.scales, zeros))
    geometry = Geometry(form.value, group_size, *bits, *words.shape[:2])
    return HopperWeight(words, columns(weight.scales), zeros, geometry)

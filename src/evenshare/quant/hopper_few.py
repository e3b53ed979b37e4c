"""4-bit products of few tokens on Hopper: who computes which rows of W, and the launch of `kernels.hopper_few`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from evenshare.device.activations import is_gated
from evenshare.device.epilogue import get_activation
from evenshare.device.launcher import Launch, get_launcher
from evenshare.quant.hopper_weight import BAND, BLOCK, STEP, Geometry, HopperWeight
from evenshare.quant.kernels import hopper_few

TOKENS = (1, 8)  # of a worker; 16 take longer than on the kernel that cuts k
TURN_BYTES = 2 * STEP  # of x in float16, for each token and warp
SHARED_BYTES = 226 << 10  # of an SM
NUM_WARPS = 16
MAX_DEPTH = 4
SCALE_REGISTERS = 16  # of a thread, for the turns that are on their way


@dataclass(frozen=True)
class FewTile:
    tokens: int
    depth: int  # turns that are on their way
    unit: int  # of those between which the compiler may move instructions
    turns: int  # over the columns

    @property
    def shared_bytes(self) -> int:
        """x, beside it a factor and up to 8 sums for each token and turn; and the warps' sums, twice."""
        return self.turns * NUM_WARPS * self.tokens * (TURN_BYTES + 4 * 9) + 2 * NUM_WARPS * BAND * 8 * 4


@lru_cache(maxsize=4096)
def make_tile(m: int, geometry: Geometry) -> FewTile | None:
    """None: too many tokens, or x does not fit shared memory.

    The compiler interleaves the turns of a unit, and does so well if no pass ends among them: a pass, or a part that divides it, is
    a unit and on its way as a whole, otherwise each turn is one. They are in registers, of which many scales leave room for few."""
    if m > TOKENS[-1]:
        return None
    turns = -(-geometry.num_blocks * BLOCK // (STEP * NUM_WARPS))
    scale_registers = 2 * max(STEP // geometry.group_size, 1) * (2 if geometry.zero_bits else 1)
    most = min(max(SCALE_REGISTERS // scale_registers, 2), MAX_DEPTH)
    unit = max(size for size in range(1, most + 1) if turns % size == 0)
    depth = unit if unit > 1 else most
    tile = FewTile(next(size for size in TOKENS if m <= size), depth, unit, turns)
    return tile if tile.shared_bytes <= SHARED_BYTES else None


def matmul(
    tile: FewTile,
    x: torch.Tensor,
    packed: HopperWeight,
    n: int,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    num_sms: int,
) -> None:
    """As `hopper.matmul`; n: rows of W; x: its rows begin at whole 4 bytes."""
    strides = (x.stride(0), *out.stride(), *((0, 0) if residual is None else residual.stride()))
    sizes = (*out.shape, x.shape[1], n)
    launch = _bind(hopper_few.w4a16_few, tile, activation, packed.geometry, x.device, sizes, strides, num_sms)
    bias = None if bias is None else bias.contiguous()
    launch(x, packed.words, packed.scales, packed.zeros, bias, residual, out)


@lru_cache(maxsize=4096)
def _bind(
    kernel: Any,
    tile: FewTile,
    activation: str | None,
    geometry: Geometry,
    device: torch.device,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    num_sms: int,
) -> Launch:
    """A launch for every product of these sizes and strides; its arguments are the tensors."""
    m, n_out, k, n = sizes
    num_bands = -(-n // BAND)
    num_workers = min(num_bands, num_sms)
    padded_n = geometry.num_bands * BAND
    launcher = get_launcher(
        kernel,
        7,
        GROUP_SIZE=geometry.group_size,
        FORM=geometry.form,
        ACTIVATION=get_activation(activation),
        GATED=is_gated(activation),
        TOKENS=tile.tokens,
        DEPTH=tile.depth,
        UNIT=tile.unit,
        TURNS=tile.turns,
        num_warps=NUM_WARPS,
        launch_pdl=True,
    )
    num_steps = geometry.num_blocks * BLOCK // STEP
    static = (m, n_out, k, num_steps, padded_n, num_bands, num_workers, *strides)
    return launcher.bind(device, (num_workers,), static)

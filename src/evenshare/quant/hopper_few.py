"""4-bit products of few tokens on Hopper: who computes which rows of W, and the launch of `kernels.hopper_few`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from evenshare.device.activations import is_gated
from evenshare.device.epilogue import get_activation
from evenshare.device.launcher import Launch, get_launcher
from evenshare.quant.hopper import BLOCK, STEP, Geometry, HopperWeight
from evenshare.quant.kernels import hopper_few

ROWS = hopper_few.ROWS.value
TOKENS = (1, 8)  # of a worker; 16 take longer than on the kernel that cuts k
TURN_BYTES = 2 * STEP  # of x in float16, for each token and warp
SHARED_BYTES = 226 << 10  # of an SM


@dataclass(frozen=True)
class FewTile:
    tokens: int
    pair: int  # groups of rows that are multiplied by what one read of x gives
    depth: int  # turns that are on their way
    turns: int  # over the columns
    num_warps: int

    @property
    def shared_bytes(self) -> int:
        """x, and the warps' sums, twice."""
        x_bytes = (
            self.turns * self.num_warps * self.tokens * (TURN_BYTES + 4 * 9)
        )  # beside x its factor, and up to 8 sums
        return x_bytes + 2 * self.num_warps * self.pair * ROWS * max(self.tokens, 8) * 4


def make_tile(m: int, geometry: Geometry) -> FewTile | None:
    """None: x does not fit shared memory. Registers, 128 of a thread: many scales a turn leave room for one group of rows."""
    if m > TOKENS[-1]:
        return None
    num_warps = 16
    turns = -(-geometry.num_blocks * BLOCK // (STEP * num_warps))
    tile = FewTile(
        next(size for size in TOKENS if m <= size), 2 if geometry.group_size >= BLOCK else 1, 1, turns, num_warps
    )
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
    num_groups = -(-n // ROWS)
    num_workers = min(num_groups, num_sms)
    padded_n = geometry.num_strips * hopper_few.STRIP.value
    launcher = get_launcher(
        kernel,
        7,
        GROUP_SIZE=geometry.group_size,
        FORM=geometry.form,
        ACTIVATION=get_activation(activation),
        GATED=is_gated(activation),
        TOKENS=tile.tokens,
        PAIR=tile.pair,
        DEPTH=tile.depth,
        TURNS=tile.turns,
        num_warps=tile.num_warps,
        launch_pdl=True,
    )
    num_steps = geometry.num_blocks * BLOCK // STEP
    static = (m, n_out, k, num_steps, padded_n, num_groups, num_workers, *strides)
    return launcher.bind(device, (num_workers,), static)

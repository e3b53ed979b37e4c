"""Iteration spaces: tiles, each with a number of inner iterations."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RaggedSpace:
    """Rows of tiles of different length: row r stands for `inner` tiles of iterations[r] iterations each.

    Covers ragged batches, block masks and grouped products alike (inner: KV heads, say). Tile id = r * inner + i; the order of
    tiles is the order of the space. A tile of n > 0 iterations costs n + overhead, the constant being its prologue and epilogue.
    A tile of 0 iterations costs nothing and gets no segment: whoever needs its output written passes at least 1. Rows past the
    last real one have 0 iterations.
    cut_cost: what a cut costs the workers of its tile besides, in iterations: a partial written, read and merged. Level fill weighs
    it against the time that whole tiles leave workers idle.
    """

    iterations: torch.Tensor  # int32 [num_rows], any device
    inner: int = 1
    overhead: int = 0
    cut_cost: int = 0

    def __post_init__(self) -> None:
        if self.iterations.dtype != torch.int32 or self.iterations.dim() != 1:
            raise ValueError(
                f"iterations: got {self.iterations.dtype} {tuple(self.iterations.shape)}, want int32 [num_rows]"
            )
        if self.inner < 1 or self.overhead < 0 or self.cut_cost < 0:
            raise ValueError(
                f"inner, overhead, cut_cost: got {self.inner}, {self.overhead} and {self.cut_cost}, "
                "want inner >= 1, overhead >= 0 and cut_cost >= 0"
            )

    @property
    def num_tiles(self) -> int:
        """Tiles, empty ones included: a capacity, not a count."""
        return self.iterations.shape[0] * self.inner

    def tile_iterations(self) -> torch.Tensor:
        """int64 [num_tiles], on the host."""
        return self.iterations.cpu().long().repeat_interleave(self.inner)


def uniform_space(num_tiles: int, iters_per_tile: int, overhead: int = 0) -> RaggedSpace:
    """Equal tiles; `uniform_plan` has their plan in closed form."""
    return RaggedSpace(torch.full((num_tiles,), iters_per_tile, dtype=torch.int32), 1, overhead)

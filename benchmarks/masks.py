"""Dense attention with score and mask functions: its tensors, rows of the right answer, its work, and FlexAttention as the peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from benchmarks.peers import Call

MAX_ERROR = 1e-2  # bf16 output and probabilities round to 2^-9 each
NUM_ROWS = 7  # that are compared with the right answer
COUNTED_ROWS = 1024  # of the mask, at a time
Function = Callable[..., Any]


@dataclass(frozen=True)
class Tensors:
    """q [B, S, Hq, D], k and v [B, S, Hkv, D], bf16 unless said otherwise, and what is computed with them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask_mod: Function
    score_mod: Function | None = None

    @property
    def rows(self) -> torch.Tensor:
        """Query tokens that are compared."""
        return torch.linspace(0, self.q.shape[1] - 1, NUM_ROWS, device=self.q.device).long()

    def sample(self, output: torch.Tensor) -> torch.Tensor:
        return output.reshape(self.q.shape)[:, self.rows]

    def reference(self) -> torch.Tensor:
        """float64 [B, rows, Hq, D]."""
        group = self.q.shape[2] // self.k.shape[2]
        k, v = (x.double().repeat_interleave(group, 2) for x in (self.k, self.v))
        scores = torch.einsum("bihd,bjhd->bhij", self.q[:, self.rows].double(), k) * self.q.shape[3] ** -0.5
        positions = self._positions(self.rows, self.q.shape[2])
        if self.score_mod is not None:
            scores = self.score_mod(scores, *positions)
        scores = scores.masked_fill(~self.mask_mod(*positions), float("-inf"))
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(), v)

    def flops(self, mask_mod: Function | None = None) -> int:
        """Operations of QKᵀ and PV over the visible pairs, whose mask is the same for all heads."""
        batch, length, heads, dim = self.q.shape
        pairs = 0
        for begin in range(0, length, COUNTED_ROWS):
            rows = torch.arange(begin, min(begin + COUNTED_ROWS, length), device=self.q.device)
            seen = (mask_mod or self.mask_mod)(*self._positions(rows, 1))
            pairs += int(seen.expand(batch, 1, len(rows), length).sum())
        return 4 * dim * heads * pairs

    def block_mask(self, block: int | tuple[int, int] = 128) -> flex.BlockMask:
        """One for all heads."""
        length, device = self.q.shape[1], str(self.q.device)
        batch = self.q.shape[0] if self.q.shape[0] > 1 else None
        return flex.create_block_mask(self.mask_mod, batch, None, length, length, device=device, BLOCK_SIZE=block)

    def peer(self, name: str, block_mask: flex.BlockMask) -> Call | None:
        """FlexAttention, compiled for these functions; None for other names."""
        if name != "flex":
            return None
        torch._dynamo.reset()  # which would stop compiling after a few functions
        compiled = torch.compile(flex.flex_attention, dynamic=False)
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        gqa = q.shape[1] != k.shape[1]
        return lambda: compiled(q, k, v, self.score_mod, block_mask, enable_gqa=gqa).transpose(1, 2)

    def _positions(self, rows: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
        axes = (torch.arange(self.q.shape[0]), torch.arange(heads), rows, torch.arange(self.k.shape[1]))
        shapes = [tuple(-1 if i == j else 1 for j in range(4)) for i in range(4)]
        return tuple(axis.to(self.q.device).view(shape) for axis, shape in zip(axes, shapes, strict=True))


def make_tensors(
    batch: int,
    length: int,
    heads: tuple[int, int],
    head_dim: int,
    device: torch.device,
    mask_mod: Function,
    score_mod: Function | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensors:
    """Normally distributed q, k, v."""
    q, k, v = (
        torch.randn(batch, length, h, head_dim, dtype=dtype, device=device) for h in (heads[0], heads[1], heads[1])
    )
    return Tensors(q, k, v, mask_mod, score_mod)

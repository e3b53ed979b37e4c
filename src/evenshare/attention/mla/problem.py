"""What one latent attention call computes. Each constraint is stated once, here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evenshare.attention.problem import Problem

MIN_DIM, MAX_CKV_DIM, MAX_KPE_DIM = 16, 512, 128


@dataclass(frozen=True)
class MLAProblem(Problem):
    """An attention problem of one KV head, whose keys are [ckv | kpe] and whose values are the ckv."""

    @classmethod
    def of(
        cls,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        dtype: torch.dtype,
        page_size: int,
        causal: bool,
        sm_scale: float,
    ) -> MLAProblem:
        """Raises ValueError or TypeError naming the argument at fault."""
        if not isinstance(num_heads, int) or num_heads < 1:
            raise ValueError(f"num_heads: got {num_heads!r}, want 1 or more")
        for name, dim, largest in (
            ("head_dim_ckv", head_dim_ckv, MAX_CKV_DIM),
            ("head_dim_kpe", head_dim_kpe, MAX_KPE_DIM),
        ):
            if not isinstance(dim, int) or not MIN_DIM <= dim <= largest or dim & (dim - 1):
                raise ValueError(f"{name}: got {dim!r}, want a power of two from {MIN_DIM} to {largest}")
        return cls(num_heads, 1, head_dim_ckv + head_dim_kpe, head_dim_ckv, dtype, page_size, causal, sm_scale=sm_scale)

    def check_head_dims(self) -> None:
        """They are checked by name before they are summed."""

    @property
    def head_dim_kpe(self) -> int:
        return self.head_dim - self.head_dim_v

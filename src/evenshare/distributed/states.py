"""Attention states that travel: one message for o and lse, and the merge of what arrives.

A state is one row of bytes, o and then, in the last four, lse: 16 bytes more than o alone, so that rows stay aligned for vector
stores. Attention writes into rows in place, through strided views.

States are exchanged, not reduced by the library: a rank receives every rank's states of the rows that it merges and adds them in
float32 in the order of ranks. That moves what a reduce-scatter moves, needs no gather of lse before it, rounds nothing on the way,
and gives the same bits whatever algorithm the library picks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from evenshare.attention import merge_states
from evenshare.distributed.ranks import Ranks

OUTPUTS = ("all", "heads", "tokens")
# Options of `plan_attention`; no variant, whose functions want logical positions, and no base, since states merge in base e.
OPTIONS = ("head_dim_v", "sm_scale", "logits_soft_cap", "dtype", "policy", "planner", "backend", "debug")
# Up to it states are gathered and merged by every rank, beyond it shares are exchanged and results gathered: 2 / num_ranks of the
# bytes, but two collectives. An estimate: what a link of 100 GB/s moves in the 10 us that a collective takes at least.
ONE_STEP_BYTES = 1 << 20


@dataclass(frozen=True)
class States:
    """States of n tokens and H heads in rows of one buffer."""

    rows: torch.Tensor  # uint8 [num_rows, bytes of a row], tokens or heads outside
    o: torch.Tensor  # [n, H, D], a view
    lse: torch.Tensor  # float32 [n, H], a view


def check_options(options: Iterable[str], more: Iterable[str] = ()) -> None:
    """Raise TypeError unless all options are in OPTIONS or `more`."""
    known = (*OPTIONS, *more)
    for name in options:
        if name not in known:
            raise TypeError(
                f"{name}: got an option that attention over ranks does not have, want one of {', '.join(known)}"
            )


def new_states(
    n: int, num_heads: int, dim: int, dtype: torch.dtype, device: torch.device, ranks: Ranks, output: str
) -> States:
    """Uninitialised; rows in the order in which `combine` for that output cuts them."""
    row_bytes = -(-(dim * dtype.itemsize + 4) // 16) * 16
    if output == "tokens":
        count = -(-n // ranks.size) * ranks.size * num_heads
    else:
        count = -(-n * num_heads // ranks.size) * ranks.size
    rows = torch.empty(count, row_bytes, dtype=torch.uint8, device=device)
    rows[n * num_heads :].zero_()  # padding
    shape = (num_heads, n) if output == "heads" else (n, num_heads)
    o, lse = _split(rows[: n * num_heads].view(*shape, row_bytes), dim, dtype)
    return States(rows, o.transpose(0, 1), lse.transpose(0, 1)) if output == "heads" else States(rows, o, lse)


def combine(states: States, ranks: Ranks, output: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge every rank's states of the same tokens, over disjoint sets of keys.

    Returns (o, lse): for "all" o [n, H, D] on every rank; for "heads" [n, H / num_ranks, D], a rank's share of the heads; for
    "tokens" [ceil(n / num_ranks), H, D], a rank's share of the tokens (past the last one zeros).
    """
    n, num_heads, dim = states.o.shape
    (count, row_bytes), dtype, size = states.rows.shape, states.o.dtype, ranks.size
    if size == 1:
        return states.o.contiguous(), states.lse.contiguous()
    if output == "all" and states.rows.numel() * size <= ONE_STEP_BYTES:
        found = ranks.gather(states.rows, "attention states").view(size, count, row_bytes)
        return _merge(found[:, : n * num_heads].view(size, n, num_heads, row_bytes), dim, dtype)
    found = ranks.exchange(states.rows, "attention states").view(size, count // size, row_bytes)
    if output == "heads":
        return _merge(found.view(size, num_heads // size, n, row_bytes).transpose(1, 2), dim, dtype)
    if output == "tokens":
        return _merge(found.view(size, count // size // num_heads, num_heads, row_bytes), dim, dtype)
    merged = torch.empty_like(found[0])
    _merge(found.unsqueeze(2), dim, dtype, *_split(merged.unsqueeze(1), dim, dtype))
    rows = ranks.gather(merged, "merged attention states")
    o, lse = _split(rows[: n * num_heads].view(n, num_heads, row_bytes), dim, dtype)
    return o.contiguous(), lse.contiguous()


def _merge(
    rows: torch.Tensor,
    dim: int,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_ranks, n, H, bytes] -> o [n, H, D], lse [n, H]."""
    o, lse = _split(rows, dim, dtype)
    return merge_states(o.transpose(0, 1), lse.transpose(0, 1), math.e, out=out, lse_out=lse_out)


def _split(rows: torch.Tensor, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of uint8 [..., bytes]: o [..., D] and float32 lse [...]."""
    return rows[..., : dim * dtype.itemsize].view(dtype), rows[..., -4:].view(torch.float32)[..., 0]

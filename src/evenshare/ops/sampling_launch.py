"""Launches of the sampling kernels: sizes of blocks, and what stays from call to call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton

from evenshare.device.launcher import Launch, get_launcher
from evenshare.ops.kernels import sampling as kernels

# A row's program reads BLOCK columns at a time, 8 for each of its threads. Blocks do not depend on the batch, nor then do sums.
BLOCK, NUM_WARPS = 4096, 16
SEARCH_BLOCK, PIVOTS = 2048, 8  # sums for each of the pivots stay in registers

Setting = float | torch.Tensor | None


def _split(setting: Setting, default: float) -> tuple[torch.Tensor | None, float]:
    """(a tensor of rows or None, a number)."""
    return (setting, default) if isinstance(setting, torch.Tensor) else (None, default if setting is None else setting)


def _rows(x: torch.Tensor, block: int) -> tuple[int, int]:
    return x.shape[1], min(max(triton.next_power_of_2(x.shape[1]), 16), block)


@lru_cache(maxsize=512)
def _bind(
    kernel: Any, num_dynamic: int, device: torch.device, num_rows: int, static: tuple[Any, ...], *constants: Any
) -> Launch:
    return get_launcher(kernel, num_dynamic, **dict(constants), num_warps=NUM_WARPS).bind(device, (num_rows,), static)


def softmax(x: torch.Tensor, temperature: Setting, out: torch.Tensor) -> None:
    per_row, number = _split(temperature, 1.0)
    width, block = _rows(x, BLOCK)
    static = (width, *x.stride(), *out.stride(), float(number))
    _bind(kernels.softmax, 3, x.device, x.shape[0], static, ("BLOCK", block))(x, out, per_row)


def keep(x: torch.Tensor, top_k: Setting, top_p: Setting, from_logits: bool, out: torch.Tensor) -> None:
    (k_rows, k), (p_rows, p) = _split(top_k, 0), _split(top_p, 0.0)
    width, block = _rows(x, SEARCH_BLOCK)
    static = (width, *x.stride(), *out.stride(), min(int(k), width), float(p))
    launch = _bind(
        kernels.keep, 4, x.device, x.shape[0], static, ("HAS_TOP_K", top_k is not None), ("HAS_TOP_P", top_p is not None),
        ("LOGITS", from_logits), ("PIVOTS", PIVOTS), ("BLOCK", block),
    )  # fmt: skip
    launch(x, out, k_rows, p_rows)


def sample(
    x: torch.Tensor,
    out: torch.Tensor,
    valid: torch.Tensor | None,
    indices: torch.Tensor | None,
    temperature: Setting,
    top_k: Setting,
    top_p: Setting,
    min_p: Setting,
    top_k_first: bool,
    from_logits: bool,
    seed: torch.Tensor,
    offset: torch.Tensor,
) -> None:
    (k_rows, k), (p_rows, p), (min_rows, least) = _split(top_k, 0), _split(top_p, 0.0), _split(min_p, 0.0)
    t_rows, t = _split(temperature, 1.0)
    top_k_first = top_k_first and top_k is not None and top_p is not None
    width, block = _rows(x, SEARCH_BLOCK if top_k_first else BLOCK)
    static = (x.shape[0], width, *x.stride(), min(int(k), width), float(p), float(least), float(t))
    launch = _bind(
        kernels.sample, 10, x.device, out.shape[0], static, ("HAS_TOP_K", top_k is not None), ("HAS_TOP_P", top_p is not None),
        ("HAS_MIN_P", min_p is not None), ("TOP_K_FIRST", top_k_first), ("LOGITS", from_logits), ("PIVOTS", PIVOTS),
        ("BLOCK", block),
    )  # fmt: skip
    launch(x, out, valid, indices, k_rows, p_rows, min_rows, t_rows, seed, offset)


def verify_chain(
    draft: torch.Tensor,
    ids: torch.Tensor,
    target_probs: torch.Tensor,
    out: torch.Tensor,
    accepted: torch.Tensor,
    emitted: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
) -> None:
    num_draft, width = draft.shape[1:]
    block = min(max(triton.next_power_of_2(width), 16), BLOCK)
    block_draft = max(triton.next_power_of_2(num_draft + 1), 4)
    static = (num_draft, width, *draft.stride(), *ids.stride(), *target_probs.stride())
    launch = _bind(
        kernels.verify_chain, 8, draft.device, draft.shape[0], static, ("BLOCK_DRAFT", block_draft), ("BLOCK", block)
    )
    launch(draft, ids, target_probs, out, accepted, emitted, seed, offset)

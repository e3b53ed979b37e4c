"""`paged|evenshare`: transformers' continuous batching on pages in place, planned once per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from evenshare.attention import AttentionPlan, attention, plan_attention
from evenshare.compat.transformers.attention import attention_options

FULL, SLIDING = "full_attention", "sliding_attention"
# transformers' PagedAttentionCache gives 1 for layers that see every key.
NO_WINDOW = 1


@dataclass
class _Step:
    """One layer group's plan, good for the step whose index tensors it was made from."""

    read_index: torch.Tensor
    kv_indptr: torch.Tensor
    plan: AttentionPlan


# A cache lives as long as its manager; its plans go with it.
_steps: WeakKeyDictionary[Any, dict[int, _Step]] = WeakKeyDictionary()


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function `paged|evenshare`, called by continuous batching only.

    query [1, Hq, total_q, D], key and value [1, Hkv, total_q, D]: the new tokens of all requests, packed. New keys and values
    are written to the cache, and attention reads its pages where they are.
    Returns ([total_q, Hq, D], None).
    Raises ValueError if called without a paged cache.
    """
    cache = kwargs.get("cache")
    if cache is None:
        raise ValueError("attn_implementation: got 'paged|evenshare' outside continuous batching, want 'evenshare'")
    options = attention_options(module, scaling, dropout, kwargs)
    layer: int = module.layer_idx  # type: ignore[assignment]
    group, index = cache.layer_index_to_group_indices[layer]
    window = cache.sliding_windows[layer]
    read_index, write_index = kwargs["read_index"][group], kwargs["write_index"][group]
    qo_indptr = kwargs["cu_seq_lens_q"]
    kv_indptr = _of_layer(kwargs["cu_seq_lens_k"], window)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)

    if read_index.numel() == 0 or window != NO_WINDOW:
        # Whole prompts attend to their own keys. A window's pages are a ring that the new tokens may overwrite before they
        # are read, so there transformers' own gather comes first.
        k, v = cache.update(key, value, layer, kwargs["read_index"], kwargs["write_index"])
        if read_index.numel() == 0:
            kv_indptr = qo_indptr
        return attention(q, k, v, qo_indptr=qo_indptr, kv_indptr=kv_indptr, causal=True, **options), None

    k_cache, v_cache = cache.key_cache[index], cache.value_cache[index]
    k_cache.index_copy_(0, write_index, k)
    v_cache.index_copy_(0, write_index, v)
    plans = _steps.setdefault(cache, {})
    step = plans.get(group)
    # The index tensors are made anew for each step; the first layer plans in any case.
    if step is None or index == 0 or step.read_index is not read_index or step.kv_indptr is not kv_indptr:
        width = -(-_of_layer(kwargs["max_seqlen_k"], window) // cache.block_size)
        plan = _plan(q, k, cache.block_size, qo_indptr, kv_indptr, read_index, width, options)
        plans[group] = step = _Step(read_index, kv_indptr, plan)
    pages = (-1, cache.block_size, *k.shape[1:])
    return step.plan.run(q, k_cache.view(pages), v_cache.view(pages)), None


def _of_layer(value: Any, window: int) -> Any:
    """Hybrid models give one value per kind of layer."""
    return value[FULL if window == NO_WINDOW else SLIDING] if isinstance(value, dict) else value


def _plan(
    q: torch.Tensor, k: torch.Tensor, page_size: int, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, read_index: torch.Tensor,
    width: int, options: dict[str, Any],
) -> AttentionPlan:  # fmt: skip
    # The slot of every page's first token, and the slots of a page are consecutive: one gather gives the page table, with
    # no sync. Places past a request's end hold some other page's number; its length keeps them unread.
    first = kv_indptr[:-1, None] + page_size * torch.arange(width, device=kv_indptr.device)
    block_table = read_index[first.clamp(max=read_index.numel() - 1)] // page_size
    return plan_attention(
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        head_dim_v=k.shape[2],
        qo_indptr=qo_indptr,
        block_table=block_table.to(torch.int32),
        kv_lens=kv_indptr[1:] - kv_indptr[:-1],
        page_size=page_size,
        causal=True,
        dtype=q.dtype,
        max_q_rows=q.shape[0],
        device=q.device,
        **options,
    )

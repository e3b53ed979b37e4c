"""evenshare's attention behind transformers' attention interface: `evenshare`, and `paged|evenshare` for continuous batching."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evenshare.attention import attention

NAME = "evenshare"


def register() -> None:
    """Make `evenshare` and `paged|evenshare` known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    from evenshare.compat.transformers.paged import paged_attention_forward

    AttentionInterface.register(NAME, attention_forward)
    AttentionInterface.register(f"paged|{NAME}", paged_attention_forward)
    AttentionMaskInterface.register(NAME, padding_mask)


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask that transformers hands to `attention_forward`: which keys are no padding, bool [B, kv_length], or None for all.

    Causality and windows are computed inside the kernels, so no mask of scores is ever made.
    Raises ValueError for a cache of fixed length (StaticCache), whose unused tail would be attended to.
    """
    if isinstance(q_offset, torch.Tensor) or kv_length + kv_offset > q_offset + q_length:
        raise ValueError(
            "past_key_values: got a cache of fixed length, want a DynamicCache (evenshare plans ragged lengths)"
        )
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, kv_offset : kv_offset + kv_length]
    return None if bool(attention_mask.all()) else attention_mask.bool()


def attention_options(
    module: nn.Module, scaling: float | None, dropout: float, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Options of `evenshare.attention.attention` from what transformers' models pass.

    Raises NotImplementedError for dropout and attention sinks.
    """
    if dropout:
        raise NotImplementedError(f"dropout: got {dropout}, want 0 (evenshare is for inference: call model.eval())")
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError("s_aux: attention sinks are not supported yet")
    window = kwargs.get("sliding_window")
    return {
        # transformers counts the query's own key into the window, evenshare the keys to its left.
        "window_left": -1 if window is None else window - 1,
        "logits_soft_cap": kwargs.get("softcap"),
        "sm_scale": scaling,
    }


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function `evenshare`.

    query [B, Hq, Sq, D], key and value [B, Hkv, Skv, D] (past keys included), attention_mask as `padding_mask` makes it.
    Returns ([B, Sq, Hq, D], None); rows of padding are 0.
    Raises ValueError for a mask of scores and NotImplementedError for what `attention_options` refuses.
    """
    if _is_plain_token(query, attention_mask, dropout, kwargs):
        return _one_token(query, key, value, scaling), None
    options = attention_options(module, scaling, dropout, kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if attention_mask is None:
        return attention(q, k, v, causal=causal, **options), None
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask: got {attention_mask.dim()} dimensions, want a padding mask [batch, keys] (masks of scores: use sdpa)"
        )
    return _without_padding(q, k, v, attention_mask, causal, options), None


def _is_plain_token(
    query: torch.Tensor, attention_mask: torch.Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> bool:
    """One token on a CPU that sees every key: where planning and checking would cost more than the attention."""
    return (
        query.shape[0] == query.shape[2] == 1
        and attention_mask is None
        and query.device.type == "cpu"
        and not dropout
        and kwargs.get("sliding_window") is None
        and kwargs.get("softcap") is None
        and kwargs.get("s_aux") is None
    )


def _one_token(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """[1, Hq, 1, D] over [1, Hkv, S, D] -> [1, 1, Hq, D]. The query heads of a KV head are rows of one matrix, as everywhere in
    `evenshare.attention`: 25 us at 64 keys where the public function takes 90 us, and a step has one call per layer."""
    _, heads, _, dim = query.shape
    packed = query.view(1, key.shape[1], -1, dim)
    out = nn.functional.scaled_dot_product_attention(packed, key, value, scale=scaling)
    return out.view(1, 1, heads, -1)


def _without_padding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, causal: bool, options: dict[str, Any]
) -> torch.Tensor:
    """Padded batch -> ragged batch -> padded batch. The queries are the last Sq of the Skv tokens that `mask` describes."""
    rows = mask[:, -q.shape[1] :]
    out = torch.zeros_like(q)
    out[rows] = attention(
        q[rows], k[mask], v[mask], qo_indptr=_indptr(rows), kv_indptr=_indptr(mask), causal=causal, **options
    )
    return out


def _indptr(mask: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)

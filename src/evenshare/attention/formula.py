"""The explicit formula of attention in plain torch: one block of rows beside the keys that they may see."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from evenshare.attention.variants.eager import Place
    from evenshare.attention.variants.variant import Variant


class Rule(NamedTuple):
    causal: bool
    window_left: int
    logits_soft_cap: float | None
    sm_scale: float
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    compute_dtype: torch.dtype | None
    variant: Variant | None = None


def clear_rows(out: torch.Tensor, lse: torch.Tensor | None) -> None:
    out.fill_(0)
    if lse is not None:
        lse.fill_(float("-inf"))


def widened(
    x: torch.Tensor,
    transform: str,
    scale: torch.Tensor | None,
    rule: Rule,
    request: int,
    heads: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keys or values [keys, KV heads, D] after the variant's transform, if it has one, and times their scale.

    heads, positions: those of x; None: all, from 0 on.
    """
    function = None if rule.variant is None else rule.variant.transforms.get(transform)
    if function is None and x.dtype != torch.float8_e4m3fn:
        return x
    x = x.to(rule.compute_dtype or torch.float32)
    if function is not None:
        heads = torch.arange(x.shape[1], device=x.device) if heads is None else heads
        positions = torch.arange(x.shape[0], device=x.device) if positions is None else positions
        x = _transformed(function, x, request, heads, positions)
    return x if scale is None else x * scale.to(x.dtype).view(-1, 1)


def formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    rule: Rule,
    place: Place,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    num_unmasked: int = 0,
) -> None:
    """q [rows, heads, D], k, v [keys, KV heads, D] -> out, lse, overwritten; k and v after their transforms.

    mask: bool [rows, keys] or None. num_unmasked: of the keys, the first ones, which the variant's mask does not hide.
    """
    num_rows, num_kv_heads = q.shape[0], k.shape[1]
    by_kv_head = (num_rows, num_kv_heads, q.shape[1] // num_kv_heads, -1)
    dtype = rule.compute_dtype or torch.float32
    transforms = {} if rule.variant is None else rule.variant.transforms
    q = q.to(dtype)
    if "query" in transforms:
        q = _transformed(transforms["query"], q, place.request, place.heads, place.rows)
    # The query heads of a KV head are rows of one matrix: no key is repeated.
    packed = q.reshape(by_kv_head).permute(1, 2, 0, 3).flatten(1, 2)
    scores = torch.bmm(packed, k.to(dtype).permute(1, 2, 0)).mul_(rule.sm_scale)
    if rule.logits_soft_cap:
        scores.div_(rule.logits_soft_cap).tanh_().mul_(rule.logits_soft_cap)
    softmax, hidden = True, float("-inf")
    if rule.variant is not None:
        from evenshare.attention.variants.eager import modified

        by_head = scores.view(q.shape[1], num_rows, -1)
        scores = modified(rule.variant, by_head, place, num_unmasked).contiguous().view_as(scores)
        softmax = rule.variant.softmax
        hidden = hidden if softmax else 0.0
    if mask is not None:
        scores.view(num_kv_heads, -1, *mask.shape).masked_fill_(~mask, hidden)
    if softmax:
        weights, total, peak = _weights(scores, rule.variant, place.heads)
        values = torch.bmm(weights, v.to(dtype).transpose(0, 1)).div_(total)
    else:
        values = torch.bmm(scores, v.to(dtype).transpose(0, 1))
    by_row = values.view(num_kv_heads, -1, num_rows, values.shape[-1]).permute(2, 0, 1, 3)
    if "output" in transforms:
        at = place.request, place.heads, place.rows
        changed = _transformed(transforms["output"], by_row.flatten(1, 2), *at).view_as(by_row)
        if softmax:  # what hides all keys of a row leaves it 0
            without_keys = (peak == float("-inf")).view(num_kv_heads, -1, num_rows).permute(2, 0, 1)
            changed = changed.masked_fill(without_keys.unsqueeze(-1), 0.0)
        by_row = changed
    out.view(by_kv_head).copy_(by_row)
    if lse is not None:
        logsumexp = (peak + total.log()).view(num_kv_heads, -1, num_rows)
        lse.view(by_kv_head[:3]).copy_(logsumexp.permute(2, 0, 1))


def _weights(
    scores: torch.Tensor, variant: Variant | None, heads: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """scores [Hkv, group * rows, keys], overwritten -> (weights, their sum, what was subtracted from the scores)."""
    peak = scores.amax(-1, keepdim=True)
    if variant is None:
        weights = scores.sub_(peak).exp_()
        return weights, weights.sum(-1, keepdim=True), peak
    without_keys = peak == float("-inf")
    base = peak.masked_fill(without_keys, 0.0)
    if variant.sinks is not None:
        sinks = variant.sinks.detach()[heads].to(scores)
        sinks = sinks.repeat_interleave(peak.numel() // len(sinks)).view(peak.shape)
        base = torch.maximum(base, sinks)
    weights = scores.sub_(base).exp_()
    total = weights.sum(-1, keepdim=True)
    if variant.sinks is not None:
        total += (sinks - base).exp()
    # Of a row without keys the logarithm is -inf, and its weights are zero whatever they are divided by.
    return weights, total.masked_fill_(without_keys, 1.0), base.masked_fill_(without_keys, float("-inf"))


def _transformed(function: Callable[..., Any], x: torch.Tensor, *place: Any) -> torch.Tensor:
    from evenshare.attention.variants.eager import transformed

    return transformed(function, x, *place)

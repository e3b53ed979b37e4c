"""Two oracles in float64: FlexAttention in eager mode, and the formula over broadcast positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from evenshare import Variant
from tests.attention.helpers import Batch, Place, run_paged, run_ragged

Results = tuple[torch.Tensor, torch.Tensor]


def flex_oracle(batch: Batch, variant: Variant, causal: bool = False) -> Results:
    """(out, natural lse); a learned sink is put in afterwards."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: int, shift: int) -> Results:
        def score_mod(score: Any, b: Any, h: Any, row: Any, kv_idx: Any) -> Any:
            positions = (b + request, h, row + shift, kv_idx)
            changed = variant.score_mod(score, *positions) if variant.score_mod else score
            seen = variant.mask_mod(*positions) if variant.mask_mod else kv_idx >= 0
            if causal:
                seen = seen & (kv_idx <= row + shift)
            return torch.where(seen, changed, -math.inf)

        packed = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out, aux = flex_attention(
            *packed, score_mod=score_mod, enable_gqa=True, scale=q.shape[2] ** -0.5, return_aux=AuxRequest(lse=True)
        )
        return out[0].transpose(0, 1), aux.lse[0].t()

    out, lse = _by_request(batch, attend)
    if variant.sinks is None:
        return out, lse
    sinks = variant.sinks.double()
    return out * torch.sigmoid(lse - sinks)[..., None], torch.logaddexp(lse, sinks).where(lse > -math.inf, -math.inf)


def formula_oracle(batch: Batch, variant: Variant, causal: bool = False) -> Results:
    """(out, natural lse, 0 without softmax), also without softmax."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: int, shift: int) -> Results:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[2] ** -0.5
        h = torch.arange(q.shape[1])[:, None, None]
        rows, keys = torch.arange(q.shape[0])[:, None] + shift, torch.arange(k.shape[0])
        positions = (torch.tensor(request), h, rows, keys)
        seen = keys <= rows if causal else torch.tensor(True)
        if variant.mask_mod:
            seen = seen & variant.mask_mod(*positions)
        if variant.score_mod:
            scores = variant.score_mod(scores, *positions)
        if not variant.softmax:
            return torch.einsum("hij,jhd->ihd", torch.where(seen, scores, 0), v), q.new_zeros(q.shape[:2])
        scores = torch.where(seen, scores, -math.inf)
        hidden = (scores == -math.inf).all(-1, keepdim=True)
        if variant.sinks is not None:
            sinks = variant.sinks.double()[:, None, None].expand_as(hidden)
            scores = torch.cat([scores, sinks.where(~hidden, -math.inf)], -1)
        weights = scores.softmax(-1).masked_fill(hidden, 0)[..., : k.shape[0]]
        return torch.einsum("hij,jhd->ihd", weights, v), scores.logsumexp(-1).t()

    return _by_request(batch, attend)


def _by_request(batch: Batch, attend: Callable[..., Results]) -> Results:
    q, k, v = (x.double() for x in (batch.q, batch.k, batch.v))
    out, lse = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full(q.shape[:2], -math.inf)
    for r, (n, m) in enumerate(zip(batch.qo_lens, batch.kv_lens, strict=True)):
        rows = slice(batch.qo_indptr[r], batch.qo_indptr[r + 1])
        keys = slice(batch.kv_indptr[r], batch.kv_indptr[r + 1])
        if n and m:
            out[rows], lse[rows] = attend(q[rows], k[keys], v[keys], r, m - n)
    return out, lse


def check(
    batch: Batch, place: Place, make: Callable[[torch.device], Variant], chained: bool = False, **options: Any
) -> None:
    """Ragged and paged attention with the variant that `make` makes on a device, against both oracles.

    chained: its functions write x[i][j] for x[i, j], which is another element of broadcast positions."""
    judged, variant = make(torch.device("cpu")), make(place.device)
    causal = options.setdefault("causal", False)
    wants = [] if chained else [formula_oracle(batch, judged, causal)]
    if judged.softmax:
        wants.append(flex_oracle(batch, judged, causal))
    options |= {"variant": variant, "with_lse": variant.softmax}
    for got in (run_ragged(batch, place, **options), run_paged(batch, place, page_size=4, **options)):
        for want in wants:
            assert_close(got, want, batch)


def assert_close(got: tuple[torch.Tensor, torch.Tensor | None], want: Results, batch: Batch) -> None:
    """In fp32: scores of a few dozen carry some 2^-19 of theirs, and so do weights."""
    out, lse = (None if x is None else x.cpu().double() for x in got)
    assert out is not None
    assert out.shape == want[0].shape
    if not out.numel():
        return
    largest = max(float(want[0].abs().max()), float(batch.v.abs().max()) if batch.v.numel() else 0.0)
    assert float((out - want[0]).abs().max()) <= 2e-5 * largest
    if lse is not None:
        assert torch.equal(torch.isneginf(lse), torch.isneginf(want[1]))
        torch.testing.assert_close(lse, want[1], atol=2e-5, rtol=2e-6)

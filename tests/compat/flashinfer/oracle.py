"""Attention by its definition in float64, request by request, with everything that FlashInfer's names can ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from evenshare.attention.variants import alibi_slopes


def turn(x: torch.Tensor, positions: torch.Tensor, scale: float = 1.0, theta: float = 1e4) -> torch.Tensor:
    """x [n, H, D], pairs (i, i + D / 2) as complex numbers."""
    half = x.shape[-1] // 2
    radians = positions.double()[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half) / scale
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(
        torch.ones_like(radians), radians
    ).unsqueeze(1)
    return torch.cat((z.real, z.imag), -1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    pos_encoding_mode: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [n, Hq, Dv], base-2 lse [n, Hq]) of one request, q [n, Hq, D], k, v [m, Hkv, D]."""
    q, k, v = q.double(), k.double(), v.double()
    (n, heads, dim), m = q.shape, k.shape[0]
    place = torch.arange(n) + m - n
    if pos_encoding_mode == "ROPE_LLAMA":
        q, k = turn(q, place, rope_scale, rope_theta), turn(k, torch.arange(m), rope_scale, rope_theta)
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (dim**-0.5 if sm_scale is None else sm_scale)
    if logits_soft_cap:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    distance = torch.arange(m)[None] - place[:, None]
    if pos_encoding_mode == "ALIBI":
        scores = scores + alibi_slopes(heads).double()[:, None, None] * distance
    seen = torch.ones(n, m, dtype=torch.bool) if mask is None else mask.clone()
    if causal:
        seen &= distance <= 0
    if window_left >= 0:
        seen &= distance >= -window_left
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1) if m else torch.full((heads, n), -math.inf, dtype=torch.float64)
    if sinks is not None:
        lse = torch.where(lse == -math.inf, lse, torch.logaddexp(lse, sinks.double()[:, None]))
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return torch.einsum("hij,jhd->ihd", weights, v), lse.T / math.log(2)


def indptr(lens: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32)


@dataclass(frozen=True)
class Batch:
    """A ragged batch of queries over a cache whose unused slots are NaN."""

    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    q: torch.Tensor
    ks: list[torch.Tensor]
    vs: list[torch.Tensor]
    cache: torch.Tensor  # [pages, 2, page, H, D] (NHD) or [pages, 2, H, page, D]
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    page_size: int

    @property
    def qo_indptr(self) -> torch.Tensor:
        return indptr(self.qo_lens)

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.q.shape[1], self.ks[0].shape[1], self.q.shape[2]

    def oracle(
        self, masks: list[torch.Tensor] | None = None, scale_v: float = 1.0, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            attention(q, k, v, mask=None if masks is None else masks[r], **options)
            for r, (q, k, v) in enumerate(zip(self.q.split(self.qo_lens), self.ks, self.vs, strict=True))
        ]
        out, lse = (torch.cat(list(values)) for values in zip(*parts, strict=True))
        return out * scale_v, lse


def make_batch(
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    page_size: int = 4,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    kv_layout: str = "NHD",
    dtype: torch.dtype = torch.float32,
) -> Batch:
    q = torch.randn(sum(qo_lens), heads[0], dim).to(dtype)
    ks, vs = ([torch.randn(n, heads[1], dim).to(dtype) for n in kv_lens] for _ in range(2))
    counts = [-(-n // page_size) for n in kv_lens]
    ids = torch.randperm(sum(counts) + 3)[: sum(counts)]
    cache = torch.full((sum(counts) + 3, 2, page_size, heads[1], dim), float("nan"), dtype=dtype)
    begins = indptr(counts).tolist()
    for r, n in enumerate(kv_lens):
        for j in range(n):
            page = ids[begins[r] + j // page_size]
            cache[page, 0, j % page_size], cache[page, 1, j % page_size] = ks[r][j], vs[r][j]
    if kv_layout == "HND":
        cache = cache.transpose(2, 3).contiguous()
    last = [n - (c - 1) * page_size if c else 0 for n, c in zip(kv_lens, counts, strict=True)]
    return Batch(
        tuple(qo_lens), tuple(kv_lens), q, ks, vs, cache, indptr(counts), ids.int(), torch.tensor(last, dtype=torch.int32),
        page_size,
    )  # fmt: skip


def assert_close(
    got: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    want: tuple[torch.Tensor, torch.Tensor],
    tolerance: float = 2e-5,
) -> None:
    """out, and lse if there is one: zeros and infinities of empty rows are exact."""
    out, lse = got if isinstance(got, tuple) else (got, None)
    if out.dtype == torch.float16:
        tolerance = max(tolerance, 1e-3 * max(float(want[0].abs().max()), 1.0))
    assert out.shape == want[0].shape
    assert not torch.isnan(out).any(), "NaN in out"
    empty = want[1] == -math.inf
    assert (out[empty] == 0).all()
    assert float((out.double() - want[0]).abs().max() if out.numel() else 0.0) <= tolerance
    if lse is not None:
        assert lse.dtype == torch.float32
        assert torch.equal(lse == -math.inf, empty)
        difference = (lse.double() - want[1])[~empty].abs()
        assert float(difference.max() if difference.numel() else 0.0) <= 1e-4

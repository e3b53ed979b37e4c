"""The oracle itself, against a plain loop and against torch; and the fast paths of the CPU backend."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from evenshare.attention import reference
from tests.attention.helpers import Batch, assert_matches, full_options, oracle, random_batch, to_pages


def plain_loop(
    batch: Batch, causal: bool, window_left: int, cap: float | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query row and one head at a time, keys by list, in float64."""
    q, k, v = batch.q.double(), batch.k.double(), batch.v.double()
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for r, (n, m) in enumerate(zip(batch.qo_lens, batch.kv_lens, strict=True)):
        for i, h in itertools.product(range(n), range(q.shape[1])):
            diagonal = m - n + i
            keys = [
                j
                for j in range(m)
                if (j <= diagonal or not causal) and (j >= diagonal - window_left or window_left < 0)
            ]
            if keys:
                index = torch.tensor(keys) + batch.kv_indptr[r]
                row = batch.qo_indptr[r] + i
                scores = (k[index, h // group] @ q[row, h]) * scale
                scores = cap * torch.tanh(scores / cap) if cap else scores
                out[row, h] = torch.softmax(scores, 0) @ v[index, h // group]
                lse[row, h] = torch.logsumexp(scores, 0)
    return out, lse


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("window_left", [-1, 0, 1, 3, 8, 9, 20])
@pytest.mark.parametrize("causal", [False, True])
def test_oracle_is_the_plain_loop(causal: bool, window_left: int, cap: float | None) -> None:
    batch = random_batch((1, 3, 0, 5, 2, 4), (9, 0, 4, 2, 10, 4), heads=(6, 2), dim=8, dim_v=5)
    out, lse = oracle(batch, causal=causal, window_left=window_left, logits_soft_cap=cap, sm_scale=0.4)
    want, want_lse = plain_loop(batch, causal, window_left, cap, 0.4)
    torch.testing.assert_close(out, want, atol=1e-13, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=1e-13, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_oracle_is_torch_sdpa(causal: bool) -> None:
    batch = random_batch((7,), (7,), heads=(4, 2), dim=16)
    q, k, v = (x.double().transpose(0, 1)[None] for x in (batch.q, batch.k, batch.v))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(oracle(batch, causal=causal)[0], want, atol=1e-13, rtol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_oracle_is_flex_attention_with_soft_cap() -> None:
    batch = random_batch((5,), (9,), heads=(4, 2), dim=16)
    cap = 0.7

    def score_mod(score: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        capped = cap * torch.tanh(score / cap)
        return torch.where(kv_idx <= q_idx + 4, capped, -math.inf)

    q, k, v = (x.double().transpose(0, 1)[None] for x in (batch.q, batch.k, batch.v))
    want, aux = flex_attention(q, k, v, score_mod=score_mod, enable_gqa=True, return_aux=AuxRequest(lse=True))
    out, lse = oracle(batch, logits_soft_cap=cap)
    torch.testing.assert_close(out, want[0].transpose(0, 1), atol=1e-13, rtol=0)
    torch.testing.assert_close(lse, aux.lse[0].transpose(0, 1).double(), atol=1e-6, rtol=0)


def run_reference(
    batch: Batch, dtype: torch.dtype, with_lse: bool, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k, v = (x.to(dtype) for x in (batch.q, batch.k, batch.v))
    out = torch.full((*q.shape[:2], v.shape[2]), math.nan, dtype=dtype)
    lse = torch.full(q.shape[:2], math.nan) if with_lse else None
    reference.ragged_attention(
        q, k, v, batch.qo_indptr, batch.kv_indptr, out=out, lse=lse, **full_options(batch, **options)
    )
    return out, lse


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("window_left", [-1, 0, 6, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_both_paths_match_the_oracle(dtype: torch.dtype, causal: bool, window_left: int, with_lse: bool) -> None:
    batch = random_batch((1, 0, 33, 7, 5, 1), (70, 3, 33, 50, 2, 0), heads=(9, 3), dim=64)
    out, lse = run_reference(batch, dtype, with_lse, causal=causal, window_left=window_left)
    assert_matches(out, lse, batch, causal=causal, window_left=window_left)


@pytest.mark.parametrize("with_lse", [False, True])
def test_rows_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch, with_lse: bool) -> None:
    batch = random_batch((9, 3), (21, 3), heads=(4, 2), dim=16)
    monkeypatch.setattr(reference, "MAX_CHUNK", 200)  # two rows of 21 keys and 4 heads; nine rows of a mask
    for window_left in (-1, 4):
        out, lse = run_reference(batch, torch.float32, with_lse, window_left=window_left)
        assert_matches(out, lse, batch, window_left=window_left)


def test_rows_of_no_request_become_zero() -> None:
    q, kv = torch.randn(6, 2, 8), torch.randn(3, 2, 8)
    out, lse = torch.full_like(q, math.nan), torch.full((6, 2), math.nan)
    reference.ragged_attention(
        q, kv, kv, [2, 4], [0, 3], causal=True, window_left=-1, logits_soft_cap=None, sm_scale=1.0, out=out, lse=lse
    )
    outside = [0, 1, 4, 5]
    assert (out[outside] == 0).all()
    assert torch.isneginf(lse[outside]).all()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_pages_equal_ragged(kv_layout: str, consecutive: bool) -> None:
    batch = random_batch((1, 4, 1), (37, 6, 0), heads=(4, 2), dim=16)
    if consecutive:
        k, v = (F.pad(x, (0, 0, 0, 0, 0, 5), value=math.nan).view(6, 8, 2, 16) for x in (batch.k, batch.v))
        batch = Batch((1,), (43,), batch.q[:1], batch.k, batch.v)
        page_lists: list[torch.Tensor | slice] = [torch.arange(6, dtype=torch.int32)]
    else:
        pages = to_pages(batch, 8, kv_layout)
        k, v = (x if kv_layout == "NHD" else x.transpose(1, 2) for x in (pages.k, pages.v))
        page_lists = list(pages.block_table)
    out, options = torch.full_like(batch.q, math.nan), full_options(batch)
    reference.paged_attention(batch.q, k, v, batch.qo_indptr, page_lists, batch.kv_lens, out=out, lse=None, **options)
    want, _ = run_reference(batch, torch.float32, with_lse=False)
    assert torch.equal(out, want)
    if consecutive:
        by_slice = torch.full_like(out, math.nan)
        reference.paged_attention(
            batch.q, k, v, batch.qo_indptr, [slice(0, 6)], batch.kv_lens, out=by_slice, lse=None, **options
        )
        assert torch.equal(by_slice, out)


@pytest.mark.parametrize("bad", [-1, 3])
def test_page_outside_the_cache_raises_before_writing(bad: int) -> None:
    cache, q, out = torch.randn(3, 4, 2, 8), torch.randn(2, 2, 8), torch.full((2, 2, 8), 7.0)
    lists: list[torch.Tensor | slice] = [torch.tensor([0, 1]), torch.tensor([2, bad])]
    options = {"causal": True, "window_left": -1, "logits_soft_cap": None, "sm_scale": 1.0}
    with pytest.raises(ValueError, match=rf"request 1: got {bad}, want 0 to 2"):
        reference.paged_attention(q, cache, cache, [0, 1, 2], lists, [8, 8], out=out, lse=None, **options)
    assert (out == 7.0).all()


def test_strided_output() -> None:
    batch = random_batch((3, 2), (5, 4), heads=(4, 2), dim=16)
    want, want_lse = run_reference(batch, torch.float32, with_lse=True)
    out, lse = torch.full((5, 16, 8), math.nan).transpose(1, 2)[:, ::2], torch.full((4, 5), math.nan).t()
    reference.ragged_attention(
        batch.q, batch.k, batch.v, batch.qo_indptr, batch.kv_indptr, out=out, lse=lse, **full_options(batch)
    )  # fmt: skip
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)

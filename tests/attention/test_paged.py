"""Paged attention: page sizes, layouts, both forms of the page table, and caches that are views of something larger."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from evenshare.attention import paged_attention
from tests.attention.helpers import (
    Place,
    assert_matches,
    check_paged,
    int32,
    move,
    random_batch,
    run_paged,
    run_ragged,
    to_pages,
)

MIXED = ((1, 6, 5, 1, 0, 1), (33, 20, 5, 0, 3, 1))  # decode, append, prefill, no keys, no query, first key


@pytest.mark.parametrize("form", ["indptr", "block_table"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 32])
def test_page_sizes_layouts_and_forms(place: Place, page_size: int, kv_layout: str, form: str) -> None:
    check_paged(random_batch(*MIXED, heads=(4, 2), dim=16), place, page_size, kv_layout, form)


@pytest.mark.parametrize("heads", [(28, 4), (40, 8), (9, 3), (71, 1)])
def test_any_ratio_of_heads(place: Place, heads: tuple[int, int]) -> None:
    check_paged(random_batch((1, 2), (21, 3), heads=heads, dim=16), place, page_size=4)


@pytest.mark.parametrize("dim", [32, 56, 72, 80, 96, 112, 128, 256])
def test_any_head_dim(place: Place, dim: int) -> None:
    check_paged(random_batch((2, 1), (19, 6), dim=dim), place, page_size=5)


def test_values_of_another_dim(place: Place) -> None:
    check_paged(random_batch((2, 1), (19, 6), dim=192, dim_v=128), place, page_size=16)


def test_low_precision(place: Place) -> None:
    batch = random_batch((1, 3, 17), (40, 18, 17), heads=(6, 2), dim=64)
    for dtype in place.dtypes:
        check_paged(batch, place, page_size=8, dtype=dtype)


def test_many_heads_of_the_largest_dim(place: Place) -> None:
    """64 and 4 heads, D = 256: the largest partials; the plan sizes its own workspace."""
    check_paged(random_batch((1,), (150,), heads=(64, 4), dim=256), place, page_size=16)


@pytest.mark.parametrize("page_size", [1, 16])
def test_paged_is_ragged_bit_for_bit(kernel_place: Place, page_size: int) -> None:
    batch = random_batch(*MIXED, heads=(4, 2), dim=16)
    paged, paged_lse = run_paged(batch, kernel_place, page_size)
    ragged, ragged_lse = run_ragged(batch, kernel_place)
    assert torch.equal(paged, ragged)
    assert paged_lse is not None
    assert ragged_lse is not None
    assert torch.equal(paged_lse, ragged_lse)


@pytest.mark.parametrize("form", ["indptr", "block_table"])
def test_one_query_token_each_by_default(place: Place, form: str) -> None:
    batch = random_batch((1, 1, 1), (5, 0, 18), heads=(4, 2))
    moved = move(batch, place)
    pages = to_pages(moved, 4)
    out = paged_attention(moved.q, pages.k, pages.v, **pages.table(form, place.device), backend=place.backend)
    assert_matches(out, None, batch)


def paged(
    place: Place, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qo_indptr: list[int], **options: Any
) -> torch.Tensor:
    out = torch.full((*q.shape[:2], v.shape[-1]), math.nan, device=place.device)
    paged_attention(q, k, v, qo_indptr=int32(qo_indptr, place.device), out=out, backend=place.backend, **options)
    return out


def test_joined_keys_and_values(place: Place) -> None:
    """[blocks, heads, block, 2 D] with K and V joined in the last dimension."""
    batch = random_batch((1, 3), (21, 7), heads=(4, 2), dim=16)
    moved = move(batch, place)
    pages = to_pages(moved, 4, "HND")
    joined = torch.cat((pages.k, pages.v), -1)
    k, v = joined[..., :16], joined[..., 16:]
    table = pages.table("block_table", place.device)
    out = paged(place, moved.q, k, v, batch.qo_indptr, kv_layout="HND", **table)
    assert_matches(out, None, batch)


def test_stacked_keys_and_values(place: Place) -> None:
    """[blocks, 2, block, heads, D] with K and V stacked in the second dimension."""
    batch = random_batch((1, 3), (21, 7), heads=(4, 2), dim=16)
    moved = move(batch, place)
    pages = to_pages(moved, 4)
    stacked = torch.stack((pages.k, pages.v), 1)
    out = paged(place, moved.q, stacked[:, 0], stacked[:, 1], batch.qo_indptr, **pages.table("indptr", place.device))
    assert_matches(out, None, batch)


def test_token_pool_with_a_token_table(place: Place) -> None:
    """A flat pool [tokens, heads, dim] and a table of token ids: pages of one key."""
    batch = random_batch((1, 3), (21, 7), heads=(4, 2), dim=16)
    moved = move(batch, place)
    pages = to_pages(moved, 1)
    k, v = pages.k.squeeze(1).contiguous(), pages.v.squeeze(1).contiguous()
    table = pages.table("block_table", place.device)
    out = paged(place, moved.q, k.unsqueeze(1), v.unsqueeze(1), batch.qo_indptr, **table)
    assert_matches(out, None, batch)


def test_strides_are_honoured(place: Place) -> None:
    """A cache that is one layer of [pages, layers, page, heads, D], every second head of it, and a wide block table."""
    batch = random_batch((1, 3), (21, 7), heads=(4, 2), dim=24)
    moved = move(batch, place)
    pages = to_pages(moved, 4)
    cache = torch.full((pages.k.shape[0], 3, 4, 4, 48), math.nan, device=place.device)
    k, v = cache[:, 1, :, ::2, :24], cache[:, 1, :, 1::2, 24:]
    k.copy_(pages.k)
    v.copy_(pages.v)
    wide = torch.full((2, 40), -7, dtype=torch.int32, device=place.device)
    width = pages.block_table.shape[1]
    wide[:, 10 : 10 + width] = pages.block_table.to(place.device)
    out = paged(
        place, moved.q, k, v, batch.qo_indptr, block_table=wide[:, 10 : 10 + width], kv_lens=pages.kv_lens.to(place.device)
    )  # fmt: skip
    assert_matches(out, None, batch)


def test_pages_in_order_and_shared_pages(place: Place) -> None:
    """Requests that share a prefix's pages; page ids in increasing order (the CPU backend reads those in place)."""
    cache = random_batch((), (24,), heads=(2, 2), dim=16)
    k, v = (x.to(place.device).view(6, 4, 2, 16) for x in (cache.k, cache.v))
    q = random_batch((1, 2), (0, 0), heads=(4, 2), dim=16).q
    table = int32([[0, 1, 2, 3], [0, 1, 5, 0]], place.device)
    out = paged(place, q.to(place.device), k, v, [0, 1, 3], block_table=table, kv_lens=int32([15, 10], place.device))
    index = [*range(15), *range(8), 20, 21]
    batch = type(cache)((1, 2), (15, 10), q, cache.k[index], cache.v[index])
    assert_matches(out, None, batch)


def test_no_requests(place: Place) -> None:
    q, cache = torch.empty(0, 4, 16, device=place.device), torch.empty(0, 4, 2, 16, device=place.device)
    table = int32([], place.device)
    out = paged_attention(
        q, cache, cache, kv_indptr=int32([0], place.device), kv_indices=table, last_page_len=table, backend=place.backend
    )  # fmt: skip
    assert out.shape == (0, 4, 16)


def test_requests_without_pages(place: Place) -> None:
    q, cache = torch.randn(2, 4, 16, device=place.device), torch.empty(0, 4, 2, 16, device=place.device)
    table = int32([[], []], place.device)
    lens = int32([0, 0], place.device)
    out, lse = paged_attention(q, cache, cache, block_table=table, kv_lens=lens, return_lse=True, backend=place.backend)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()

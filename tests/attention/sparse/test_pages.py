"""Page tables of each KV head, in every backend against a loop; and which pages are selected, against the largest true score."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import evenshare
from evenshare.attention.sparse import page_bounds, select_pages
from tests.attention.helpers import Place, exact_random, int32

BATCH, HEADS, KV_HEADS, DIM, PAGES = 3, 6, 3, 16, 11
GROUP = HEADS // KV_HEADS


def keys_of(cache: torch.Tensor, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
    """[kv_len, D] of one head; cache [num_pages, page_size, D]."""
    needed = -(-kv_len // cache.shape[1])
    return cache[pages[:needed].long()].flatten(0, 1)[:kv_len]


def looped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.zeros(*q.shape[:2], v.shape[3]).double(), torch.full(q.shape[:2], -math.inf).double()
    for b in range(q.shape[0]):
        for head in range(HEADS):
            h = head // GROUP
            own_k, own_v = (keys_of(x[:, :, h], table[b, h], int(lens[b, h])).double() for x in (k, v))
            if len(own_k):
                scores = own_k @ q[b, head].double() / math.sqrt(DIM)
                out[b, head], lse[b, head] = scores.softmax(0) @ own_v, scores.logsumexp(0)
    return out, lse


@pytest.mark.parametrize("layout", ["NHD", "HND", "joined"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_a_table_for_each_head(place: Place, layout: str, page_size: int) -> None:
    """Also of keys and values that lie in one tensor. Unused places of a table point anywhere."""
    generator = torch.Generator().manual_seed(page_size)
    k, v = exact_random(PAGES, page_size, KV_HEADS, DIM), exact_random(PAGES, page_size, KV_HEADS, DIM)
    table = torch.randint(0, PAGES, (BATCH, KV_HEADS, 5), generator=generator, dtype=torch.int32)
    lens = torch.randint(0, 5 * page_size + 1, (BATCH, KV_HEADS), generator=generator, dtype=torch.int32)
    lens[0, 0], lens[1, 1] = 0, 5 * page_size
    unused = torch.arange(5) >= (lens[..., None] + page_size - 1) // page_size
    table[unused] = 2**31 - 1
    q = exact_random(BATCH, HEADS, DIM)
    want = looped(q, k, v, table.masked_fill(unused, 0), lens)
    for dtype in place.dtypes:
        qq, kk, vv = (x.to(place.device, dtype) for x in (q, k, v))
        if layout == "HND":
            kk, vv = (x.transpose(1, 2).contiguous() for x in (kk, vv))
        elif layout == "joined":
            kk, vv = torch.cat([kk, vv], -1).split(DIM, -1)
        options: dict[str, Any] = {"block_table": table.to(place.device), "kv_lens": lens.to(place.device)}
        options |= {"kv_layout": "HND" if layout == "HND" else "NHD", "backend": place.backend}
        out, lse = evenshare.paged_attention(qq, kk, vv, return_lse=True, **options)
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out.cpu().double(), want[0], atol=tolerance, rtol=0)
        torch.testing.assert_close(lse.cpu().double(), want[1], atol=2e-5, rtol=2e-6)
        apart = torch.full((BATCH, HEADS, 2 * DIM), math.nan, device=place.device, dtype=dtype)[..., :DIM]
        assert evenshare.paged_attention(qq, kk, vv, out=apart, **options) is apart
        torch.testing.assert_close(apart, out, atol=tolerance, rtol=0)


def test_tables_that_are_refused(place: Place) -> None:
    q, k = (
        torch.randn(BATCH, HEADS, DIM, device=place.device),
        torch.randn(PAGES, 4, KV_HEADS, DIM, device=place.device),
    )
    table = torch.zeros(BATCH, KV_HEADS, 2, dtype=torch.int32, device=place.device)
    lens = torch.ones(BATCH, KV_HEADS, dtype=torch.int32, device=place.device)

    def attend(**changed: Any) -> None:
        evenshare.paged_attention(
            q, k, k, **{"block_table": table, "kv_lens": lens, "backend": place.backend} | changed
        )

    for changed, message in (
        ({"block_table": table[:, :2]}, "block_table: got shape"),
        ({"kv_lens": lens[:, 0]}, "kv_lens: got"),
        ({"kv_lens": None}, "kv_lens: got None"),
        ({"window_left": 3}, "window_left: got one beside"),
        ({"variant": evenshare.Variant()}, "variant: got one beside"),
        ({"qo_indptr": int32([0, 1, 2, 3], place.device)}, "qo_indptr: got one beside"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(**changed)


@pytest.mark.parametrize("num_selected", [1, 3, 6])
def test_selected_pages(device: torch.device, num_selected: int) -> None:
    """The last one always, in their order, and before it those of the highest rank, which no key's score exceeds."""
    page_size, width = 4, 6
    k = torch.randn(20, page_size, KV_HEADS, DIM, device=device)
    q = torch.randn(BATCH, HEADS, DIM, device=device)
    table = torch.randperm(20)[: BATCH * width].view(BATCH, width).to(device)
    kv_lens = torch.tensor([21, 8, 0], device=device)
    low, high = bounds = page_bounds(k)
    assert all(torch.equal(a, b) for a, b in zip(bounds, page_bounds(k.transpose(1, 2), "HND"), strict=True))
    pages, lens = select_pages(q, bounds, table, kv_lens, page_size, num_selected)
    assert pages.shape == (BATCH, KV_HEADS, num_selected)
    for b, kv_len in enumerate(kv_lens.tolist()):
        count = -(-kv_len // page_size)
        kept = min(count, num_selected)
        assert (lens[b] == kv_len - (count - kept) * page_size).all()
        for h in range(KV_HEADS):
            group = q[b, h * GROUP : (h + 1) * GROUP]
            bound = torch.maximum(group[:, None] * low[table[b], h], group[:, None] * high[table[b], h]).sum(-1).amax(0)
            true = torch.einsum("gd,ptd->gpt", group, k[table[b], :, h]).amax((0, 2))
            assert (true <= bound + 1e-4).all()
            best = bound[: max(count - 1, 0)].topk(max(kept - 1, 0)).indices.sort().values.tolist()
            want = [*best, count - 1] if kept else []
            assert pages[b, h, :kept].tolist() == table[b, want].tolist()


def test_all_pages_are_plain_attention(place: Place) -> None:
    page_size = 4
    k, v = (torch.randn(20, page_size, KV_HEADS, DIM, device=place.device) for _ in range(2))
    q = torch.randn(2, HEADS, DIM, device=place.device)
    table, kv_lens = torch.randperm(20)[:12].view(2, 6).to(place.device), torch.tensor([22, 9], device=place.device)
    pages, lens = select_pages(q, page_bounds(k), table, kv_lens, page_size, 6)
    got = evenshare.paged_attention(q, k, v, block_table=pages, kv_lens=lens, backend=place.backend)
    want = evenshare.paged_attention(q, k, v, block_table=table, kv_lens=kv_lens, backend=place.backend)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_impossible_selections() -> None:
    q, bounds = torch.zeros(2, 4, 8), (torch.zeros(5, 2, 8), torch.zeros(5, 2, 8))
    table, lens = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for arguments, message in (
        ((q, bounds, table, lens, 16, 4), "num_selected: got 4, want 1 to the 3 pages"),
        ((q[:, :3], bounds, table, lens, 16, 2), "q: got 3 heads"),
        ((q[..., :4], bounds, table, lens, 16, 2), "q, bounds: got shapes"),
        ((q, bounds, table[:1], lens, 16, 2), "block_table, kv_lens: got shapes"),
    ):
        with pytest.raises(ValueError, match=message):
            select_pages(*arguments)
    with pytest.raises(ValueError, match="k_cache: got shape"):
        page_bounds(torch.zeros(2, 2, 2))

"""Attention over levels of a paged cache against paged attention over each request's whole page list, in every backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import evenshare
from evenshare import CascadeLevel, detect_shared_prefixes
from tests.attention.helpers import Place, exact_random, int32

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 16, 4, 40
Caches = tuple[torch.Tensor, torch.Tensor]


def caches() -> Caches:
    return exact_random(PAGES, PAGE, KV_HEADS, DIM), exact_random(PAGES, PAGE, KV_HEADS, DIM)


class Tree:
    """Eight requests of a few tokens; all share 3 pages, the first five 2 more, each has its own: three levels of groups.

    The middle level's last group, of the other three requests, has no keys.
    """

    qo_lens = (1, 3, 1, 1, 2, 1, 1, 4)
    own_lens = (7, 5, 1, 8, 2, 3, 12, 4)

    def __init__(self) -> None:
        ids = torch.randperm(PAGES)
        self.shared, self.some, rest = ids[:3], ids[3:5], ids[5:]
        counts = [-(-n // PAGE) for n in self.own_lens]
        self.own = torch.full((8, max(counts)), 2**31 - 1)
        for r, count in enumerate(counts):
            self.own[r, :count], rest = rest[:count], rest[count:]
        self.qo_indptr = torch.tensor([0, *self.qo_lens]).cumsum(0)

    def levels(self, place: Place, forms: str = "ttt") -> list[CascadeLevel]:
        """forms: of each level t, a table, or i, index pointers."""
        rows = self.qo_indptr
        tables = [
            (torch.stack([rows[0], rows[8]]), self.shared[None], torch.tensor([3 * PAGE])),
            (rows[[0, 5, 8]], torch.stack([self.some, self.some]), torch.tensor([2 * PAGE, 0])),
            (rows, self.own, torch.tensor(self.own_lens)),
        ]
        return [self.level(place, form, *table) for form, table in zip(forms, tables, strict=True)]

    def level(
        self, place: Place, form: str, rows: torch.Tensor, table: torch.Tensor, lens: torch.Tensor
    ) -> CascadeLevel:
        rows, table, lens = (x.int().to(place.device) for x in (rows, table, lens))
        if form == "t":
            return CascadeLevel(rows, table, lens)
        counts = (lens + PAGE - 1) // PAGE
        indices = torch.cat([table[r, :count] for r, count in enumerate(counts.tolist())])
        indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        last = torch.where(counts > 0, lens - (counts - 1) * PAGE, 0).int()
        return CascadeLevel(rows, kv_indptr=indptr, kv_indices=indices, last_page_len=last)

    def whole(self, place: Place) -> dict[str, torch.Tensor]:
        """Each request's page list from the beginning."""
        lens = [3 * PAGE + (r < 5) * 2 * PAGE + n for r, n in enumerate(self.own_lens)]
        lists = [torch.cat([self.shared, self.some if r < 5 else self.some[:0], self.own[r]]) for r in range(8)]
        table = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=2**31 - 1)
        return {"block_table": table.int().to(place.device), "kv_lens": int32(lens, place.device)}


def assert_same(got: Any, want: Any, atol: float = 2e-5) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float(), b.float(), atol=atol, rtol=1e-5)


@pytest.mark.parametrize("forms", ["ttt", "iti", "tit"])
@pytest.mark.parametrize("causal", [True, False])
def test_three_levels(place: Place, forms: str, causal: bool) -> None:
    tree, (k, v) = Tree(), caches()
    q = exact_random(sum(tree.qo_lens), HEADS, DIM)
    for dtype in place.dtypes:
        qq, kk, vv = (x.to(place.device, dtype) for x in (q, k, v))
        options: dict[str, Any] = {"causal": causal, "base": 2.0, "return_lse": True, "logits_soft_cap": 3.0}
        options |= {"backend": place.backend}
        rows = tree.qo_indptr.int().to(place.device)
        want = evenshare.paged_attention(qq, kk, vv, qo_indptr=rows, **tree.whole(place), **options)
        got = evenshare.cascade_attention(qq, kk, vv, tree.levels(place, forms), **options)
        assert_same(got, want, 2e-5 if dtype == torch.float32 else 2e-2)
        heads_first = evenshare.cascade_attention(
            qq, kk.transpose(1, 2), vv.transpose(1, 2), tree.levels(place, forms), kv_layout="HND", **options
        )
        assert_same(heads_first, got, 1e-6)


def test_levels_share_launches(kernel_place: Place) -> None:
    """Those with the same tile; the last one only where its mask means nothing."""
    place, tree = kernel_place, Tree()
    (k, v), tokens = caches(), sum(tree.qo_lens)
    options: dict[str, Any] = {
        "num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "page_size": PAGE, "dtype": torch.float32,
        "backend": place.backend, "device": place.device, "max_q_rows": tokens + 5,
    }  # fmt: skip
    q, k, v = (x.to(place.device) for x in (exact_random(tokens, HEADS, DIM), k, v))
    full = evenshare.plan_cascade(tree.levels(place), **options, causal=False)
    causal = evenshare.plan_cascade(tree.levels(place), **options)
    if place.device.type == "cpu":  # one tile for all
        assert (full.num_launches, causal.num_launches) == (1, 2)
    rows = tree.qo_indptr.int().to(place.device)
    for plan, is_causal in ((full, False), (causal, True)):
        want = evenshare.paged_attention(
            q, k, v, qo_indptr=rows, **tree.whole(place), causal=is_causal, return_lse=True, backend=place.backend
        )
        out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, device=place.device)
        assert_same(plan.run(q, k, v, out=out, lse=lse), want)
        assert_same((out, lse), want)
        plan.check()


def test_an_update_in_place(place: Place) -> None:
    tree, (k, v) = Tree(), caches()
    levels, whole = tree.levels(place), tree.whole(place)
    q, k, v = (x.to(place.device) for x in (exact_random(sum(tree.qo_lens), HEADS, DIM), k, v))
    plan = evenshare.plan_cascade(
        levels, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE, dtype=torch.float32, causal=False,
        backend=place.backend, device=place.device, max_q_rows=q.shape[0],
    )  # fmt: skip
    before = plan.run(q, k, v)
    assert levels[2].kv_lens is not None
    levels[2].kv_lens[1] += 2
    whole["kv_lens"][1] += 2
    plan.update()
    rows = tree.qo_indptr.int().to(place.device)
    want = evenshare.paged_attention(q, k, v, qo_indptr=rows, **whole, causal=False, backend=place.backend)
    got = plan.run(q, k, v)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    assert not torch.equal(got, before)
    other = tree.levels(place)
    plan.update(other)
    torch.testing.assert_close(plan.run(q, k, v), before, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="levels: got shapes"):
        plan.update(other[:2])


def test_one_level_is_paged_attention(place: Place) -> None:
    tree, (k, v) = Tree(), caches()
    q, k, v = (x.to(place.device) for x in (exact_random(sum(tree.qo_lens), HEADS, DIM), k, v))
    rows, whole = tree.qo_indptr.int().to(place.device), tree.whole(place)
    level = CascadeLevel(rows, **whole)
    want = evenshare.paged_attention(q, k, v, qo_indptr=rows, **whole, backend=place.backend, return_lse=True)
    assert_same(evenshare.cascade_attention(q, k, v, [level], return_lse=True, backend=place.backend), want, 1e-6)


def test_fp8_keys(place: Place) -> None:
    tree, (k, v) = Tree(), caches()
    q = exact_random(sum(tree.qo_lens), HEADS, DIM).to(place.device, torch.float16)
    codes = [x.to(place.device).to(torch.float8_e4m3fn) for x in (k, v)]
    options: dict[str, Any] = {
        "k_scale": 0.5,
        "v_scale": torch.tensor([2.0, 0.25], device=place.device),
        "return_lse": True,
    }
    options |= {"backend": place.backend}
    rows = tree.qo_indptr.int().to(place.device)
    want = evenshare.paged_attention(q, *codes, qo_indptr=rows, **tree.whole(place), **options)
    assert_same(evenshare.cascade_attention(q, *codes, tree.levels(place), **options), want, 2e-2)


def random_requests(generator: torch.Generator, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """block_table, kv_lens and qo_indptr of requests that often begin like their neighbour."""
    width = 6
    table = torch.randint(0, PAGES, (batch, width), generator=generator)
    for r in range(1, batch):
        same = int(torch.randint(0, width + 1, (1,), generator=generator))
        table[r, :same] = table[r - 1, :same]
    kv_lens = torch.randint(0, width * PAGE + 1, (batch,), generator=generator)
    qo_lens = torch.minimum(torch.randint(0, 3, (batch,), generator=generator), kv_lens)
    return table, kv_lens, torch.nn.functional.pad(qo_lens.cumsum(0), (1, 0))


@pytest.mark.parametrize(("min_pages", "max_groups"), [(1, None), (2, None), (1, 1), (1, 2), (3, 1)])
@pytest.mark.parametrize("decode", [True, False])
def test_detected_prefixes(device: torch.device, min_pages: int, max_groups: int | None, decode: bool) -> None:
    """Each request's pages, in two levels, are its pages; groups that share do it as far as a loop says."""
    generator = torch.Generator().manual_seed(min_pages)
    for batch in (0, 1, 2, 7, 12):
        table, kv_lens, rows = random_requests(generator, batch)
        if decode:
            kv_lens, rows = kv_lens.clamp(min=1), torch.arange(batch + 1)
        shared, own = detect_shared_prefixes(
            table.int().to(device), kv_lens.int().to(device), PAGE, qo_indptr=None if decode else rows.int().to(device),
            min_pages=min_pages, max_groups=max_groups,
        )  # fmt: skip
        level = [{name: t.cpu() for name, t in vars(x).items() if t is not None} for x in (shared, own)]
        groups = level[0]["qo_indptr"].tolist()
        assert groups[0] == 0
        assert groups[-1] == int(rows[-1])
        if max_groups is not None:
            assert len(groups) - 1 <= 2 * max_groups + 1
        prefix = kv_lens - level[1]["kv_lens"]
        assert (prefix % PAGE == 0).all()
        for r in range(batch):
            count = int(prefix[r]) // PAGE
            pages = -(-int(kv_lens[r]) // PAGE)
            assert level[1]["block_table"][r, : pages - count].tolist() == table[r, count:pages].tolist()
            for token in range(int(rows[r]), int(rows[r + 1])):
                g = max(i for i, begin in enumerate(groups[:-1]) if begin <= token and groups[i + 1] > begin)
                assert int(level[0]["kv_lens"][g]) == count * PAGE
                assert level[0]["block_table"][g, :count].tolist() == table[r, :count].tolist()
        if max_groups is None:
            whole = [(int(kv_lens[r]) - int(rows[r + 1] - rows[r])) // PAGE for r in range(batch)]
            common = [
                next((j for j in range(6) if j >= min(whole[r - 1 : r + 1]) or table[r, j] != table[r - 1, j]), 6)
                for r in range(1, batch)
            ]
            links = [c if c >= min_pages else 0 for c in common]
            for r in range(batch):
                run = []
                for step in (-1, 1):
                    at = r - 1 if step < 0 else r
                    while 0 <= at < len(links) and links[at]:
                        run.append(links[at])
                        at += step
                assert int(prefix[r]) == min(run, default=0) * PAGE


def test_detected_levels_compute_the_same(place: Place) -> None:
    generator = torch.Generator().manual_seed(5)
    table, kv_lens, rows = random_requests(generator, 9)
    (k, v), tokens = caches(), int(rows[-1])
    q, k, v = (x.to(place.device) for x in (exact_random(tokens, HEADS, DIM), k, v))
    metadata = {"block_table": table.int().to(place.device), "kv_lens": kv_lens.int().to(place.device)}
    rows = rows.int().to(place.device)
    want = evenshare.paged_attention(q, k, v, qo_indptr=rows, **metadata, return_lse=True, backend=place.backend)
    for max_groups in (None, 2):
        levels = detect_shared_prefixes(*metadata.values(), PAGE, qo_indptr=rows, max_groups=max_groups)
        assert int(levels[0].kv_lens.sum()) > 0  # type: ignore[union-attr]
        assert_same(evenshare.cascade_attention(q, k, v, levels, return_lse=True, backend=place.backend), want)


@pytest.mark.gpu
def test_no_sync_and_in_a_graph() -> None:
    """Detection, planning and runs of a decode batch, replayed after its tables changed."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    device, batch, width = torch.device("cuda"), 16, 40
    k, v = torch.randn(2, 800, 16, KV_HEADS, 64, device=device, dtype=torch.bfloat16)
    q = torch.randn(batch, 8, 64, device=device, dtype=torch.bfloat16)
    table = torch.randint(0, 800, (batch, width), device=device, dtype=torch.int32)
    table[:, :32] = table[0, :32]
    lens = torch.randint(33 * 16, width * 16, (batch,), device=device, dtype=torch.int32)
    options = {"num_qo_heads": 8, "num_kv_heads": KV_HEADS, "head_dim": 64, "page_size": 16, "max_q_rows": batch}
    plan = evenshare.plan_cascade(detect_shared_prefixes(table, lens, 16, max_groups=2), **options)

    def step() -> torch.Tensor:
        plan.update(detect_shared_prefixes(table, lens, 16, max_groups=2))
        return plan.run(q, k, v)

    step()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for cut in (32, 20, 0):
        table[batch // 2 :, cut:] = torch.randint(
            0, 800, (batch - batch // 2, width - cut), device=device, dtype=torch.int32
        )
        lens.random_(1, width * 16)
        graph.replay()
        want = evenshare.paged_attention(q, k, v, block_table=table, kv_lens=lens)
        torch.testing.assert_close(out.float(), want.float(), atol=2e-2, rtol=2e-2)


def test_what_is_refused(place: Place) -> None:
    tree, (k, v) = Tree(), caches()
    q, k, v = (x.to(place.device) for x in (exact_random(sum(tree.qo_lens), HEADS, DIM), k, v))
    levels = tree.levels(place)

    def attend(levels: Any) -> None:
        evenshare.cascade_attention(q, k, v, levels, backend=place.backend)

    for given, error, message in (
        ([], TypeError, "levels: got"),
        ([levels[0], 3], TypeError, "levels: got"),
        ([CascadeLevel(levels[0].qo_indptr)], ValueError, r"levels\[0\]: got qo_indptr, want block_table"),
        ([CascadeLevel(None, [[1]], torch.ones(1))], TypeError, r"levels\[0\].block_table"),
    ):
        with pytest.raises(error, match=message):
            attend(given)
    for arguments, message in (
        ((torch.zeros(3), torch.zeros(3), 16), "block_table, kv_lens: got shapes"),
        ((torch.zeros(3, 2), torch.zeros(3), 0), "page_size: got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            detect_shared_prefixes(*arguments)

"""What only a GPU shows: no sync, graphs that replay other lengths, offsets past 32 bits, streams, a second device, real sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from evenshare.attention import AttentionPlan, attention, merge_states, paged_attention, plan_attention
from evenshare.schedule.plan import Status
from tests.attention.helpers import (
    Batch,
    Place,
    assert_matches,
    check_paged,
    check_ragged,
    int32,
    move,
    random_batch,
    to_pages,
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu() -> Place:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return Place(torch.device("cuda"), "triton", (torch.float32, torch.float16, torch.bfloat16))


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def device_plan(
    table: dict[str, torch.Tensor], *, heads: tuple[int, int] = (8, 2), dim: int = 64, **options: Any
) -> AttentionPlan:
    defaults: dict[str, Any] = {"page_size": 16, "dtype": torch.float16}
    return plan_attention(num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim=dim, **(defaults | table | options))


@pytest.mark.parametrize("form", ["indptr", "block_table"])
def test_no_sync_in_plan_update_and_run(gpu: Place, form: str) -> None:
    batch = random_batch((1, 7, 1), (900, 40, 0), heads=(8, 2), dim=64)
    moved = move(batch, gpu, torch.float16)
    pages = to_pages(moved, 16)
    table = pages.table(form, gpu.device) | {"qo_indptr": int32(batch.qo_indptr, gpu.device)}
    out, lse = torch.full_like(moved.q, math.nan), torch.full(moved.q.shape[:2], math.nan, device=gpu.device)
    device_plan(table, max_q_rows=9).run(moved.q, pages.k, pages.v)  # compiles
    with no_sync():
        plan = device_plan(table, max_q_rows=9)
        plan.run(moved.q, pages.k, pages.v, out=out, lse=lse)
        plan.update()
        plan.run(moved.q, pages.k, pages.v, out=out, lse=lse)
    assert_matches(out, lse, batch)
    plan.check()


def test_no_sync_in_the_functions(gpu: Place) -> None:
    batch = random_batch((1, 7, 1), (900, 40, 0), heads=(8, 2), dim=64)
    moved = move(batch, gpu, torch.float16)
    pages = to_pages(moved, 16)
    table = pages.table("indptr", gpu.device)
    indptrs = {name: int32(getattr(batch, name), gpu.device) for name in ("qo_indptr", "kv_indptr")}
    dense = torch.randn(2, 30, 4, 64, device=gpu.device)
    for again in (False, True):
        with no_sync() if again else torch.no_grad():
            attention(moved.q, moved.k, moved.v, **indptrs)
            paged_attention(moved.q, pages.k, pages.v, qo_indptr=indptrs["qo_indptr"], **table)
            attention(dense, dense, dense, causal=True)
            merge_states(dense, dense[..., 0].contiguous())


def capacity_batch(kv_lens: list[int], gpu: Place) -> tuple[Batch, Any]:
    batch = random_batch((1,) * len(kv_lens), kv_lens, heads=(8, 2), dim=64)
    return batch, to_pages(move(batch, gpu, torch.float16), 16, extra_columns=4096 // 16 - -(-max(kv_lens) // 16))


def test_a_graph_replays_any_lengths_up_to_the_captured_ones(gpu: Place) -> None:
    """Captured with 8 requests of 4096 keys; replayed with short, empty and full ones."""
    num_pages = 8 * 4096 // 16 + 2
    caches = torch.zeros(2, num_pages, 16, 2, 64, dtype=torch.float16, device=gpu.device)
    q = torch.zeros(8, 8, 64, dtype=torch.float16, device=gpu.device)
    table = torch.arange(8 * 256, dtype=torch.int32, device=gpu.device).view(8, 256)
    lens = torch.full((8,), 4096, dtype=torch.int32, device=gpu.device)
    out, lse = torch.empty_like(q), torch.empty(8, 8, device=gpu.device)
    plan = device_plan({"block_table": table, "kv_lens": lens})

    def step() -> None:
        plan.update()
        plan.run(q, caches[0], caches[1], out=out, lse=lse)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for kv_lens in ([4096] * 8, [1, 0, 17, 4096, 0, 0, 33, 2], [0] * 8, [16] * 8, [4096, 1, 1, 1, 1, 1, 1, 1]):
        batch, pages = capacity_batch(kv_lens, gpu)
        caches.fill_(math.nan)
        used = pages.k.shape[0]
        caches[0, :used], caches[1, :used] = pages.k, pages.v
        q.copy_(batch.q)
        table.copy_(pages.block_table)
        lens.copy_(pages.kv_lens)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        with no_sync():
            graph.replay()
        assert_matches(out, lse, batch)
    plan.check()


def test_a_graph_with_ragged_queries(gpu: Place) -> None:
    qo_indptr, kv_indptr = int32([0, 8, 16, 24], gpu.device), int32([0, 100, 200, 300], gpu.device)
    q = torch.zeros(24, 8, 64, dtype=torch.float16, device=gpu.device)
    k, v = torch.zeros(2, 300, 2, 64, dtype=torch.float16, device=gpu.device)
    out = torch.empty_like(q)
    plan = device_plan({"qo_indptr": qo_indptr, "kv_indptr": kv_indptr}, page_size=None, max_q_rows=24)
    plan.run(q, k, v, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update()
        plan.run(q, k, v, out=out)
    for qo_lens, kv_lens in (((24, 0, 0), (300, 0, 0)), ((1, 20, 3), (5, 20, 200)), ((0, 0, 0), (1, 1, 1))):
        batch = random_batch(qo_lens, kv_lens, heads=(8, 2), dim=64)
        for tensor, values in ((q, batch.q), (k, batch.k), (v, batch.v)):
            tensor.fill_(math.nan)
            tensor[: values.shape[0]] = values
        qo_indptr.copy_(int32(batch.qo_indptr))
        kv_indptr.copy_(int32(batch.kv_indptr))
        out.fill_(math.nan)
        graph.replay()
        assert_matches(out[: batch.q.shape[0]], None, batch)
    plan.check()


@pytest.mark.parametrize(
    ("name", "values", "bit", "bad"),
    [
        ("last_page_len", [5, 17, 3], Status.BAD_LENGTHS, [1]),
        ("last_page_len", [5, 0, 3], Status.BAD_LENGTHS, [1]),
        ("kv_indptr", [0, 2, 1, 3], Status.BAD_LENGTHS, [1]),
        ("kv_indptr", [0, 1, 2, 99], Status.BAD_LENGTHS, [2]),
        ("kv_indices", [0, 1, 77], Status.BAD_INDEX, [2]),
        ("kv_indices", [-5, 1, 2], Status.BAD_INDEX, [0]),
    ],
)
def test_bad_device_values_set_the_status(gpu: Place, name: str, values: list[int], bit: int, bad: list[int]) -> None:
    table = {"kv_indptr": [0, 1, 2, 3], "kv_indices": [0, 1, 2], "last_page_len": [5, 16, 3]} | {name: values}
    cache = torch.randn(4, 16, 2, 64, device=gpu.device).half()
    q = torch.randn(3, 8, 64, device=gpu.device).half()
    plan = device_plan({key: int32(value, gpu.device) for key, value in table.items()})
    out, lse = torch.full_like(q, math.nan), torch.full((3, 8), math.nan, device=gpu.device)
    plan.run(q, cache, cache, out=out, lse=lse)
    assert not torch.isnan(out).any()
    for request in bad:
        assert (out[request] == 0).all()
        assert torch.isneginf(lse[request]).all()
    assert int(plan.status.item()) & bit
    with pytest.raises(RuntimeError, match="attention plan"):
        plan.check()


def test_bad_device_values_raise_in_debug_mode(gpu: Place) -> None:
    table = {"block_table": int32([[0, 1]], gpu.device), "kv_lens": int32([33], gpu.device)}
    with pytest.raises(ValueError, match=r"kv_lens\[0\]: got 33, want 0 to 32"):
        device_plan(table, debug=True)


def test_capacity_is_wanted_when_the_host_cannot_read_it(gpu: Place) -> None:
    indptrs = {"qo_indptr": int32([0, 2], gpu.device), "kv_indptr": int32([0, 4], gpu.device)}
    with pytest.raises(ValueError, match="max_q_rows: got None"):
        device_plan(indptrs, page_size=None)


def test_offsets_past_32_bits(gpu: Place) -> None:
    """A page stride of 1,077,120 elements and page id 1994: a view of a larger buffer, whose other elements are NaN."""
    stride, last = 1_077_120, 1994
    batch = random_batch((1, 2), (30, 9), heads=(8, 2), dim=64)
    moved = move(batch, gpu, torch.float16)
    pages = to_pages(moved, 16, extra_pages=0)  # every page is in use, so also number 1994
    storage = torch.full((stride * (last + 1),), math.nan, dtype=torch.float16, device=gpu.device)
    k = storage.as_strided((last + 1, 16, 2, 64), (stride, 128, 64, 1))
    v = storage[2048:].as_strided((last + 1, 16, 2, 64), (stride, 128, 64, 1), 2048)
    high = last - pages.kv_indices  # the ids in use, counted from the end
    k[high.to(gpu.device).long()], v[high.to(gpu.device).long()] = (
        x[pages.kv_indices.to(gpu.device).long()] for x in (pages.k, pages.v)
    )
    out = paged_attention(
        moved.q, k, v, qo_indptr=int32(batch.qo_indptr, gpu.device), kv_indptr=pages.kv_indptr.to(gpu.device),
        kv_indices=high.to(gpu.device), last_page_len=pages.last_page_len.to(gpu.device),
    )  # fmt: skip
    assert_matches(out, None, batch)


def test_two_streams_with_a_plan_each(gpu: Place) -> None:
    batches = [random_batch((1,) * 4, lens, heads=(8, 2), dim=64) for lens in ((3000, 5, 700, 0), (1, 2500, 40, 900))]
    work = []
    for batch in batches:
        moved = move(batch, gpu, torch.float16)
        pages = to_pages(moved, 16)
        plan = device_plan(pages.table("block_table", gpu.device))
        work.append((plan, moved.q, pages, plan.run(moved.q, pages.k, pages.v), torch.cuda.Stream()))
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for i, (plan, q, pages, _, stream) in enumerate(work):
            with torch.cuda.stream(stream):
                outs[i].append(plan.run(q, pages.k, pages.v))
    torch.cuda.synchronize()
    for batch, (_, _, _, first, _), results in zip(batches, work, outs, strict=True):
        assert_matches(first, None, batch)
        assert all(torch.equal(first, result) for result in results)


def test_two_streams_without_plans(gpu: Place) -> None:
    dense = [torch.randn(1, 2000, 4, 64, device=gpu.device).half() for _ in range(2)]
    want = [attention(x[:, :1], x, x) for x in dense]
    streams = [torch.cuda.Stream() for _ in dense]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(attention(dense[i][:, :1], dense[i], dense[i]))
    torch.cuda.synchronize()
    for first, results in zip(want, got, strict=True):
        for result in results:
            torch.testing.assert_close(result, first, atol=1e-3, rtol=0)


def test_bits_do_not_change_between_runs(gpu: Place) -> None:
    batch = random_batch((1, 40, 1, 3), (5000, 700, 3, 2100), heads=(8, 2), dim=128)
    moved = move(batch, gpu, torch.bfloat16)
    pages = to_pages(moved, 16)
    table = pages.table("indptr", gpu.device) | {"qo_indptr": int32(batch.qo_indptr, gpu.device)}
    plan = device_plan(table, dim=128, dtype=torch.bfloat16, max_q_rows=45)
    first = plan.run(moved.q, pages.k, pages.v)
    for _ in range(20):
        assert torch.equal(plan.run(moved.q, pages.k, pages.v), first)
    assert_matches(first, None, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
def test_real_tiles(gpu: Place, dtype: torch.dtype, dim: int) -> None:
    """Lengths that fill the GPU's own tiles, with odd ends."""
    batch = random_batch((1, 130, 1, 70), (1500, 300, 0, 70), heads=(8, 2), dim=dim)
    check_ragged(batch, gpu, dtype)
    check_paged(batch, gpu, 16, dtype=dtype)
    check_paged(batch, gpu, 3, "HND", "block_table", dtype=dtype)


@pytest.mark.parametrize("window_left", [0, 1, 63, 64, 127, 128, 129, 298, 299, 300])
def test_window_edges_of_real_tiles(gpu: Place, window_left: int) -> None:
    batch = random_batch((70, 1), (300, 299), heads=(4, 2), dim=64)
    check_ragged(batch, gpu, torch.bfloat16, window_left=window_left)
    check_paged(batch, gpu, 16, dtype=torch.bfloat16, window_left=window_left)


def test_one_very_long_request(gpu: Place) -> None:
    """64 and 4 heads, D = 256, 131072 keys: the largest partials. Compared with torch in fp32: the oracle would take minutes."""
    q = torch.randn(1, 64, 256, device=gpu.device).bfloat16()
    k, v = torch.randn(2, 8192, 16, 4, 256, device=gpu.device).bfloat16()
    table = torch.randperm(8192, device=gpu.device).int()[None]
    out = paged_attention(q, k, v, block_table=table, kv_lens=int32([131072], gpu.device))
    keys, values = (x[table[0].long()].flatten(0, 1).transpose(0, 1).float() for x in (k, v))
    scores = torch.bmm(q.view(4, 16, 256).float(), keys.transpose(1, 2)) / 16
    want = torch.bmm(torch.softmax(scores, -1), values).view(1, 64, 256)
    assert (out.float() - want).abs().max() <= 2**-7 * want.abs().max()


def test_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    place = Place(torch.device("cuda:1"), "triton", (torch.float32,))
    assert torch.cuda.current_device() == 0
    batch = random_batch((1, 3), (40, 18), heads=(4, 2), dim=64)
    check_ragged(batch, place)
    check_paged(batch, place)
    moved = move(batch, place)
    o = moved.q.unsqueeze(1)
    assert merge_states(o, o[..., 0].contiguous())[0].device == place.device
    assert torch.cuda.current_device() == 0

"""FlashInfer's names on a GPU: plans without a sync, in CUDA graphs, from host and device metadata."""

from __future__ import annotations

import pytest
import torch

import evenshare.compat.flashinfer as flashinfer
from tests.compat.flashinfer.oracle import Batch, assert_close, make_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]


def metadata(batch: Batch, device: str, with_queries: bool) -> tuple[torch.Tensor, ...]:
    tensors = batch.kv_indptr, batch.kv_indices, batch.last_page_len
    return tuple(t.to(device) for t in ((batch.qo_indptr, *tensors) if with_queries else tensors))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_no_sync(where: str) -> None:
    workspace = torch.empty(1, dtype=torch.uint8, device="cuda")
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    batch = make_batch((1, 3, 5, 0), (9, 7, 2, 4), dim=64, dtype=torch.float16)
    ones = make_batch([1] * 3, (9, 0, 30), dim=64, dtype=torch.float16)
    given = metadata(batch, where, True), metadata(ones, where, False)
    tensors = [t.cuda() for t in (batch.q, batch.cache, ones.q, ones.cache)]
    for attempt in range(2):  # the first one compiles
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            prefill.plan(*given[0], *batch.heads, 4, causal=True)
            got = prefill.run(tensors[0], tensors[1], return_lse=True)
            decode.plan(*given[1], *ones.heads, 4)
            single = decode.run(tensors[2], tensors[3], return_lse=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert_close((got[0].cpu(), got[1].cpu()), batch.oracle(causal=True))
    assert_close((single[0].cpu(), single[1].cpu()), ones.oracle())


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_replays_follow_later_plans(where: str) -> None:
    workspace = torch.empty(1, dtype=torch.uint8, device="cuda")
    buffers = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (4, 64, 3)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
    batches = [make_batch([1] * 3, lens, dim=64, dtype=torch.float16) for lens in ((9, 2, 5), (0, 1, 60), (40, 40, 3))]
    q = batches[0].q.cuda()
    cache = torch.zeros(32, *batches[0].cache.shape[1:], dtype=torch.float16, device="cuda")
    out = torch.empty_like(q)

    def load(batch: Batch) -> None:
        q.copy_(batch.q)
        cache[: len(batch.cache)].copy_(batch.cache)
        wrapper.plan(*metadata(batch, where, False), *batch.heads, 4)

    load(batches[0])
    wrapper.run(q, cache, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, cache, out=out)
    for batch in batches:
        load(batch)
        graph.replay()
        assert_close(out.cpu(), batch.oracle())


def test_single_calls_in_a_graph() -> None:
    q, k, v = (torch.randn(n, h, 64, device="cuda", dtype=torch.float16) for n, h in ((3, 4), (9, 2), (9, 2)))
    flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)
    q.normal_()
    graph.replay()
    torch.testing.assert_close(out, flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True))

"""The wrappers under FlashInfer's names against float64: every option, every edge of lengths, on torch and in the interpreter."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import evenshare
import evenshare.compat.flashinfer as flashinfer
from tests.compat.flashinfer.oracle import Batch, assert_close, attention, indptr, make_batch

WORKSPACE = torch.empty(0, dtype=torch.uint8)
# A decode, an append, more queries than keys, no keys, no queries, a full last page, one key.
QO_LENS, KV_LENS = (1, 3, 5, 2, 0, 4, 1), (9, 7, 2, 0, 6, 8, 1)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window_left": 0},
    {"window_left": 3},
    {"causal": True, "window_left": 7, "logits_soft_cap": 5.0},
    {"sm_scale": 0.3},
    {"causal": True, "pos_encoding_mode": "ALIBI"},
    {"causal": True, "pos_encoding_mode": "ROPE_LLAMA"},
    {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 5e3},
]


@pytest.fixture(params=["cpu", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is chosen at import, and this machine has a GPU")
    return request.param


def paged(backend: str = "auto", kv_layout: str = "NHD") -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, kv_layout, backend=backend)


def plan_paged(wrapper: Any, batch: Batch, **options: Any) -> Any:
    options = {"q_data_type": batch.q.dtype} | options
    metadata = batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.last_page_len
    wrapper.plan(*metadata, *batch.heads, batch.page_size, **options)
    return wrapper


@pytest.mark.filterwarnings("ignore:pos_encoding_mode ROPE_LLAMA")
@pytest.mark.parametrize(
    ("kv_layout", "options"), [*(("NHD", o) for o in OPTIONS), *(("HND", o) for o in OPTIONS[1::3])], ids=str
)
def test_paged_prefill(backend: str, kv_layout: str, options: dict[str, Any]) -> None:
    batch = make_batch(QO_LENS, KV_LENS, kv_layout=kv_layout)
    wrapper = plan_paged(paged(backend, kv_layout), batch, **options)
    want = batch.oracle(**options)
    out, lse = torch.full_like(batch.q, math.nan), torch.full(batch.q.shape[:2], math.nan)
    got = wrapper.run(batch.q, batch.cache, out=out, lse=lse, return_lse=True)
    assert got[0] is out
    assert got[1] is lse
    assert_close(got, want)
    pair = batch.cache[:, 0].contiguous(), batch.cache[:, 1].contiguous()
    if backend == "cpu" or not options:
        assert_close(wrapper.run(batch.q, pair), want)
        assert_close(wrapper.run_return_lse(batch.q, batch.cache), want)


@pytest.mark.parametrize("options", OPTIONS[::2] + OPTIONS[7:8], ids=str)
def test_ragged_prefill(backend: str, options: dict[str, Any]) -> None:
    batch = make_batch(QO_LENS, KV_LENS)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, backend=backend)
    wrapper.plan(batch.qo_indptr, indptr(KV_LENS), *batch.heads, q_data_type="float32", **options)
    want = batch.oracle(**options)
    k, v = torch.cat(batch.ks), torch.cat(batch.vs)
    assert_close(wrapper.run(batch.q, k, v, return_lse=True), want)
    if backend == "cpu":
        assert_close(wrapper.run(batch.q, k, v), want)


@pytest.mark.filterwarnings("ignore:pos_encoding_mode ROPE_LLAMA")
@pytest.mark.parametrize(("page_size", "heads"), [(1, (9, 3)), (5, (7, 1)), (8, (16, 2)), (16, (3, 3))], ids=str)
def test_decode(backend: str, page_size: int, heads: tuple[int, int]) -> None:
    batch = make_batch([1] * 5, [11, 1, 0, 8, 5], page_size=page_size, heads=heads)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend=backend)
    for options in ({}, {"window_left": 2}, {"pos_encoding_mode": "ROPE_LLAMA"}, {"pos_encoding_mode": "ALIBI"}):
        wrapper.plan(
            batch.kv_indptr, batch.kv_indices, batch.last_page_len, *batch.heads, page_size, q_data_type="float32", **options
        )  # fmt: skip
        assert_close(wrapper.run(batch.q, batch.cache, return_lse=True), batch.oracle(**options))


def test_decode_of_several_tokens(backend: str) -> None:
    batch = make_batch([3] * 3, [7, 3, 2])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend=backend)
    metadata = batch.kv_indptr, batch.kv_indices, batch.last_page_len
    wrapper.plan(*metadata, *batch.heads, 4, q_data_type=torch.float32, q_len_per_req=3)
    assert_close(wrapper.run(batch.q, batch.cache, return_lse=True, q_len_per_req=3), batch.oracle(causal=True))
    with pytest.raises(ValueError, match="q_len_per_req: got 2, want 3"):
        wrapper.run(batch.q, batch.cache, q_len_per_req=2)


@pytest.mark.parametrize("form", ["bool", "packed"])
def test_custom_masks(backend: str, form: str) -> None:
    batch = make_batch((1, 3, 5, 2, 4), (9, 7, 2, 0, 8))
    masks = [torch.rand(n, m) < 0.5 for n, m in zip(batch.qo_lens, batch.kv_lens, strict=True)]
    flat = torch.cat([mask.flatten() for mask in masks])
    given: dict[str, Any] = {"custom_mask": flat}
    if form == "packed":
        sizes = indptr([mask.numel() for mask in masks])
        given = {"packed_custom_mask": flashinfer.segment_packbits(flat, sizes, bitorder="little")[0]}
    want = batch.oracle(masks)
    wrapper = plan_paged(paged(backend), batch, causal=True, **given)  # the mask takes causal's place
    assert_close(wrapper.run(batch.q, batch.cache, return_lse=True), want)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, backend=backend)
    ragged.plan(batch.qo_indptr, indptr(batch.kv_lens), *batch.heads, q_data_type="float32", window_left=4, **given)
    got = ragged.run(batch.q, torch.cat(batch.ks), torch.cat(batch.vs), return_lse=True)
    assert_close(got, batch.oracle(masks, window_left=4))


def test_single_prefill(backend: str) -> None:
    q, k, v = torch.randn(5, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 8)
    mask = torch.rand(5, 9) < 0.5
    for kv_layout in ("NHD", "HND"):
        given = (k, v) if kv_layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
        for options in OPTIONS[:: 1 if backend == "cpu" else 4]:
            got = flashinfer.single_prefill_with_kv_cache_return_lse(
                q, *given, kv_layout=kv_layout, backend=backend, **options
            )
            assert_close(got, attention(q, k, v, **options))
        for masked in (
            {"custom_mask": mask},
            {"packed_custom_mask": flashinfer.packbits(mask.flatten(), bitorder="little")},
        ):
            got = flashinfer.single_prefill_with_kv_cache(q, *given, kv_layout=kv_layout, backend=backend, **masked)
            assert_close(got, attention(q, k, v, mask=mask))
    empty = flashinfer.single_prefill_with_kv_cache_return_lse(q, k[:0], v[:0], backend=backend)
    assert_close(empty, attention(q, k[:0], v[:0]))
    assert flashinfer.single_prefill_with_kv_cache(q[:0], k, v, backend=backend).shape == (0, 4, 8)
    longer = flashinfer.single_prefill_with_kv_cache_return_lse(q, k[:3], v[:3], causal=True, backend=backend)
    assert_close(longer, attention(q, k[:3], v[:3], causal=True))


def test_single_decode() -> None:
    q, k, v = torch.randn(4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    for options in (
        {},
        {"window_left": 0},
        {"window_left": 8},
        {"logits_soft_cap": 3.0},
        {"pos_encoding_mode": "ROPE_LLAMA"},
    ):
        want = attention(q[None], k, v, **options)
        got = flashinfer.single_decode_with_kv_cache(q, k, v, return_lse=True, **options)
        assert_close(got, (want[0][0], want[1][0]))
        hnd = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        assert_close(flashinfer.single_decode_with_kv_cache(q, *hnd, "HND", **options), (want[0][0], want[1][0]))
    scaled = flashinfer.single_decode_with_kv_cache(q, k, v, q_scale=0.5, k_scale=3.0, v_scale=2.0)
    want = attention(q[None], k, v, sm_scale=1.5 / 4)
    assert_close(scaled, (want[0][0] * 2, want[1][0]))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.filterwarnings("ignore:torch.float8_e5m2 keys")
def test_fp8_caches_and_scales(backend: str, kv_dtype: torch.dtype) -> None:
    batch = make_batch(QO_LENS, KV_LENS, dtype=torch.float16)
    codes = batch.cache.to(kv_dtype)
    for values in (batch.ks, batch.vs):
        values[:] = [x.to(kv_dtype).half() for x in values]
    want = batch.oracle(causal=True, sm_scale=0.25 * 0.5 * 2.0, scale_v=0.5)
    wrapper = plan_paged(paged(backend), batch, causal=True, kv_data_type=kv_dtype)
    for as_scale in (float, lambda value: torch.tensor([value])):
        scales = {"q_scale": as_scale(2.0), "k_scale": as_scale(0.5), "v_scale": as_scale(0.5)}
        assert_close(wrapper.run(batch.q, codes, return_lse=True, **scales), want, tolerance=4e-3)
    decode = make_batch([1] * 3, [5, 0, 9], dtype=torch.float16)
    for values in (decode.ks, decode.vs):
        values[:] = [x.to(kv_dtype).half() for x in values]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend=backend)
    wrapper.plan(decode.kv_indptr, decode.kv_indices, decode.last_page_len, *decode.heads, 4, kv_data_type=kv_dtype)
    got = wrapper.run(decode.q, decode.cache.to(kv_dtype), k_scale=0.25, v_scale=0.5, return_lse=True)
    assert_close(got, decode.oracle(sm_scale=0.25 * 0.25, scale_v=0.5), tolerance=4e-3)


def test_scales_of_16_bit_caches_multiply(backend: str) -> None:
    batch = make_batch(QO_LENS, KV_LENS)
    wrapper = plan_paged(paged(backend), batch, causal=True, logits_soft_cap=2.0)
    got = wrapper.run(batch.q, batch.cache, k_scale=2.0, v_scale=3.0, return_lse=True)
    assert_close(got, batch.oracle(causal=True, logits_soft_cap=2.0, sm_scale=0.5, scale_v=3.0), tolerance=1e-4)
    assert_close(
        wrapper.run(batch.q, batch.cache, k_scale=1.0, v_scale=1.0), batch.oracle(causal=True, logits_soft_cap=2.0)
    )
    by_tensor = wrapper.run(batch.q, batch.cache, k_scale=torch.tensor(2.0), v_scale=torch.tensor(3.0))
    assert_close(by_tensor, batch.oracle(causal=True, logits_soft_cap=2.0, sm_scale=0.5, scale_v=3.0), tolerance=1e-4)


def test_fp8_queries() -> None:
    fp8 = torch.float8_e4m3fn
    batch = make_batch((2, 3), (5, 6), dtype=torch.float16)
    q = batch.q.to(fp8)
    for values in (batch.ks, batch.vs):
        values[:] = [x.to(fp8).half() for x in values]
    k, v = (torch.cat(x).to(fp8) for x in (batch.ks, batch.vs))
    batch.q.copy_(q.half())
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    options = {"q_data_type": fp8, "kv_data_type": fp8, "o_data_type": torch.float16}
    ragged.plan(batch.qo_indptr, indptr(batch.kv_lens), *batch.heads, **options)
    got = ragged.run(q, k, v, q_scale=0.5, k_scale=0.5, v_scale=2.0)
    assert got.dtype == torch.float16
    assert_close(got, batch.oracle(sm_scale=0.0625, scale_v=2.0), tolerance=4e-3)
    by_head = torch.tensor([0.5, 1.0, 2.0, 0.25])
    got = flashinfer.single_prefill_with_kv_cache(
        q[:2], k[:5], v[:5], by_head, torch.tensor([0.5, 1.0]), torch.tensor([1.0, 2.0]), o_dtype=torch.float16
    )  # fmt: skip
    scaled = batch.q[:2].double() * by_head[:, None]
    kv_scale = torch.tensor([[0.5], [1.0]]), torch.tensor([[1.0], [2.0]])
    want = attention(scaled, batch.ks[0].double() * kv_scale[0], batch.vs[0].double() * kv_scale[1])
    assert_close(got, want, tolerance=4e-3)


def test_sinks(backend: str) -> None:
    batch, sinks = make_batch(QO_LENS, KV_LENS), torch.randn(4)
    wrapper = plan_paged(paged(backend), batch, causal=True)
    assert_close(
        wrapper.run(batch.q, batch.cache, sinks=sinks, return_lse=True), batch.oracle(causal=True, sinks=sinks)
    )
    assert_close(wrapper.run(batch.q, batch.cache), batch.oracle(causal=True))
    sink = flashinfer.BatchAttentionWithAttentionSinkWrapper(WORKSPACE, backend=backend, head_dim_qk=16, window_left=3)
    plan_paged(sink, batch, causal=True, window_left=3)
    assert_close(sink.run(batch.q, batch.cache, sinks, 0.25), batch.oracle(causal=True, window_left=3, sinks=sinks))
    with pytest.raises(ValueError, match=r"sm_scale: got 0.5 in run\(\), want 0.25"):
        sink.run(batch.q, batch.cache, sinks, 0.5)


def test_variant_takes_the_place_of_cuda_strings(backend: str) -> None:
    batch = make_batch(QO_LENS, KV_LENS)
    halved = evenshare.attention.variants.Variant(score_mod=lambda score, b, h, q_idx, kv_idx: score * 0.5)
    wrapper = plan_paged(paged(backend), batch, causal=True, variant=halved)
    assert_close(wrapper.run(batch.q, batch.cache, return_lse=True), batch.oracle(causal=True, sm_scale=0.125))
    with pytest.raises(ValueError, match="variant: got one beside a custom mask or ALIBI"):
        plan_paged(wrapper, batch, pos_encoding_mode="ALIBI", variant=halved)


def test_batch_attention(backend: str) -> None:
    batch = make_batch(QO_LENS, KV_LENS)
    wrapper = flashinfer.BatchAttention(device="cpu", backend=backend)
    lengths = torch.tensor(KV_LENS, dtype=torch.int32)
    dtypes = {"q_data_type": torch.float32, "kv_data_type": torch.float32}
    metadata = batch.qo_indptr, batch.kv_indptr, batch.kv_indices, lengths
    wrapper.plan(*metadata, *batch.heads, 16, batch.page_size, causal=True, **dtypes)
    assert_close(wrapper.run(batch.q, batch.cache), batch.oracle(causal=True))
    wrapper.plan(*metadata, *batch.heads, 16, batch.page_size, logits_soft_cap=4.0, sm_scale=0.5, **dtypes)
    want = batch.oracle(logits_soft_cap=4.0, sm_scale=0.5)
    for cap in (0.0, 4.0):
        assert_close(wrapper.run(batch.q, batch.cache, logits_soft_cap=cap), want)
    want = batch.oracle(logits_soft_cap=4.0, sm_scale=1.0, scale_v=0.5)
    assert_close(wrapper.run(batch.q, batch.cache, k_scale=2.0, v_scale=0.5), want)


def test_replanning_and_options_read_by_engines(backend: str) -> None:
    wrapper = paged(backend)
    for qo_lens, kv_lens in (
        ((1, 1), (3, 9)),
        ((9,), (12,)),
        ((1, 1), (40, 2)),
        ((2, 1, 1), (2, 2, 2)),
        ((1, 1), (5, 5)),
    ):
        batch = make_batch(qo_lens, kv_lens)
        plan_paged(wrapper, batch, causal=True, window_left=6, logits_soft_cap=8.0, sm_scale=0.2)
        got = wrapper.run(batch.q, batch.cache, return_lse=True)
        assert_close(got, batch.oracle(causal=True, window_left=6, logits_soft_cap=8.0, sm_scale=0.2))
        assert_close(
            wrapper.run(batch.q, batch.cache, window_left=0),
            batch.oracle(causal=True, window_left=0, logits_soft_cap=8.0, sm_scale=0.2),
        )
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale, wrapper._causal) == (6, 8.0, 0.2, True)
    plan_paged(wrapper, batch)
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale, wrapper._causal) == (
        -1,
        0.0,
        None,
        False,
    )
    assert torch.equal(wrapper._qo_indptr_buf, batch.qo_indptr)
    assert torch.equal(wrapper._paged_kv_indices_buf, batch.kv_indices)


def test_rows_that_only_run_knows(backend: str) -> None:
    """What happens when qo_indptr is on a GPU: the first run plans, with the metadata as it was at plan()."""
    batch = make_batch(QO_LENS, KV_LENS)
    wrapper = plan_paged(paged(backend), batch, causal=True)
    metadata = {name: t.clone() for name, t in wrapper._engine.metadata.items()}
    for policy in (None, "batch_invariant"):
        options = replace(wrapper._engine.options, policy=policy)
        wrapper._engine.plan(options, None, **metadata)
        metadata["last_page_len"].fill_(1)
        assert_close(wrapper.run(batch.q, batch.cache, return_lse=True), batch.oracle(causal=True))
        metadata["last_page_len"].copy_(batch.last_page_len)


def test_older_names(backend: str) -> None:
    batch = make_batch(QO_LENS, KV_LENS)
    wrapper = paged(backend)
    metadata = batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.last_page_len
    wrapper.begin_forward(*metadata, *batch.heads, 4, q_data_type="float32")
    got = wrapper.forward_return_lse(batch.q, batch.cache, causal=True, window_left=3, sm_scale=0.5)
    assert_close(got, batch.oracle(causal=True, window_left=3, sm_scale=0.5))
    assert_close(
        wrapper.forward(batch.q, batch.cache, pos_encoding_mode="ALIBI"), batch.oracle(pos_encoding_mode="ALIBI")
    )
    wrapper.end_forward()
    decode = make_batch([1] * 2, [5, 3])
    old = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend=backend)
    metadata = decode.kv_indptr, decode.kv_indices, decode.last_page_len
    old.begin_forward(*metadata, *decode.heads, 4, "NONE", 2, 0.0, "float32")
    assert_close(old.run(decode.q, decode.cache), decode.oracle(window_left=2))
    flashinfer.fast_decode_plan(old, *metadata, *decode.heads, 4, data_type="float32", global_override_indptr_cpu=None)
    assert_close(old.forward(decode.q, decode.cache, logits_soft_cap=3.0), decode.oracle(logits_soft_cap=3.0))
    with pytest.raises(TypeError, match="plan: got 13 arguments by position"):
        old.plan(*metadata, *decode.heads, 4, "NONE", 2, 0.0, "float32", "float32", "float32")
    assert all(isinstance(size, int) for size in old.workspace_size(*metadata, *decode.heads, 4))


@pytest.mark.parametrize("last", [0, 4])
def test_last_page_len_edges(backend: str, last: int) -> None:
    """kv_len = page_size * (pages - 1) + last: 0 is a page too many."""
    batch = make_batch((1, 2, 1), (8, 4, 3))
    counts, indices = batch.kv_indptr.diff().tolist(), batch.kv_indices.split(batch.kv_indptr.diff().tolist())
    if last == 0:
        spare = torch.tensor([len(batch.cache) - 1], dtype=torch.int32)
        indices = torch.cat((indices[0], spare, indices[1], spare, indices[2]))
        counts = [counts[0] + 1, counts[1] + 1, counts[2]]
    else:
        indices = batch.kv_indices
    wrapper = paged(backend)
    last_page_len = torch.tensor([last, last, 3], dtype=torch.int32)
    wrapper.plan(
        batch.qo_indptr, indptr(counts), indices, last_page_len, *batch.heads, 4, causal=True, q_data_type="float32"
    )
    assert_close(wrapper.run(batch.q, batch.cache, return_lse=True), batch.oracle(causal=True))


@pytest.mark.parametrize("option", [{"fixed_split_size": 4}, {"disable_split_kv": True}], ids=str)
def test_bits_do_not_depend_on_the_batch(backend: str, option: dict[str, Any]) -> None:
    batch = make_batch((1, 1, 1, 1), (70, 3, 33, 1))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend=backend)
    options = {"q_data_type": "float32", **option}
    wrapper.plan(batch.kv_indptr, batch.kv_indices, batch.last_page_len, *batch.heads, 4, **options)
    together = wrapper.run(batch.q, batch.cache)
    assert_close(together, batch.oracle())
    begins = batch.kv_indptr.tolist()
    for r in range(4):
        pages = batch.kv_indices[begins[r] : begins[r + 1]]
        wrapper.plan(indptr([len(pages)]), pages, batch.last_page_len[r : r + 1], *batch.heads, 4, **options)
        assert torch.equal(wrapper.run(batch.q[r : r + 1], batch.cache), together[r : r + 1])


def test_graph_mode_uses_the_buffers(backend: str) -> None:
    """The same arrays at every plan: what a captured graph reads."""
    buffers = torch.zeros(4, dtype=torch.int32), torch.zeros(32, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, False, *buffers, backend=backend)
    plans = set()
    for kv_lens in ((9, 2, 5), (0, 1, 30)):
        batch = make_batch([1] * 3, kv_lens)
        metadata = batch.kv_indptr, batch.kv_indices, batch.last_page_len
        wrapper.plan(*metadata, *batch.heads, 4, q_data_type="float32")
        assert_close(wrapper.run(batch.q, batch.cache, return_lse=True), batch.oracle())
        plans |= {id(plan) for plan, _ in wrapper._engine._plans.values()}
        assert torch.equal(buffers[0], batch.kv_indptr)
        assert torch.equal(buffers[1][: len(batch.kv_indices)], batch.kv_indices)
    assert len(plans) == 1
    with pytest.raises(ValueError, match="indptr: got 2 requests, want 3"):
        wrapper.plan(batch.kv_indptr[:3], *metadata[1:], *batch.heads, 4)
    graph = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    assert graph.is_cuda_graph_enabled
    graph.plan(*metadata, *batch.heads, 4, q_data_type="float32")
    assert_close(graph.run(batch.q, batch.cache), batch.oracle())


def test_graph_mode_of_prefill_and_masks(backend: str) -> None:
    ints = [torch.zeros(n, dtype=torch.int32) for n in (3, 3, 16, 2)]
    mask_buffers = torch.zeros(64, dtype=torch.uint8), torch.zeros(3, dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        WORKSPACE, "NHD", True, *ints, *mask_buffers, backend=backend
    )
    for qo_lens, kv_lens in (((3, 4), (9, 6)), ((1, 4), (3, 11))):
        batch = make_batch(qo_lens, kv_lens)
        masks = [torch.rand(n, m) < 0.6 for n, m in zip(qo_lens, kv_lens, strict=True)]
        plan_paged(wrapper, batch, custom_mask=torch.cat([mask.flatten() for mask in masks]))
        assert_close(wrapper.run(batch.q, batch.cache, return_lse=True), batch.oracle(masks))
    assert len(wrapper._engine._plans) == 1
    plan_paged(wrapper, batch, causal=True)
    assert_close(wrapper.run(batch.q, batch.cache), batch.oracle(causal=True))
    before = [buffer.clone() for buffer in ints]
    with pytest.raises(ValueError, match=r"last_page_len\[0\]: got 9, want 1 to the page size 4"):
        wrapper.plan(ints[0].clone(), ints[1].clone(), ints[2].clone(), ints[3] * 0 + 9, *batch.heads, 4)
    with pytest.raises(ValueError, match="plan: got 17 values for a buffer of 16, want no more"):
        wrapper.plan(ints[0].clone(), ints[1].clone(), torch.zeros(17).int(), ints[3] * 0 + 1, *batch.heads, 4)
    assert all(torch.equal(buffer, old) for buffer, old in zip(ints, before, strict=True))
    too_many = make_batch((4, 4), (9, 6))
    with pytest.raises(ValueError, match="qo_indptr: got 8 query rows, want at most the 7 of the first plan"):
        plan_paged(wrapper, too_many, causal=True)
    with pytest.raises(ValueError, match="paged_kv_indices_buf: got None, want a buffer when use_cuda_graph"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, ints[0], ints[1])


def test_cascade(backend: str) -> None:
    """Two groups of requests share a prefix each: the levels together are the requests' whole caches."""
    shared = make_batch((5, 3), (8, 4))
    own = make_batch((2, 3, 1, 2), (3, 5, 0, 2))
    pages = len(shared.cache)
    cache = torch.cat((shared.cache, own.cache))
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE, backend=backend)
    wrapper.plan(
        [shared.qo_indptr, own.qo_indptr], [shared.kv_indptr, own.kv_indptr], [shared.kv_indices, own.kv_indices + pages],
        [shared.last_page_len, own.last_page_len], *own.heads, 4, causal=True, q_data_type="float32",
    )  # fmt: skip
    want = [
        attention(q, torch.cat((shared.ks[r // 2], own.ks[r])), torch.cat((shared.vs[r // 2], own.vs[r])),
                  mask=torch.cat((torch.ones(q.shape[0], shared.kv_lens[r // 2], dtype=torch.bool),
                                  torch.ones(q.shape[0], own.kv_lens[r]).tril(own.kv_lens[r] - q.shape[0]).bool()), 1))
        for r, q in enumerate(own.q.split(own.qo_lens))
    ]  # fmt: skip
    out, lse = (torch.cat(x) for x in zip(*want, strict=True))
    assert_close(wrapper.run(own.q, cache), (out, lse))
    with pytest.raises(NotImplementedError, match="window_left: got 3, want -1 with several levels"):
        wrapper.plan([own.qo_indptr] * 2, [own.kv_indptr] * 2, [own.kv_indices] * 2, [own.last_page_len] * 2, *own.heads, 4,
                     window_left=3)  # fmt: skip


def plan_ragged(**changes: Any) -> None:
    zero = torch.tensor([0, 2], dtype=torch.int32)
    arguments = {
        "qo_indptr": zero,
        "kv_indptr": zero,
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 16,
    } | changes
    flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE).plan(**arguments)


def plan_some(**changes: Any) -> None:
    batch = make_batch((2,), (5,))
    arguments = {
        "qo_indptr": batch.qo_indptr, "paged_kv_indptr": batch.kv_indptr, "paged_kv_indices": batch.kv_indices,
        "paged_kv_last_page_len": batch.last_page_len, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 16, "page_size": 4,
    } | changes  # fmt: skip
    paged().plan(**arguments)


LONG = torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: plan_some(qo_indptr=LONG), TypeError, "qo_indptr: got dtype torch.int64, want torch.int32"),
        (lambda: plan_some(paged_kv_indptr=LONG), TypeError, "paged_kv_indptr: got dtype torch.int64"),
        (lambda: plan_some(paged_kv_indices=LONG), TypeError, "paged_kv_indices: got dtype torch.int64"),
        (lambda: plan_some(paged_kv_last_page_len=LONG), TypeError, "paged_kv_last_page_len: got dtype torch.int64"),
        (lambda: plan_some(paged_kv_last_page_len=[1]), TypeError, "paged_kv_last_page_len: got list, want a tensor"),
        (lambda: plan_some(paged_kv_last_page_len=torch.tensor([5]).int()), ValueError, "got 5, want 1 to the page size 4"),
        (lambda: plan_some(num_kv_heads=3), ValueError, "num_qo_heads, num_kv_heads: got 4 and 3"),
        (lambda: plan_some(q_data_type="half16"), TypeError, "q_data_type: got 'half16', want a torch.dtype or its name"),
        (lambda: plan_some(pos_encoding_mode="ROPE"), ValueError, "pos_encoding_mode: got 'ROPE', want one of NONE"),
        (lambda: plan_some(prefix_len_ptr=LONG), NotImplementedError, "prefix_len_ptr: got a tensor, want None"),
        (lambda: plan_some(custom_mask=torch.ones(9).bool()), ValueError, "custom_mask: got 9 elements, want 10"),
        (lambda: plan_some(variant=3), TypeError, "variant: got int, want evenshare.Variant"),
        (lambda: plan_ragged(kv_indptr=LONG), TypeError, "kv_indptr: got dtype torch.int64, want torch.int32"),
        (lambda: plan_ragged(v_indptr=LONG), NotImplementedError, "v_indptr: got a tensor, want None"),
        (lambda: plan_ragged(head_dim_qk=300), ValueError, "head_dim: got 300"),
        (lambda: paged().run(torch.ones(1, 4, 16), torch.ones(2, 2, 4, 2, 16)), RuntimeError, r"want plan\(\) first"),
        (lambda: paged(kv_layout="DHN"), ValueError, "kv_layout: got 'DHN', want 'NHD' or 'HND'"),
        (
            lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, jit_args=["x"]),
            NotImplementedError,
            r"jit_args: .* variant=evenshare.Variant",
        ),
        (
            lambda: flashinfer.single_prefill_with_kv_cache(torch.ones(2, 4, 8), torch.ones(3, 8), torch.ones(3, 8)),
            ValueError,
            r"k: got shape \(3, 8\), want three dimensions",
        ),
        (
            lambda: flashinfer.single_decode_with_kv_cache(torch.ones(1, 4, 8), torch.ones(3, 4, 8), torch.ones(3, 4, 8)),
            ValueError,
            r"q: got shape \(1, 4, 8\), want \[num_qo_heads, head_dim\]",
        ),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_errors_of_runs() -> None:
    batch = make_batch((2,), (5,))
    wrapper = plan_paged(paged(), batch)
    out = torch.full_like(batch.q, math.nan)
    for call, error, text in (
        (lambda: wrapper.run(batch.q, batch.cache[0], out=out), ValueError, "paged_kv_cache: got shape"),
        (lambda: wrapper.run(batch.q, (batch.cache[:, 0],), out=out), ValueError, r"paged_kv_cache: got 1 tensors"),
        (lambda: wrapper.run(batch.q.half(), batch.cache, out=out), TypeError, "q: got dtype torch.float16"),
        (lambda: wrapper.run(batch.q, batch.cache, 1, out=out), NotImplementedError, "jit_args"),
        (lambda: wrapper.run(batch.q, batch.cache, kv_cache_sf=batch.q, out=out), NotImplementedError, "kv_cache_sf"),
        (
            lambda: wrapper.run(batch.q[:1], batch.cache, out=out[:1]),
            ValueError,
            "q: got 1 tokens, want at least the 2",
        ),
        (lambda: wrapper.run(batch.q, batch.cache, out=out[:1]), ValueError, "out: got shape"),
    ):
        with pytest.raises(error, match=text):
            call()
        assert torch.isnan(out).all()


@pytest.mark.parametrize(
    ("name", "order"),
    [
        (
            "BatchPrefillWithPagedKVCacheWrapper",
            ["causal", "pos_encoding_mode", "use_fp16_qk_reduction", "sm_scale", "window_left"],
        ),
        (
            "BatchPrefillWithRaggedKVCacheWrapper",
            ["causal", "pos_encoding_mode", "use_fp16_qk_reduction", "window_left", "logits_soft_cap", "sm_scale"],
        ),
        ("BatchAttention", ["page_size", "causal", "sm_scale", "logits_soft_cap", "q_data_type"]),
    ],
)  # fmt: skip
def test_order_of_arguments(name: str, order: list[str]) -> None:
    parameters = list(inspect.signature(getattr(flashinfer, name).plan).parameters)
    begin = parameters.index(order[0])
    assert parameters[begin : begin + len(order)] == order

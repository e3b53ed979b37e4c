"""Block-sparse attention and shared prefixes under FlashInfer's names, against float64."""

from __future__ import annotations

import pytest
import torch

import evenshare.compat.flashinfer as flashinfer
from tests.compat.flashinfer.oracle import assert_close, attention, indptr, make_batch

WORKSPACE = torch.empty(0, dtype=torch.uint8)
BACKENDS = ["cpu", pytest.param("triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="no interpreter"))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask_form", [None, "bool", "packed"])
def test_blocks_of_one_size(backend: str, mask_form: str | None) -> None:
    rows, columns, r, c = 6, 12, 2, 4
    blocks = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]], dtype=torch.bool)
    counts = blocks.sum(1).tolist()
    indices = torch.cat([row.nonzero().flatten() for row in blocks]).int()
    seen = torch.rand(len(indices), r, c) < 0.6 if mask_form else torch.ones(len(indices), r, c, dtype=torch.bool)
    dense = torch.zeros(rows, columns, dtype=torch.bool)
    for e, (i, j) in enumerate(blocks.nonzero().tolist()):
        dense[i * r : (i + 1) * r, j * c : (j + 1) * c] = seen[e]
    q, k, v = (torch.randn(n, h, 16) for n, h in ((rows, 4), (columns, 2), (columns, 2)))
    wrapper = flashinfer.BlockSparseAttentionWrapper(WORKSPACE, backend=backend)
    given = {}
    if mask_form == "bool":
        given = {"mask": seen}
    elif mask_form == "packed":
        by_row = [part.transpose(0, 1).flatten() for part in seen.split(counts)]
        sizes = indptr([len(part) for part in by_row])
        given = {"packed_mask": flashinfer.segment_packbits(torch.cat(by_row), sizes, bitorder="little")[0]}
    wrapper.plan(indptr(counts), indices, rows, columns, r, c, 4, 2, 16, q_data_type="float32", **given)
    want = attention(q, k, v, mask=dense)
    out = torch.full_like(q, float("nan"))
    got = wrapper.run(q, k, v, out=out, return_lse=True)
    assert got[0] is out
    assert_close(got, want)
    assert_close(wrapper.run_return_lse(q, k, v), want)
    assert_close(wrapper.run(q, k, v, 2.0, 0.5, 3.0), (want[0] * 3, want[1]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 4.0}], ids=str
)
def test_blocks_of_any_size(backend: str, options: dict[str, object]) -> None:
    row_sizes, column_sizes = torch.tensor([[2, 0, 3], [1, 3, 1]]), torch.tensor([[4, 3], [6, 1]])
    blocks = torch.tensor([[[1, 0], [1, 1], [0, 0]], [[0, 1], [1, 1], [1, 0]]], dtype=torch.bool)
    q, k, v = torch.randn(4, 5, 16), torch.randn(2, 7, 16), torch.randn(2, 7, 16)
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(WORKSPACE, backend=backend)
    wrapper.plan(blocks, row_sizes, column_sizes, 4, 2, 16, q_data_type=torch.float32, **options)
    parts = []
    for head in range(2):
        mask = blocks[head].repeat_interleave(row_sizes[head], 0).repeat_interleave(column_sizes[head], 1)
        mine = [x.transpose(0, 1) for x in (q, k[head : head + 1].repeat(2, 1, 1), v[head : head + 1].repeat(2, 1, 1))]
        out, lse = attention(
            mine[0], mine[1].repeat_interleave(2, 1), mine[2].repeat_interleave(2, 1), mask=mask, **options
        )
        parts.append((out[:, 2 * head : 2 * head + 2], lse[:, 2 * head : 2 * head + 2]))
    want = tuple(torch.cat(x, 1).transpose(0, 1) for x in zip(*parts, strict=True))
    assert_close(wrapper.run(q, k, v, return_lse=True), want)
    out = torch.full_like(q, float("nan"))
    wrapper.run(q, k, v, out=out)
    assert_close(out, want)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_shared_prefixes(kv_layout: str) -> None:
    k, v = torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    given = (k, v) if kv_layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    for qo_lens, causal in (((1, 1, 1), False), ((2, 3, 1), True)):
        batch = make_batch(qo_lens, (5, 7, 1 if causal else 0), kv_layout=kv_layout)
        metadata = batch.kv_indptr, batch.kv_indices, batch.last_page_len
        if causal:
            wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(WORKSPACE, kv_layout)
            wrapper.begin_forward(batch.qo_indptr, *metadata, *batch.heads, 4)
            got = wrapper.forward(batch.q, *given, batch.cache, causal=True, sm_scale=0.3)
        else:
            wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WORKSPACE, kv_layout)
            wrapper.begin_forward(*metadata, *batch.heads, 4, data_type="float32")
            got = wrapper.forward(batch.q, *given, batch.cache, sm_scale=0.3)
        wrapper.end_forward()
        parts = [
            attention(q, torch.cat((k, own_k)), torch.cat((v, own_v)), causal=causal, sm_scale=0.3)
            for q, own_k, own_v in zip(batch.q.split(qo_lens), batch.ks, batch.vs, strict=True)
        ]
        assert_close(got, tuple(torch.cat(x) for x in zip(*parts, strict=True)))


def test_append_of_latents() -> None:
    ckv, kpe = torch.randn(3, 512).half(), torch.randn(3, 64).half()
    ckv_cache, kpe_cache = torch.zeros(4, 2, 512).half(), torch.zeros(4, 2, 64).half()
    rows, positions, pages, page_indptr, last = (
        torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 1], [1, 0, 2], [3, 0, 2], [0, 1, 3], [2, 1])
    )
    flashinfer.append_paged_mla_kv_cache(ckv, kpe, rows, positions, ckv_cache, kpe_cache, pages, page_indptr, last)
    for cache, values in ((ckv_cache, ckv), (kpe_cache, kpe)):
        assert torch.equal(cache[[3, 0, 2], [1, 0, 0]], values)
        assert int(cache.any(-1).sum()) == 3
    with pytest.raises(ValueError, match=r"append_kpe: got shape \(3,\), want 2 dimensions"):
        flashinfer.append_paged_mla_kv_cache(
            ckv, kpe[:, 0], rows, positions, ckv_cache, kpe_cache, pages, page_indptr, last
        )


def test_errors_name_the_argument() -> None:
    wrapper = flashinfer.BlockSparseAttentionWrapper(WORKSPACE)
    zero, none = torch.zeros(3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    with pytest.raises(ValueError, match="M: got 5, want a multiple of R = 2"):
        wrapper.plan(zero, none, 5, 8, 2, 4, 2, 2, 16)
    with pytest.raises(ValueError, match=r"indptr: got shape \(3,\), want \[4\], M / R \+ 1"):
        wrapper.plan(zero, none, 6, 8, 2, 4, 2, 2, 16)
    with pytest.raises(ValueError, match=r"mask: got shape \(1, 2, 4\), want \[0, 2, 4\]"):
        wrapper.plan(zero, none, 4, 8, 2, 4, 2, 2, 16, mask=torch.ones(1, 2, 4).bool())
    with pytest.raises(TypeError, match=r"indices: got dtype torch\.int64, want torch\.int32"):
        wrapper.plan(zero, none.long(), 4, 8, 2, 4, 2, 2, 16)
    wrapper.plan(zero, none, 4, 8, 2, 4, 2, 2, 16, q_data_type="float32")
    k = torch.randn(8, 2, 16)
    with pytest.raises(ValueError, match=r"q: got shape \(8, 2, 16\), want \[4, heads, head_dim\]"):
        wrapper.run(k, k, k)
    assert not wrapper.run(k[:4], k, k).any()
    variable = flashinfer.VariableBlockSparseAttentionWrapper(WORKSPACE)
    with pytest.raises(ValueError, match=r"block_col_sz: got shape \(2, 2\), want \(2, 3\)"):
        variable.plan(torch.ones(2, 2, 3).bool(), torch.ones(2, 2).int(), torch.ones(2, 2).int(), 2, 2, 16)

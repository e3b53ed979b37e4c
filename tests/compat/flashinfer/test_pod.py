"""Prefill and decode of one step under FlashInfer's names."""

from __future__ import annotations

import pytest
import torch

import evenshare.compat.flashinfer as flashinfer
from tests.compat.flashinfer.oracle import assert_close, attention, make_batch

WORKSPACE = torch.empty(0, dtype=torch.uint8)


def test_one_prefill_beside_a_decode_batch() -> None:
    q, k, v = torch.randn(5, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    batch = make_batch([1] * 3, (9, 0, 4))
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(WORKSPACE)
    metadata = batch.kv_indptr, batch.kv_indices, batch.last_page_len
    wrapper.plan(*metadata, *batch.heads, 4, "NONE", 5, q_data_type="float32", sm_scale=0.2)
    prefill, decode = wrapper.run(q, k, v, batch.q, batch.cache, causal_p=True, window_left_p=3, return_lse_p=True)
    assert_close(prefill, attention(q, k, v, causal=True, window_left=3))
    assert_close(decode, batch.oracle(window_left=5, sm_scale=0.2))
    mask = torch.rand(5, 9) < 0.5
    prefill, decode = wrapper.run(q, k, v, batch.q, batch.cache, mask, window_left_d=1, v_scale=2.0, return_lse_d=True)
    assert_close(prefill, attention(q, k, v, mask=mask))
    assert_close(decode, batch.oracle(window_left=1, sm_scale=0.2, scale_v=2.0))
    with pytest.raises(ValueError, match=r"sm_scale_d: got 0.5 in run\(\), want 0.2, that of plan\(\)"):
        wrapper.run(q, k, v, batch.q, batch.cache, sm_scale_d=0.5)
    with pytest.raises(NotImplementedError, match="custom_mask_d: got a tensor, want None"):
        wrapper.run(q, k, v, batch.q, batch.cache, custom_mask_d=mask)


def test_two_batches() -> None:
    first, second = make_batch((3, 5, 2), (7, 2, 0)), make_batch([1] * 2, (6, 11))
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(WORKSPACE)
    tables = [
        t
        for batch in (first, second)
        for t in (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.last_page_len)
    ]
    wrapper.plan(*tables, *first.heads, 4, "NONE", 4, data_type="float32")
    masks = [torch.rand(n, m) < 0.5 for n, m in zip(first.qo_lens, first.kv_lens, strict=True)]
    flat = torch.cat([mask.flatten() for mask in masks])
    for causal in (False, True, False):
        got = wrapper.run(first.q, first.cache, second.q, second.cache, causal_p=causal, return_lse=True)
        assert_close(got[0], first.oracle(causal=causal, window_left=4))
        assert_close(got[1], second.oracle(window_left=4))
        got = wrapper.run(first.q, first.cache, second.q, second.cache, flat, causal_p=causal, k_scale=2.0)
        assert_close(got[0], first.oracle(masks, window_left=4, sm_scale=0.5))
        assert_close(got[1], second.oracle(window_left=4, sm_scale=0.5))

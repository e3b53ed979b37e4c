"""FlashInfer's latent attention against its definition in float64: append, plan and run, host and device metadata, graphs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import evenshare.compat.flashinfer as flashinfer
from evenshare.compat.flashinfer import mla
from tests.attention.helpers import indptr, int32
from tests.compat.flashinfer.oracle import attention

HEADS, CKV, KPE, PAGE = 4, 64, 16, 4
SM_SCALE = 0.2


class Batch:
    """A batch whose latents were appended to a cache with page ids drawn at random."""

    def __init__(
        self, qo_lens: tuple[int, ...], kv_lens: tuple[int, ...], device: str = "cpu", num_pages: int = 24
    ) -> None:
        self.qo_lens, self.kv_lens = qo_lens, kv_lens
        rows, keys = sum(qo_lens), sum(kv_lens)
        self.q_nope, self.q_pe = torch.randn(rows, HEADS, CKV), torch.randn(rows, HEADS, KPE)
        self.latents, self.rotary = torch.randn(keys, CKV), torch.randn(keys, KPE)
        pages = [-(-n // PAGE) for n in kv_lens]
        self.qo_indptr, self.kv_indptr = int32(indptr(qo_lens)), int32(indptr(pages))
        self.kv_indices = torch.randperm(num_pages)[: sum(pages)].int()
        self.kv_len_arr = int32(kv_lens)
        self.ckv, self.kpe = (torch.full((num_pages, PAGE, dim), math.nan) for dim in (CKV, KPE))
        last = int32([n - (p - 1) * PAGE if p else 0 for n, p in zip(kv_lens, pages, strict=True)])
        whose, places = flashinfer.get_batch_indices_positions(int32(indptr(kv_lens)), self.kv_len_arr, keys)
        flashinfer.append_paged_mla_kv_cache(
            self.latents, self.rotary, whose, places, self.ckv, self.kpe, self.kv_indices, self.kv_indptr, last
        )
        self.device = device

    @property
    def metadata(self) -> tuple[torch.Tensor, ...]:
        return self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_len_arr

    def metadata_to(self, device: str) -> None:
        self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_len_arr = (t.to(device) for t in self.metadata)

    def tensors(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        return tuple(t.to(self.device, dtype) for t in (self.q_nope, self.q_pe, self.ckv, self.kpe))

    def oracle(self, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, base-2 lse) in float64."""
        q, keys = torch.cat([self.q_nope, self.q_pe], -1), torch.cat([self.latents, self.rotary], -1)
        rows, ends = indptr(self.qo_lens), indptr(self.kv_lens)
        parts = [
            attention(
                q[rows[r] : rows[r + 1]], keys[ends[r] : ends[r + 1], None], self.latents[ends[r] : ends[r + 1], None],
                causal=causal, sm_scale=SM_SCALE,
            )
            for r in range(len(self.qo_lens))
        ]  # fmt: skip
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def wrapper(device: str = "cpu", **options: Any) -> mla.BatchMLAPagedAttentionWrapper:
    return mla.BatchMLAPagedAttentionWrapper(torch.empty(0, dtype=torch.uint8, device=device), **options)


def plan(wrapped: Any, batch: Batch, causal: bool = True, dtype: Any = "float32", **changed: Any) -> None:
    options = {"sm_scale": SM_SCALE, "q_data_type": dtype, "kv_data_type": dtype} | changed
    wrapped.plan(*batch.metadata, HEADS, CKV, KPE, PAGE, causal, **options)


def assert_close(
    got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor], error: float = 1e-5
) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=error, atol=error)


@pytest.mark.parametrize("backend", ["auto", "fa3", "triton"])
@pytest.mark.parametrize("causal", [True, False])
def test_plan_and_run(causal: bool, backend: str) -> None:
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is chosen at import, and this machine has a GPU")
    wrapped = wrapper(backend=backend)
    # The second and third batch: as many requests and fewer; the same plan and another.
    for lens in (((1, 3, 0, 5), (9, 7, 2, 4)), ((2, 2, 1, 1), (30, 2, 0, 4)), ((1,), (17,))):
        batch = Batch(*lens)
        plan(wrapped, batch, causal)
        out, lse = wrapped.run(*batch.tensors(), return_lse=True)
        assert_close((out, lse), batch.oracle(causal))
        assert_close((wrapped.run(*batch.tensors()), lse), batch.oracle(causal))
    natural = wrapped.run(*batch.tensors(), return_lse=True, return_lse_base_on_e=True)[1]
    torch.testing.assert_close(natural, lse * math.log(2.0))


def test_buffers_of_the_caller() -> None:
    batch = Batch((1, 1), (9, 3))
    wrapped = wrapper()
    plan(wrapped, batch)
    out, lse = torch.empty(2, HEADS, CKV), torch.empty(2, HEADS)
    got = wrapped.run(*batch.tensors(), out, lse, True)
    assert got[0] is out
    assert got[1] is lse
    assert_close(got, batch.oracle(True))


def test_cuda_graph_buffers_hold_what_was_planned() -> None:
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 3, 24, 2)]
    names = "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"
    wrapped = wrapper(use_cuda_graph=True, **dict(zip(names, buffers, strict=True)))
    for lens in ((9, 3), (0, 60)):
        batch = Batch((1, 1), lens)
        plan(wrapped, batch)
        assert torch.equal(buffers[1], batch.kv_indptr)
        assert_close(wrapped.run(*batch.tensors(), return_lse=True), batch.oracle(True))
    assert wrapped.is_cuda_graph_enabled
    with pytest.raises(ValueError, match="qo_indptr: got 2 values, want the 3 of the buffer"):
        plan(wrapped, Batch((1,), (4,)))
    with pytest.raises(ValueError, match="kv_indices: got None, want a buffer"):
        wrapper(use_cuda_graph=True, qo_indptr=buffers[0], kv_indptr=buffers[1])


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"kv_data_type": "float16"}, NotImplementedError, "kv_data_type: got torch.float16, want torch.float32"),
        ({"use_profiler": True}, NotImplementedError, "use_profiler: got True, want False"),
        ({"sm_scale": None}, TypeError, "sm_scale: got None, want a number"),
    ],
)
def test_what_plan_refuses(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        plan(wrapper(), Batch((1,), (4,)), **changed)


def test_what_run_refuses() -> None:
    batch, wrapped = Batch((1,), (4,)), wrapper()
    with pytest.raises(RuntimeError, match="run: got no plan"):
        wrapped.run(*batch.tensors())
    plan(wrapped, batch)
    with pytest.raises(NotImplementedError, match="page_table: got a tensor, want None"):
        wrapped.run(*batch.tensors(), page_table=torch.zeros(1, 1))
    with pytest.raises(NotImplementedError, match=r"ckv_scale: got 0\.5, want None or 1"):
        wrapped.run(*batch.tensors(), ckv_scale=0.5)
    with pytest.raises(TypeError, match="ckv: got dtype"):
        wrapped.run(*batch.tensors()[:2], batch.ckv.half(), batch.kpe)
    with pytest.raises(NotImplementedError, match="BatchMLAPagedAttentionWrapper takes its place"):
        mla.trtllm_batch_decode_with_kv_cache_mla()


def test_fewer_keys_than_pages_hold() -> None:
    """A last page without keys is taken off, as by the other wrappers; more are an error."""
    batch, wrapped = Batch((1, 1), (9, 4)), wrapper()
    short = Batch((1, 1), (8, 4))
    short.q_nope, short.q_pe, short.ckv, short.kpe = batch.q_nope, batch.q_pe, batch.ckv, batch.kpe
    short.latents, short.rotary = (x[[*range(8), *range(9, 13)]] for x in (batch.latents, batch.rotary))
    batch.kv_len_arr = int32([8, 4])
    plan(wrapped, batch)
    assert_close(wrapped.run(*batch.tensors(), return_lse=True), short.oracle(True))
    batch.kv_len_arr = int32([3, 4])
    with pytest.raises(ValueError, match="last_page_len"):
        plan(wrapped, batch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_no_sync_and_replays_follow_later_plans(where: str) -> None:
    names = "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"
    batches = [Batch((1, 1, 1), lens, "cuda") for lens in ((9, 2, 5), (0, 1, 60), (40, 40, 3))]
    for batch in batches:
        batch.metadata_to(where)
    first = [t.clone() for t in batches[0].tensors(torch.float16)]
    buffers = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (4, 4, 24, 3)]
    wrapped = wrapper("cuda", use_cuda_graph=True, **dict(zip(names, buffers, strict=True)))
    plan(wrapped, batches[0], dtype="float16")
    out = torch.empty_like(first[0])
    wrapped.run(*first, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapped.run(*first, out=out)
    for batch in batches:
        loaded = batch.tensors(torch.float16)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for kept, new in zip(first, loaded, strict=True):
                kept.copy_(new)
            plan(wrapped, batch, dtype="float16")
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(out.cpu().double(), batch.oracle(True)[0], rtol=1e-2, atol=1e-2)

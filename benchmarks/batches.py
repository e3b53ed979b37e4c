"""Batches of attention as tensors, ragged or over pages in random order, and rows of the right answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.workloads import attention_flops
from evenshare import plan_attention
from evenshare.attention.plan import AttentionPlan

MAX_ERROR = 1e-2  # bf16 output and probabilities round to 2^-9 each


@dataclass(frozen=True)
class Shape:
    """What one call of attention computes; query and key tokens of each request."""

    qo_lens: Sequence[int]
    kv_lens: Sequence[int]
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 0  # 0: ragged keys
    causal: bool = True

    @property
    def flops(self) -> int:
        return attention_flops(self.qo_lens, self.kv_lens, self.num_qo_heads, self.head_dim, self.causal)

    @property
    def kv_bytes(self) -> int:
        """K and V in 16 bits, each once."""
        return sum(self.kv_lens) * 2 * self.num_kv_heads * self.head_dim * 2

    @property
    def label(self) -> str:
        """Heads and pages."""
        pages = f", page {self.page_size}" if self.page_size else ""
        return f"{self.num_qo_heads}/{self.num_kv_heads} heads{pages}"


@dataclass(frozen=True)
class Batch:
    """A shape's tensors; metadata on the host."""

    shape: Shape
    q: torch.Tensor  # [total_q, Hq, D]
    k: torch.Tensor  # [total_kv, Hkv, D], or pages [num_pages, page_size, Hkv, D]
    v: torch.Tensor
    qo_indptr: torch.Tensor  # int32 [B + 1]
    kv_indptr: torch.Tensor  # of tokens, or of pages
    kv_indices: torch.Tensor | None = None
    last_page_len: torch.Tensor | None = None

    def plan(self, on_host: bool = False, **options: Any) -> AttentionPlan:
        """The batch's plan, from metadata on the GPU unless `on_host`; options of `plan_attention`."""
        shape, device = self.shape, self.q.device
        pages = {"kv_indices": self.kv_indices, "last_page_len": self.last_page_len} if shape.page_size else {}
        metadata = {"kv_indptr": self.kv_indptr, **pages}
        if any(length != 1 for length in shape.qo_lens):
            metadata["qo_indptr"] = self.qo_indptr
        return plan_attention(
            num_qo_heads=shape.num_qo_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.page_size or None,
            causal=shape.causal,
            dtype=self.q.dtype,
            max_q_rows=self.q.shape[0],
            max_kv_len=max(shape.kv_lens),
            device=device,
            **{name: t if on_host or t is None else t.to(device) for name, t in metadata.items()},
            **options,
        )

    def run_call(self, plan: AttentionPlan) -> Callable[[], torch.Tensor]:
        """A run of the plan into an output that begins as NaN, so that what is left unwritten shows."""
        out = torch.full_like(self.q, float("nan"))
        return lambda: plan.run(self.q, self.k, self.v, out=out)

    def paged(self, page_size: int) -> Batch:
        """The same keys in pages that lie in random order."""
        shape, device = replace(self.shape, page_size=page_size), self.q.device
        lengths = torch.tensor(shape.kv_lens, dtype=torch.int32)
        num_pages = (lengths + page_size - 1) // page_size
        kv_indptr = indptr(num_pages)
        pages = torch.randperm(int(kv_indptr[-1]), dtype=torch.int32)
        request = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        place = torch.arange(len(request)) - self.kv_indptr[request]
        page = pages[kv_indptr[request] + place // page_size].long()
        slot = (page * page_size + place % page_size).to(device)

        def scatter(side: torch.Tensor) -> torch.Tensor:
            # What is behind a request's last key is anything, as in a cache that was used before.
            cache = torch.randn(pages.numel() * page_size, *side.shape[1:], dtype=side.dtype, device=device)
            cache[slot] = side
            return cache.view(-1, page_size, *side.shape[1:])

        return replace(
            self,
            shape=shape,
            k=scatter(self.k),
            v=scatter(self.v),
            kv_indptr=kv_indptr,
            kv_indices=pages,
            last_page_len=lengths - (num_pages - 1) * page_size,
        )

    def select(self, begin: int, end: int) -> Batch:
        """The requests [begin, end) over the same pages, as a batch of their own."""
        assert self.last_page_len is not None
        shape = replace(self.shape, qo_lens=self.shape.qo_lens[begin:end], kv_lens=self.shape.kv_lens[begin:end])
        qo_indptr = self.qo_indptr[begin : end + 1]
        first, last = int(qo_indptr[0]), int(qo_indptr[-1])
        return replace(
            self,
            shape=shape,
            q=self.q[first:last],
            qo_indptr=qo_indptr - first,
            kv_indptr=self.kv_indptr[begin : end + 1],
            last_page_len=self.last_page_len[begin:end],
        )

    def gather(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [L, Hkv, D] of one request."""
        begin, end = self.kv_indptr[request : request + 2].tolist()
        if self.kv_indices is None:
            return self.k[begin:end], self.v[begin:end]
        pages = self.kv_indices[begin:end].to(self.k.device, torch.int64)
        length = self.shape.kv_lens[request]
        return self.k[pages].flatten(0, 1)[:length], self.v[pages].flatten(0, 1)[:length]

    def dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """q, k, v [B, S, H, D] with the same values; None unless all requests are equal."""
        shape = self.shape
        if len(set(shape.qo_lens)) > 1 or len(set(shape.kv_lens)) > 1:
            return None
        batch = len(shape.qo_lens)
        if self.kv_indices is None:
            k, v = (side.unflatten(0, (batch, -1)) for side in (self.k, self.v))
        else:
            k, v = (torch.stack(side) for side in zip(*map(self.gather, range(batch)), strict=True))
        return self.q.unflatten(0, (batch, -1)), k, v

    def sampled(self) -> list[tuple[int, int]]:
        """(request, row) of the first, a middle and the last row of the first, a middle and the last request."""
        requests = range(len(self.shape.qo_lens))
        return [(r, row) for r in _ends(len(requests)) for row in _ends(self.shape.qo_lens[r])]

    def sampled_tokens(self) -> torch.Tensor:
        """Places of the sampled rows in q, on its device."""
        return torch.tensor([int(self.qo_indptr[r]) + row for r, row in self.sampled()], device=self.q.device)

    def reference(self) -> torch.Tensor:
        """float64 [sampled rows, Hq, D]: the right answer where `sampled` says."""
        shape = self.shape
        rows = []
        for request, row in self.sampled():
            k, v = self.gather(request)
            visible = shape.kv_lens[request] - shape.qo_lens[request] + row + 1 if shape.causal else k.shape[0]
            q = self.q[int(self.qo_indptr[request]) + row].double().unflatten(0, (shape.num_kv_heads, -1))
            scores = torch.einsum("hgd,lhd->hgl", q, k[:visible].double()) * shape.head_dim**-0.5
            rows.append(torch.einsum("hgl,lhd->hgd", scores.softmax(-1), v[:visible].double()).flatten(0, 1))
        return torch.stack(rows)


def make_batch(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Batch:
    """Normally distributed q, k, v."""
    qo_indptr, kv_indptr = indptr(shape.qo_lens), indptr(shape.kv_lens)
    q = torch.randn(int(qo_indptr[-1]), shape.num_qo_heads, shape.head_dim, dtype=dtype, device=device)
    keys = (int(kv_indptr[-1]), shape.num_kv_heads, shape.head_dim)
    k, v = (torch.randn(keys, dtype=dtype, device=device) for _ in range(2))
    batch = Batch(replace(shape, page_size=0), q, k, v, qo_indptr, kv_indptr)
    return batch.paged(shape.page_size) if shape.page_size else batch


def indptr(lengths: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """int32 [B + 1]: the prefix sums of [B]."""
    return torch.nn.functional.pad(torch.as_tensor(lengths).cumsum(0, dtype=torch.int32), (1, 0))


def _ends(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1}) if count else []

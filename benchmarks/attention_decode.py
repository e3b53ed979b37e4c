"""Paged decode: one query token a request over pages of 1 or 16 keys, D = 128, bf16, against the card's read bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import harness, peers
from evenshare import plan_attention

HEAD_DIM = 128
MAX_ERROR = 1e-2  # bf16 output and probabilities round to 2^-9 each


@dataclass(frozen=True)
class Case:
    name: str
    lengths: list[int]
    page_size: int
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    target: float | None = None  # share of the read ceiling

    @property
    def title(self) -> str:
        return f"{self.num_qo_heads}/{self.num_kv_heads} heads, page {self.page_size}, {self.name}"

    @property
    def bytes(self) -> int:
        """K and V, each once; q, out and the page table, a thousandth of that, are not counted."""
        return sum(self.lengths) * 2 * self.num_kv_heads * HEAD_DIM * 2


CASES = [
    Case("B=64 L=8192", [8192] * 64, 1, target=0.90),
    Case("B=64 L=8192", [8192] * 64, 16, target=0.90),
    Case("B=16 L=1024", [1024] * 16, 16),
    Case("B=16 L=8192", [8192] * 16, 16),
    Case("B=1 L=131072", [131072], 1),
    Case("B=1 L=131072", [131072], 16),
    Case("64k + 15x256", [65536] + [256] * 15, 16),
    Case("B=64 L=8192", [8192] * 64, 16, num_qo_heads=28, num_kv_heads=4),
    Case("B=16 L=1024", [1024] * 16, 1, num_qo_heads=28, num_kv_heads=4),
]


@dataclass(frozen=True)
class Batch:
    """A case's tensors: NHD pages in random order, metadata on the host."""

    q: torch.Tensor  # [B, Hq, D]
    k_cache: torch.Tensor  # [pages, page_size, Hkv, D]
    v_cache: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor


def make_batch(case: Case, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Batch:
    num_pages = torch.tensor([-(-length // case.page_size) for length in case.lengths], dtype=torch.int32)
    kv_indptr = torch.zeros(len(case.lengths) + 1, dtype=torch.int32)
    kv_indptr[1:] = num_pages.cumsum(0)
    total = int(kv_indptr[-1])
    last_page_len = torch.tensor(case.lengths, dtype=torch.int32) - (num_pages - 1) * case.page_size
    pages = (total, case.page_size, case.num_kv_heads, HEAD_DIM)
    k_cache, v_cache = (torch.randn(pages, dtype=dtype, device=device) for _ in range(2))
    q = torch.randn(len(case.lengths), case.num_qo_heads, HEAD_DIM, dtype=dtype, device=device)
    return Batch(q, k_cache, v_cache, kv_indptr, torch.randperm(total, dtype=torch.int32), last_page_len)


def gather(batch: Batch, case: Case, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [L, Hkv, D] of one request."""
    begin, end = batch.kv_indptr[request : request + 2].tolist()
    pages = batch.kv_indices[begin:end].to(batch.q.device, torch.int64)
    length = case.lengths[request]
    return batch.k_cache[pages].flatten(0, 1)[:length], batch.v_cache[pages].flatten(0, 1)[:length]


def reference(batch: Batch, case: Case, request: int) -> torch.Tensor:
    """[Hq, D] of one request in float64, one KV head at a time."""
    k, v = gather(batch, case, request)
    group = case.num_qo_heads // case.num_kv_heads
    rows = []
    for head, q in enumerate(batch.q[request].double().split(group)):
        weights = torch.softmax(q @ k[:, head].double().T * HEAD_DIM**-0.5, dim=-1)
        rows.append(weights @ v[:, head].double())
    return torch.cat(rows)


def dense_peer(name: str, batch: Batch, case: Case) -> Callable[[], torch.Tensor] | None:
    """Attention over the same keys laid out densely, which is easier work; for equal lengths."""
    if len(set(case.lengths)) > 1 or not (name.startswith("sdpa") or name == "flex"):
        return None
    gathered = [gather(batch, case, request) for request in range(len(case.lengths))]
    k, v = (torch.stack(side) for side in zip(*gathered, strict=True))
    call = peers.attention(name, batch.q[:, None], k, v)
    return call and (lambda: call()[:, 0])


def measure(bench: harness.Bench, case: Case) -> None:
    """The case's time, its share of the read ceiling, and what planning takes."""
    batch = make_batch(case, bench.device)
    metadata = {name: getattr(batch, name).to(bench.device) for name in ("kv_indptr", "kv_indices", "last_page_len")}
    plan = plan_attention(
        num_qo_heads=case.num_qo_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=HEAD_DIM,
        page_size=case.page_size,
        dtype=batch.q.dtype,
        **metadata,
    )
    out = torch.full_like(batch.q, float("nan"))
    requests = sorted({0, len(case.lengths) // 2, len(case.lengths) - 1})
    row = bench.compare(
        case.title,
        lambda: plan.run(batch.q, batch.k_cache, batch.v_cache, out=out),
        lambda name: (
            dense_peer(name, batch, case)
            or peers.paged_decode(
                name,
                batch.q,
                batch.k_cache,
                batch.v_cache,
                batch.kv_indptr,
                batch.kv_indices,
                batch.last_page_len,
            )
        ),
        torch.stack([reference(batch, case, request) for request in requests]),
        MAX_ERROR,
        sample=lambda output: output[requests],
        flops=4 * sum(case.lengths) * case.num_qo_heads * HEAD_DIM,
        bytes=case.bytes,
    )
    plan.check()
    bench.add_ratio(row, "read_tb_s", target=case.target)
    bench.add_time(f"{case.title}, plan", plan.update)


def fill(bench: harness.Bench) -> None:
    for case in CASES:
        measure(bench, case)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    harness.run("attention_decode", __doc__, fill)

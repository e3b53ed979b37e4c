"""Paged decode: one query token a request (four where it is speculative) over pages in random order, D = 128, bf16, against the
card's read bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks import harness, peers
from benchmarks.batches import MAX_ERROR, Batch, Shape, make_batch
from benchmarks.results import Row
from benchmarks.workloads import LONG_TAIL, MEAN_1024, const

USUAL_PEERS = ("sdpa-cudnn", "sdpa-flash", "flashinfer")  # flex compiles for seconds a shape
LARGE_KV = 512e6  # bytes from which on bandwidth alone counts
READ_SHARE = 0.94  # of the read ceiling that a large cache is to reach
FP8_SPEED = 1.8  # of a large cache in fp8, against 16 bits
FP8_MAX_ERROR = 4e-2  # probabilities round to e4m3 too


@dataclass(frozen=True)
class Case:
    name: str
    shape: Shape
    target: float | None = None  # TB/s
    fp8: bool = False  # over a cache in fp8 too

    @property
    def title(self) -> str:
        return f"{self.shape.label}, {self.name}"


def case(
    name: str,
    lengths: list[int],
    heads: tuple[int, int] = (32, 8),
    page_size: int = 16,
    rows: int = 1,
    target: float | None = None,
    fp8: bool = False,
) -> Case:
    """lengths: keys of each request; rows: query tokens of each."""
    return Case(name, Shape(const(rows, len(lengths)), lengths, *heads, page_size=page_size), target, fp8)


TARGETS = {"const 1024": 2.4, "U(512,1024)": 2.0, "zipf 1024": 2.4, "64k + 15x256": 3.8, "const 8192": 4.0}
SIXTEEN = {**MEAN_1024, **LONG_TAIL, "const 8192": const(8192, 16)}
CASES = [
    *(case(f"B=16 {name}", lengths, (64, 8), target=TARGETS[name]) for name, lengths in SIXTEEN.items()),
    *(case("B=64 L=8192", const(8192, 64), page_size=page_size, fp8=True) for page_size in (1, 16, 64, 256)),
    *(case("B=1 L=131072", [131072], page_size=page_size) for page_size in (1, 16)),
    case("B=256 L=2048", const(2048, 256)),
    case("B=16 L=1024", const(1024, 16)),
    case("B=16 L=8192", const(8192, 16), fp8=True),
    case("B=16 64k + 15x256", LONG_TAIL["64k + 15x256"]),
    case("B=64 L=8192", const(8192, 64), (32, 1)),
    case("B=64 L=8192", const(8192, 64), (28, 4)),
    case("B=16 L=1024", const(1024, 16), (28, 4), page_size=1),
    case("B=64 L=8192", const(8192, 64), (16, 1)),
    case("B=16 L=8192", const(8192, 16), (32, 32)),
    case("B=64 L=8192, 4 rows", const(8192, 64), rows=4),
    case("B=16 L=1024, 4 rows", const(1024, 16), rows=4),
]


def dense_peer(name: str, batch: Batch) -> Callable[[], torch.Tensor] | None:
    """Attention over the same keys laid out densely, which is easier work; one row a request, equal lengths."""
    if not (name.startswith("sdpa") or name == "flex") or max(batch.shape.qo_lens) > 1:
        return None
    dense = batch.dense()
    call = dense and peers.attention(name, *dense)
    return call and (lambda: call().flatten(0, 1))


def paged_peer(name: str, batch: Batch) -> Callable[[], torch.Tensor] | None:
    if max(batch.shape.qo_lens) > 1 or batch.kv_indices is None or batch.last_page_len is None:
        return None
    return peers.paged_decode(name, batch.q, batch.k, batch.v, batch.kv_indptr, batch.kv_indices, batch.last_page_len)


def measure(bench: harness.Bench, case: Case) -> None:
    """The case's time and what it reads per second."""
    batch = make_batch(case.shape, bench.device)
    plan = batch.plan()
    tokens = batch.sampled_tokens()
    row = bench.compare(
        case.title,
        batch.run_call(plan),
        lambda name: dense_peer(name, batch) or paged_peer(name, batch),
        batch.reference(),
        MAX_ERROR,
        sample=lambda output: output[tokens],
        flops=case.shape.flops,
        bytes=case.shape.kv_bytes,
    )
    plan.check()
    if case.target is not None:
        bench.add_rate(row, "TB/s", target=case.target)
    bench.add_ratio(row, "read_tb_s", target=READ_SHARE if case.shape.kv_bytes >= LARGE_KV else None)
    if case.fp8:
        measure_fp8(bench, case, batch, row)


def measure_fp8(bench: harness.Bench, case: Case, batch: Batch, bf16: Row) -> None:
    """The same batch over a cache in fp8, beside its time in bf16."""
    batch = replace(batch, k=batch.k.to(torch.float8_e4m3fn), v=batch.v.to(torch.float8_e4m3fn))
    plan = batch.plan(kv_dtype=torch.float8_e4m3fn)
    tokens = batch.sampled_tokens()
    row = bench.compare(
        f"{case.title}, fp8 cache",
        batch.run_call(plan),
        lambda name: None,
        batch.reference(),
        FP8_MAX_ERROR,
        sample=lambda output: output[tokens],
        flops=case.shape.flops,
        bytes=case.shape.kv_bytes // 2,
    )
    target = FP8_SPEED if case.shape.kv_bytes >= LARGE_KV else None
    title = f"{case.title}: speed, fp8 cache / bf16 cache"
    bench.add(Row(title, "x", "higher", bf16.ours / row.ours, "ratio", target=target, timing=row.timing))


def fill(bench: harness.Bench) -> None:
    bench.measure_all(CASES, measure)


if __name__ == "__main__":
    harness.run("attention_decode", __doc__, fill, USUAL_PEERS)

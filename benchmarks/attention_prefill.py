"""Prefill in bf16: dense against cuDNN; ragged and paged batches of uneven requests; tokens appended to a cache. TFLOP/s count the
visible (query, key) pairs alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks import harness, peers
from benchmarks.batches import MAX_ERROR, Batch, Shape, make_batch
from benchmarks.results import Row, geomean
from benchmarks.workloads import LONG_TAIL, MEAN_1024, const
from evenshare.attention.functions import attention

USUAL_PEERS = ("sdpa-cudnn", "sdpa-flash")
TOTAL_TOKENS = 16384
CUDNN_GEOMEAN = 1.08
RAGGED_TFLOPS = {"const 1024": 470, "U(512,1024)": 400, "zipf 1024": 540, "64k + 15x256": 640}
PAGED_SPEED = {16: 0.96, 64: 0.96, 1: 0.85}  # page size -> of the ragged batch's speed


@dataclass(frozen=True)
class Case:
    title: str
    shape: Shape
    timing: str = "graph"
    target: float | None = None  # ragged, append: TFLOP/s


def dense(
    length: int, causal: bool, *, head_dim: int = 128, heads: int = 16, batch: int = 0, timing: str = "events"
) -> Case:
    """Equal requests of `length` tokens, 16384 in all unless `batch` says how many."""
    lengths = const(length, batch or TOTAL_TOKENS // length)
    title = f"dense, D={head_dim}, {heads}/{heads} heads, S={length}, {'causal' if causal else 'full'}"
    return Case(title, Shape(lengths, lengths, heads, heads, head_dim, causal=causal), timing)


DENSE = [dense(length, causal) for causal in (False, True) for length in (1024, 2048, 4096, 8192, 16384)]
MORE_DENSE = [
    *(dense(512, causal, heads=8, batch=4, timing="graph") for causal in (False, True)),
    *(dense(8192, True, head_dim=head_dim) for head_dim in (64, 256)),
]
RAGGED = [
    Case(f"ragged, 32/8 heads, {name}", Shape(lengths, lengths), target=RAGGED_TFLOPS[name])
    for name, lengths in {**MEAN_1024, **LONG_TAIL}.items()
]
APPEND = [
    Case(
        f"append, 32/8 heads, page 16, {batch} x 512 on 8192",
        Shape(const(512, batch), const(8704, batch), page_size=16),
    )
    for batch in (1, 8)
]


def compare(bench: harness.Bench, case: Case, batch: Batch, ours: harness.Call, **variants: harness.Call) -> Row:
    """One row in microseconds, beside dense peers where the requests are equal."""
    tokens = batch.sampled_tokens()
    tensors = batch.dense() if case.shape.qo_lens == case.shape.kv_lens else None

    def sample(output: torch.Tensor) -> torch.Tensor:
        return (output.flatten(0, 1) if output.dim() == 4 else output)[tokens]

    return bench.compare(
        case.title,
        ours,
        lambda name: peers.attention(name, *tensors, causal=case.shape.causal) if tensors else None,
        batch.reference(),
        MAX_ERROR,
        variants=variants,
        sample=sample,
        timing=case.timing,
        flops=case.shape.flops,
    )


def measure_dense(bench: harness.Bench, case: Case) -> Row:
    """Against cuDNN, or flash attention where cuDNN cannot. By events it is `evenshare.attention` itself, by a graph a plan."""
    batch = make_batch(case.shape, bench.device)
    if case.timing == "graph":
        plan = batch.plan()
        row = compare(bench, case, batch, batch.run_call(plan))
        plan.check()
    else:
        tensors = batch.dense()
        assert tensors is not None
        out = torch.full_like(tensors[0], float("nan"))
        causal = case.shape.causal
        row = compare(bench, case, batch, lambda: attention(*tensors, causal=causal, out=out))
    peer = next((name for name in USUAL_PEERS if name in row.peers), "")
    bench.add_speed(row, "ours", peer, target=1.0)
    return row


def measure_ragged(bench: harness.Bench, case: Case) -> None:
    """Ragged keys, and the same keys in pages, in turn."""
    ragged = make_batch(case.shape, bench.device)
    batches = {"ours": ragged, **{f"page {size}": ragged.paged(size) for size in PAGED_SPEED}}
    plans = {name: batch.plan() for name, batch in batches.items()}
    row = compare(bench, case, ragged, **{name: batches[name].run_call(plan) for name, plan in plans.items()})
    for plan in plans.values():
        plan.check()
    bench.add_rate(row, "TFLOP/s", target=case.target)
    for size, target in PAGED_SPEED.items():
        bench.add_speed(row, f"page {size}", "ours", target=target)


def measure_append(bench: harness.Bench, case: Case) -> None:
    batch = make_batch(case.shape, bench.device)
    plan = batch.plan()
    row = compare(bench, case, batch, batch.run_call(plan))
    plan.check()
    bench.add_rate(row, "TFLOP/s", target=case.target)


def fill(bench: harness.Bench) -> None:
    leads: list[float] = []

    def against_cudnn(bench: harness.Bench, case: Case) -> None:
        row = measure_dense(bench, case)
        leads.extend(us / row.ours for name, us in row.peers.items() if name == "sdpa-cudnn")

    bench.measure_all(DENSE, against_cudnn)
    if len(leads) == len(DENSE):
        case = f"dense, D=128, {len(leads)} shapes: speed, ours / sdpa-cudnn"
        bench.add(Row(case, "x", "higher", geomean(leads), "geomean", target=CUDNN_GEOMEAN))
    bench.measure_all(MORE_DENSE, measure_dense)
    bench.measure_all(RAGGED, measure_ragged)
    bench.measure_all(APPEND, measure_append)


if __name__ == "__main__":
    harness.run("attention_prefill", __doc__, fill, USUAL_PEERS)

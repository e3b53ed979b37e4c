"""Chunks of prefill beside decodes, pages of 16, 32/8 heads: everything in one balanced launch, against a plan for each kind, one
after the other or on two streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import harness
from benchmarks.batches import MAX_ERROR, Batch, Shape, make_batch
from benchmarks.workloads import const

Launch = Callable[[], object]


@dataclass(frozen=True)
class Case:
    num_chunks: int
    chunk: int  # query tokens
    context: int  # keys before a chunk's own
    num_decodes: int
    decode_context: int

    @property
    def title(self) -> str:
        return f"{self.num_chunks} x {self.chunk} on {self.context} + {self.num_decodes} x 1 on {self.decode_context}"

    @property
    def shape(self) -> Shape:
        qo_lens = const(self.chunk, self.num_chunks) + const(1, self.num_decodes)
        kv_lens = const(self.context + self.chunk, self.num_chunks) + const(self.decode_context, self.num_decodes)
        return Shape(qo_lens, kv_lens, page_size=16)


CASES = [
    Case(2, 2048, 8192, 64, 4096),
    Case(1, 2048, 0, 64, 4096),
    Case(2, 512, 8192, 128, 4096),
    Case(1, 8192, 0, 256, 2048),
]


def in_turn(first: Launch, second: Launch) -> None:
    first()
    second()


def side_by_side(first: Launch, second: Launch) -> None:
    """The second on a stream of its own that begins and ends with the first's."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        second()
    first()
    current.wait_stream(side)


def two_plans(batch: Batch, num_chunks: int, launch: Callable[[Launch, Launch], None]) -> harness.Call:
    """A plan for the chunks and one for the decodes, which write into one output."""
    parts = batch.select(0, num_chunks), batch.select(num_chunks, len(batch.shape.qo_lens))
    chunks, decodes = (part.plan() for part in parts)
    out = torch.full_like(batch.q, float("nan"))
    outs = out.split([part.q.shape[0] for part in parts])

    def run() -> torch.Tensor:
        launch(
            lambda: chunks.run(parts[0].q, batch.k, batch.v, out=outs[0]),
            lambda: decodes.run(parts[1].q, batch.k, batch.v, out=outs[1]),
        )
        return out

    return run


def measure(bench: harness.Bench, case: Case) -> None:
    batch = make_batch(case.shape, bench.device)
    plan = batch.plan()
    tokens = batch.sampled_tokens()
    row = bench.compare(
        case.title,
        batch.run_call(plan),
        lambda name: None,
        batch.reference(),
        MAX_ERROR,
        variants={
            "two plans": two_plans(batch, case.num_chunks, in_turn),
            "two streams": two_plans(batch, case.num_chunks, side_by_side),
        },
        sample=lambda output: output[tokens],
        flops=case.shape.flops,
        bytes=case.shape.kv_bytes,
    )
    plan.check()
    for other in row.peers:
        bench.add_speed(row, "ours", other)


def fill(bench: harness.Bench) -> None:
    bench.measure_all(CASES, measure)


if __name__ == "__main__":
    harness.run("attention_mixed", __doc__, fill, ())

"""The scheduler's policies on batches of uneven requests, made up or from traces: simulated, and timed where there is a GPU.

`--simulate` needs no GPU: it plays the plans that an H200 would get. Its unit is an iteration, one block of keys of one tile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.batches import MAX_ERROR, Shape, indptr, make_batch
from benchmarks.results import Row, geomean, write_report
from benchmarks.workloads import LONG_TAIL, MEAN_1024, Trace, const, read_traces, uniform, zipf
from evenshare.attention.executors import Capacity, TritonExecutor
from evenshare.attention.metadata import Batch
from evenshare.attention.problem import Problem, default_scale
from evenshare.attention.tiles import TileConfig
from evenshare.device.target import Target
from evenshare.schedule import Costs, Plan, simulate
from evenshare.schedule.policies import POLICIES


@dataclass(frozen=True)
class Sizes:
    """What plans depend on of a GPU."""

    capability: tuple[int, int]
    num_sms: int


H200 = Sizes((9, 0), 132)
FLOPS_PER_BYTE = 185  # an H200's bf16 peak over its read bandwidth, about 800 TFLOP/s and 4.3 TB/s
PREFILL_TOKENS, DECODE_BATCH = 16384, 64  # of a batch from a trace


@dataclass(frozen=True)
class Case:
    phase: str  # "prefill" or "decode"
    name: str
    shape: Shape

    @property
    def title(self) -> str:
        return f"{self.phase}, {self.name}"


def make_cases(traces: Sequence[Trace]) -> list[Case]:
    """32/8 heads, D = 128, causal; prefill is ragged, decode runs over pages of 16."""
    prompts = {**MEAN_1024, **{trace.name: trace.prefill(PREFILL_TOKENS) for trace in traces}}
    contexts = {
        "const 4096": const(4096, DECODE_BATCH),
        "U(1,8192)": uniform(1, 8192, DECODE_BATCH),
        "zipf 4096": zipf(4096, DECODE_BATCH),
        **LONG_TAIL,
        **{trace.name: trace.decode(DECODE_BATCH) for trace in traces},
    }
    return [
        *(Case("prefill", name, Shape(lengths, lengths)) for name, lengths in prompts.items()),
        *(
            Case("decode", name, Shape(const(1, len(lengths)), lengths, page_size=16))
            for name, lengths in contexts.items()
        ),
    ]


def make_executor(shape: Shape, policy: str | None, sizes: Sizes) -> TritonExecutor:
    """What `plan_attention` makes on a GPU of these sizes, here on the host."""
    dim = shape.head_dim
    problem = Problem(
        shape.num_qo_heads,
        shape.num_kv_heads,
        dim,
        dim,
        torch.bfloat16,
        shape.page_size,
        shape.causal,
        sm_scale=default_scale(dim),
    )
    target = Target("triton", torch.device("cpu"), sizes.num_sms, sizes.capability, interpreted=False)
    return TritonExecutor(
        problem, Capacity(len(shape.qo_lens), sum(shape.qo_lens), max(shape.kv_lens)), target, policy, "host"
    )


def make_schedule(shape: Shape, policy: str, sizes: Sizes) -> Plan:
    """Who computes which blocks of keys; pages change nothing about that."""
    executor = make_executor(shape, policy, sizes)
    executor.plan(Batch("ragged", indptr(shape.qo_lens), indptr(shape.kv_lens)))
    assert executor.schedule is not None
    return executor.schedule


def estimate_costs(problem: Problem, tile: TileConfig) -> Costs:
    """What storing or merging a partial takes, relative to an iteration: by bytes, or by arithmetic where that takes longer.

    A segment's prologue and epilogue cost an iteration.
    """
    dims = problem.head_dim + problem.head_dim_v
    iteration = tile.block_n * max(2 * dims, 2 * tile.block_m * dims / FLOPS_PER_BYTE)
    partial_bytes = 4 * tile.block_m * (problem.head_dim_v + 1)
    return Costs(segment=1.0, store=partial_bytes / iteration, merge=partial_bytes / iteration)


def simulate_case(case: Case, sizes: Sizes) -> Row:
    """Makespans of all policies; "ours" is the default."""
    executor = make_executor(case.shape, None, sizes)
    costs = estimate_costs(executor.problem, executor.tile)
    spans = {name: simulate(make_schedule(case.shape, name, sizes), costs).makespan for name in POLICIES}
    own = spans.pop(executor.policy)
    return Row(f"{case.title}, {executor.policy}", "iterations", "lower", own, peers=spans, timing="simulated")


def measure(bench: harness.Bench, case: Case, sizes: Sizes) -> None:
    """Time of a run under every policy, planned on the host, in turn."""
    default = make_executor(case.shape, None, sizes).policy
    batch = make_batch(case.shape, bench.device)
    calls = {name: batch.run_call(batch.plan(on_host=True, policy=name)) for name in POLICIES}
    tokens = batch.sampled_tokens()
    bench.compare(
        f"{case.title}, {default}",
        calls.pop(default),
        lambda name: None,
        batch.reference(),
        MAX_ERROR,
        variants=calls,
        sample=lambda output: output[tokens],
        flops=case.shape.flops,
        bytes=case.shape.kv_bytes,
    )


def summarise(rows: Sequence[Row]) -> list[Row]:
    """For each phase, timing and default: time over the best policy's, geometric means over the batches."""

    def key(row: Row) -> tuple[str, str, str]:
        return row.case.partition(",")[0], row.case.rpartition(", ")[2], row.timing

    found = []
    for (phase, default, timing), group in groupby(sorted(rows, key=key), key):
        ratios: dict[str, list[float]] = {}
        for row in group:
            times = {**row.peers, "ours": row.ours}
            for name, time in times.items():
                ratios.setdefault(name, []).append(time / min(times.values()))
        means = {name: geomean(values) for name, values in ratios.items()}
        case = f"{phase}, time / the best policy's, {default}"
        found.append(Row(case, "x", "lower", means.pop("ours"), "geomean", peers=means, timing=timing))
    return found


def show_policies(console: Console, rows: Sequence[Row]) -> None:
    """One line a batch, one column a policy; the default is marked."""
    table = Table("case", "unit", *POLICIES, title="policies, * by default")
    for row in rows:
        case, _, default = row.case.rpartition(", ")
        times = {**row.peers, default: row.ours}
        cells = [f"{times[name]:.4g}" + "*" * (name == default) for name in POLICIES]
        unit = f"{row.unit}, simulated" if row.timing == "simulated" and row.unit == "x" else row.unit
        table.add_row(case, unit, *cells)
    console.print(table)


def fill(bench: harness.Bench, cases: Sequence[Case]) -> None:
    properties = torch.cuda.get_device_properties(bench.device)
    sizes = Sizes((properties.major, properties.minor), properties.multi_processor_count)
    for case in cases:
        if bench.wants(case.title):
            bench.add(simulate_case(case, sizes))
    bench.measure_all(cases, partial(measure, sizes=sizes))
    bench.rows += summarise(bench.rows)
    show_policies(bench.console, bench.rows)


def simulate_all(cases: Sequence[Case], options: argparse.Namespace) -> int:
    """The part that needs no GPU."""
    rows = [simulate_case(case, H200) for case in cases if options.only in case.title]
    rows += summarise(rows)
    console = harness.make_console()
    show_policies(console, rows)
    if not options.only or options.out:
        report = harness.make_report("policies", f"simulated, {H200.num_sms} SMs", {}, rows)
        console.print(f"written: {write_report(report, options.out)}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if done, 1 if a case failed, 2 if it cannot run here."""
    parser = harness.make_parser("policies", __doc__)
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", help="request lengths, .csv or .jsonl (Azure's, Mooncake's)"
    )
    parser.add_argument("--simulate", action="store_true", help="only what needs no GPU")
    options = parser.parse_args(arguments)
    try:
        cases = make_cases(read_traces(options.traces) if options.traces else [])
    except ValueError as error:
        harness.make_console().print(str(error), style="red", markup=False)
        return 2
    if options.simulate:
        return simulate_all(cases, options)
    return harness.measure("policies", options, partial(fill, cases=cases), ())


if __name__ == "__main__":
    sys.exit(main())

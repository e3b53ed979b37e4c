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
from benchmarks.batches import MAX_ERROR, Shape, make_batch
from benchmarks.results import Row, geomean, write_report
from benchmarks.workloads import LONG_TAIL, MEAN_1024, Trace, const, read_traces, uniform, zipf
from evenshare.attention.executors import TILE_OVERHEAD
from evenshare.attention.metadata import make_batch as make_metadata
from evenshare.attention.problem import Problem, default_scale
from evenshare.attention.tiles import TileConfig, choose_tile, max_row_tiles, tile_table
from evenshare.schedule import Costs, RaggedSpace, make_plan, simulate
from evenshare.schedule.policies import POLICIES

H200 = ((9, 0), 132)  # compute capability, SMs
FLOPS_PER_BYTE = 185  # an H200's bf16 peak over its read bandwidth, about 800 TFLOP/s and 4.3 TB/s
PREFILL_TOKENS, DECODE_BATCH = 32768, 64  # of a batch from a trace


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


def choose(shape: Shape, capability: tuple[int, int]) -> tuple[Problem, TileConfig]:
    """The problem and the tile that `plan_attention` takes for it."""
    heads, dim = (shape.num_qo_heads, shape.num_kv_heads), shape.head_dim
    problem = Problem(*heads, dim, dim, torch.bfloat16, 0, shape.causal, sm_scale=default_scale(dim))
    return problem, choose_tile(problem, sum(shape.qo_lens) / len(shape.qo_lens), capability)


def make_space(shape: Shape, problem: Problem, tile: TileConfig) -> RaggedSpace:
    """The shape's tiles and their blocks of keys, as the planner sees them."""
    qo_indptr, kv_indptr = (
        torch.nn.functional.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0), (1, 0)).int()
        for lengths in (shape.qo_lens, shape.kv_lens)
    )
    empty = dict.fromkeys(("kv_indices", "last_page_len", "block_table", "kv_lens"))
    batch = make_metadata(qo_indptr=qo_indptr, kv_indptr=kv_indptr, **empty)
    max_tiles = max_row_tiles(problem, tile, batch.size, sum(shape.qo_lens))
    _, iterations = tile_table(problem, tile, batch, max_tiles)
    return RaggedSpace(iterations, inner=tile.heads_per_row(problem), overhead=TILE_OVERHEAD)


def estimate_costs(problem: Problem, tile: TileConfig) -> Costs:
    """What storing or merging a partial takes, relative to an iteration: by bytes, or by arithmetic where that takes longer."""
    dims = problem.head_dim + problem.head_dim_v
    iteration = tile.block_n * max(2 * dims, 2 * tile.block_m * dims / FLOPS_PER_BYTE)
    partial_bytes = 4 * tile.block_m * (problem.head_dim_v + 1)
    return Costs(segment=TILE_OVERHEAD, store=partial_bytes / iteration, merge=partial_bytes / iteration)


def simulate_case(case: Case, capability: tuple[int, int], num_sms: int) -> Row:
    """Makespans of all policies; "ours" is the one that the tile asks for."""
    problem, tile = choose(case.shape, capability)
    space, costs = make_space(case.shape, problem, tile), estimate_costs(problem, tile)
    workers = num_sms * tile.workers_per_sm
    spans = {name: simulate(make_plan(space, name, workers), costs).makespan for name in POLICIES}
    own = spans.pop(tile.policy)
    return Row(f"{case.title}, {tile.policy}", "iterations", "lower", own, peers=spans, timing="simulated")


def measure(bench: harness.Bench, case: Case) -> None:
    """Time of a run under every policy, planned on the host, in turn."""
    capability = torch.cuda.get_device_capability(bench.device) if bench.device.type == "cuda" else H200[0]
    default = choose(case.shape, capability)[1].policy
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
    sizes = ((properties.major, properties.minor), properties.multi_processor_count)
    for case in cases:
        if bench.wants(case.title):
            bench.add(simulate_case(case, *sizes))
    bench.measure_all(cases, measure)
    bench.rows += summarise(bench.rows)
    show_policies(bench.console, bench.rows)


def simulate_all(cases: Sequence[Case], options: argparse.Namespace) -> int:
    """The part that needs no GPU."""
    rows = [simulate_case(case, *H200) for case in cases if options.only in case.title]
    rows += summarise(rows)
    console = harness.make_console()
    show_policies(console, rows)
    if not options.only or options.out:
        report = harness.make_report("policies", f"simulated, {H200[1]} SMs", {}, rows)
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

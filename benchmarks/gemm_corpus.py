"""The corpus of the Stream-K paper (arXiv 2301.03598, section 6) in bf16, out = a Wᵀ, against cuBLAS and against our own baselines.

32,824 shapes, m, n and k log-uniform in 128 to 8192 and rounded to multiples of 8; and a second corpus that is not rounded, whose
rows the copy engine cannot read. A stratified sample by default. Times are of a graph's replay with a cold L2, and every product
is checked.

Each shape's times go into gemm_corpus-DEVICE.csv beside the results as they are measured: a run that was stopped goes on where it
was.
"""

from __future__ import annotations

import csv
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
from rich.progress import track

from benchmarks import harness, timing
from benchmarks.peers import relative_error
from benchmarks.results import RESULTS, Row, geomean, percentile, slug
from evenshare import matmul
from evenshare.device.target import Target, select_target
from evenshare.gemm import hopper
from evenshare.gemm.costs import CostTable, costs_of
from evenshare.gemm.epilogue import Epilogue
from evenshare.schedule.uniform import uniform_plan

NUM_SHAPES, SAMPLE, SAMPLE_UNROUNDED = 32_824, 1_000, 100
SMALLEST, LARGEST = 128, 8192
SAMPLES = 11  # of a candidate on one shape
MAX_ERROR = 8e-3  # two roundings to bf16, ours and cuBLAS's
COMPUTE_BOUND = 400  # flop a byte
TARGETS = {
    "cublas": {"geomean": 0.95, "5 %": 0.75},
    "cublas, compute-bound": {"mean": 1.0, "least": 0.85},
    "data_parallel": {"mean": 1.1, "most": 4.0, "least": 0.97},
    "cublas, unrounded": {"geomean": 0.8},
}


@dataclass(frozen=True)
class Shape:
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def intensity(self) -> float:
        """Flop a byte, if all is read and written once."""
        return self.flops / (2 * (self.m * self.k + self.n * self.k + self.m * self.n))


@dataclass(frozen=True)
class Times(Shape):
    """Microseconds of one shape; NaN where a candidate does not take it."""

    ours: float
    cublas: float
    data_parallel: float = math.nan  # our largest tile, whole
    stream_k: float = math.nan  # the same tile, shares as the model wants them: the paper's one tile for each precision
    best_tile: float = math.nan  # the fastest of our tiles: what a perfect choice would reach


def corpus(multiple: int) -> list[Shape]:
    """All shapes, sizes rounded to multiples of `multiple`."""
    generator = torch.Generator().manual_seed(0)
    logs = torch.rand(NUM_SHAPES, 3, generator=generator, dtype=torch.float64) * math.log(LARGEST / SMALLEST)
    sizes = (SMALLEST * logs.exp() / multiple).round().to(torch.int64) * multiple
    return [Shape(*row) for row in sizes.tolist()]


def stratified(shapes: Sequence[Shape], count: int) -> list[Shape]:
    """`count` of the shapes, evenly by their work, in an order that leaves a stopped run with a fair part of them."""
    ordered = sorted(shapes, key=lambda shape: (shape.flops, shape.m, shape.n))
    chosen = [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))
    return [chosen[i] for i in order.tolist()]


def one_tile(tile: hopper.HopperTile, split: bool, costs: CostTable) -> hopper.Planner:
    def plan(m: int, n: int, k: int, gated: bool, num_sms: int) -> hopper.HopperPlan:
        if split:
            return hopper.plan_tile(tile, hopper.tile_key(tile), costs, m, n, k, gated, num_sms)[0]
        num_tiles, iters = hopper.count_tiles(tile, m, n, gated), -(-k // hopper.PANEL)
        return hopper.HopperPlan(tile, uniform_plan(num_tiles, iters, num_sms, split=False))

    return plan


def planners(costs: CostTable) -> dict[str, hopper.Planner]:
    """Our baselines on the Hopper kernel, by a device's costs."""
    tiles = {f"tile {i}": one_tile(tile, True, costs) for i, tile in enumerate(hopper.TILES)}
    return {"data_parallel": one_tile(hopper.TILES[0], False, costs), **tiles}


def measure(shape: Shape, target: Target) -> Times:
    """Raises RuntimeError if a product of ours is not cuBLAS's."""
    device = target.device
    a = torch.randn(shape.m, shape.k, dtype=torch.bfloat16, device=device)
    b = torch.randn(shape.n, shape.k, dtype=torch.bfloat16, device=device).t()
    outs: dict[str, torch.Tensor] = {}
    candidates: dict[str, timing.Candidate] = {}

    def add(name: str, call: Callable[[torch.Tensor], object]) -> None:
        outs[name] = torch.full((shape.m, shape.n), math.nan, dtype=a.dtype, device=device)
        candidates[name] = timing.as_graph(partial(call, outs[name]))

    add("cublas", lambda out: torch.mm(a, b, out=out))
    add("ours", lambda out: matmul(a, b, out=out))
    if hopper.refusal(a, b, target) is None:
        for name, planner in planners(costs_of(device)).items():
            add(name, partial(_on_hopper, a, b, target, planner))
    for name, out in outs.items():
        error = relative_error(out, outs["cublas"].float())
        if not error <= MAX_ERROR:
            raise RuntimeError(f"{shape}: {name}: relative error {error:.2e} to cuBLAS, want at most {MAX_ERROR:.0e}")
    us = {name: found.median for name, found in timing.time_interleaved(candidates, SAMPLES).items()}
    tiles = [time for name, time in us.items() if name.startswith("tile ")]
    best = min([*tiles, us["ours"]]) if tiles else math.nan
    return Times(
        shape.m, shape.n, shape.k, us["ours"], us["cublas"], us.get("data_parallel", math.nan), us.get("tile 0", math.nan), best
    )  # fmt: skip


def _on_hopper(a: torch.Tensor, b: torch.Tensor, target: Target, planner: hopper.Planner, out: torch.Tensor) -> None:
    hopper.matmul(a, b, Epilogue(), out, target, planner)


NAMES = [field.name for field in fields(Times)]


def read_times(path: Path, commit: str) -> dict[Shape, Times]:
    """What a run of this commit has measured so far."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        if file.readline().strip() != f"# {commit}":
            return {}
        rows = [Times(*(int(row[name]) for name in NAMES[:3]), *(float(row[name]) for name in NAMES[3:]))
                for row in csv.DictReader(file)]  # fmt: skip
    return {Shape(row.m, row.n, row.k): row for row in rows}


def measured(
    path: Path, shapes: Sequence[Shape], target: Target, commit: str, deadline: float = math.inf
) -> Iterator[Times]:
    """The times of the shapes, from the file or measured and appended to it. After `deadline` (time.monotonic) none is measured."""
    known = read_times(path, commit)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if known else "w", newline="") as file:
        writer = csv.writer(file)
        if not known:
            file.write(f"# {commit}\n")
            writer.writerow(NAMES)
        for shape in shapes:
            found = known.get(shape)
            if found is None:
                if time.monotonic() > deadline:
                    continue
                found = measure(shape, target)
                values = [getattr(found, name) for name in NAMES]
                writer.writerow([f"{value:.3f}" if isinstance(value, float) else value for value in values])
                file.flush()
            yield found


def summarise(against: str, ratios: Sequence[float]) -> Iterator[Row]:
    """Rows of the statistics that the paper reports, and percentiles."""
    mean = math.fsum(ratios) / max(len(ratios), 1)
    deviation = math.sqrt(math.fsum((ratio - mean) ** 2 for ratio in ratios) / max(len(ratios), 1))
    statistics = {"geomean": geomean(ratios), "mean": mean, "standard deviation": deviation, "least": min(ratios),
                  "5 %": percentile(ratios, 5), "median": percentile(ratios, 50), "most": max(ratios)}  # fmt: skip
    for name, value in statistics.items():
        kind = "geomean" if name == "geomean" else "percentile" if name in ("5 %", "median") else "ratio"
        better = "lower" if name == "standard deviation" else "higher"
        case = f"{len(ratios)} shapes, {against}'s time / ours: {name}"
        yield Row(case, "x", better, value, kind, target=TARGETS.get(against, {}).get(name), timing="graph")


def table(rounded: Sequence[Times], unrounded: Sequence[Times]) -> Iterator[Row]:
    """The summary rows of both corpora."""
    bound = [times for times in rounded if times.intensity > COMPUTE_BOUND]
    groups = {
        "cublas": [times.cublas / times.ours for times in rounded],
        "cublas, compute-bound": [times.cublas / times.ours for times in bound],
        "data_parallel": [times.data_parallel / times.ours for times in rounded],
        "stream_k": [times.stream_k / times.ours for times in rounded],
        "best_tile": [times.best_tile / times.ours for times in rounded],
        "cublas, unrounded": [times.cublas / times.ours for times in unrounded],
    }
    for against, ratios in groups.items():
        known = [ratio for ratio in ratios if not math.isnan(ratio)]
        if known:
            yield from summarise(against, known)


def times_file(name: str, device: str, out: Path | None) -> Path:
    """Beside the report."""
    return (RESULTS if out is None else out.parent) / f"{name}-{slug(device)}.csv"


def fill(bench: harness.Bench, everything: bool, count: int, seconds: float, out: Path | None = None) -> None:
    """seconds: after which nothing more is measured; the corpora share them by their numbers of shapes."""
    target = select_target(bench.device, "triton")
    commit = harness.current_commit()
    samples = {}
    for name, multiple, usual in (
        ("gemm_corpus", 8, count),
        ("gemm_corpus_unrounded", 1, min(count, SAMPLE_UNROUNDED)),
    ):
        shapes = corpus(multiple)
        samples[name] = stratified(shapes, len(shapes) if everything else usual)
    begin, total, done, found = time.monotonic(), sum(map(len, samples.values())), 0, []
    for name, shapes in samples.items():
        done += len(shapes)
        path = times_file(name, torch.cuda.get_device_name(bench.device), out)
        steps = measured(path, shapes, target, commit, begin + seconds * done / max(total, 1))
        found.append(list(track(steps, name, len(shapes), console=bench.console)))
        if len(found[-1]) < len(shapes):
            bench.console.print(f"{name}: {len(found[-1])} of {len(shapes)} shapes; the next run goes on with the rest")
    for row in table(*found):
        bench.add(row)


if __name__ == "__main__":
    parser = harness.make_parser("gemm_corpus", __doc__)
    parser.add_argument("--all", action="store_true", help=f"all {NUM_SHAPES} shapes of both corpora")
    parser.add_argument("--count", type=int, default=SAMPLE, metavar="N", help="shapes of a sample")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="S", help="measure no longer than that")
    options = parser.parse_args()
    work = partial(fill, everything=options.all, count=options.count, seconds=options.seconds, out=options.out)
    sys.exit(harness.measure("gemm_corpus", options, work, ()))

"""The experiment of arXiv 2402.00025: few rows of fp16 times square 4-bit weights in groups of 128, by the portable kernel.

Each tile of the output is computed by one program (data-parallel), by 2 to 16 (split-K), or by even shares, our default. Weights
are rotated past the L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.results import Row
from benchmarks.timing import copies_past_l2
from evenshare import QuantizedWeight
from evenshare.device.target import select_target
from evenshare.quant.launch import portable_matmul
from evenshare.quant.plan import Planner, plan_matmul, plan_split_k

GROUP_SIZE = 128
ROWS = (1, 2, 4, 8, 16)
SIZES = (512, 1024, 2048, 4096, 8192, 16384)  # n = k
DTYPE = torch.float16  # the paper's
DATA_PARALLEL, EVEN_SHARE = "data-parallel", "even share"
PLANNERS: dict[str, Planner] = {
    DATA_PARALLEL: partial(plan_split_k, 1),
    **{f"split-K {splits}": partial(plan_split_k, splits) for splits in (2, 4, 8, 16)},
    EVEN_SHARE: plan_matmul,
}
PAPER_GAIN = {"mean": 124, "peak": 295}  # % of its split-K over its data-parallel kernel, on an H100
MAX_ERROR = 2e-3  # weights and output rounded to fp16 once


@dataclass(frozen=True)
class Case:
    size: int
    m: int

    @property
    def title(self) -> str:
        return f"n=k={self.size} m={self.m}"


CASES = [Case(size, m) for size in SIZES for m in ROWS]


@lru_cache(maxsize=1)
def make_weights(size: int, device: torch.device) -> list[QuantizedWeight]:
    """Copies of one weight that together pass the L2; each is packed on its own."""
    codes = torch.randint(256, (size, size // 2), dtype=torch.uint8, device=device)
    scales = torch.rand(size, size // GROUP_SIZE, device=device).to(DTYPE) / size**0.5
    weight = QuantizedWeight(codes, scales, size, GROUP_SIZE)
    return [replace(weight) for _ in range(copies_past_l2(codes.nbytes))]


def measure(bench: harness.Bench, case: Case) -> Row:
    """Microseconds of all planners in turn, ours is the even share."""
    weights = make_weights(case.size, bench.device)
    target = select_target(bench.device, "triton")
    x = torch.randn(case.m, case.size, dtype=DTYPE, device=bench.device)

    def calls(planner: Planner) -> list[harness.Call]:
        out = torch.full((case.m, case.size), float("nan"), dtype=DTYPE, device=bench.device)

        def call(weight: QuantizedWeight) -> torch.Tensor:
            portable_matmul(x, weight, None, None, None, out, target, planner)
            return out

        return [partial(call, weight) for weight in weights]

    found = {name: calls(planner) for name, planner in PLANNERS.items()}
    scales = weights[0].scales
    return bench.compare(
        case.title,
        found.pop(EVEN_SHARE),
        lambda name: None,
        x.float() @ weights[0].dequantize().T,
        MAX_ERROR,
        variants=found,
        flops=2 * case.m * case.size**2,
        bytes=case.size**2 // 2 + scales.nbytes + 2 * case.m * 2 * case.size,
    )


def times(row: Row) -> dict[str, float]:
    """Planner -> microseconds of a case."""
    return {**row.peers, EVEN_SHARE: row.ours}


def gains(rows: Sequence[Row]) -> list[Row]:
    """Speed gained over data-parallel in percent, the mean and the peak over all cases, as the paper reports them."""
    speeds: dict[str, list[float]] = {name: [] for name in PLANNERS if name != DATA_PARALLEL}
    for row in rows:
        us = times(row)
        for name, gain in speeds.items():
            gain.append(100 * (us[DATA_PARALLEL] / us[name] - 1))
    found = []
    for summary, kind in (("mean", "ratio"), ("peak", "percentile")):
        values = {n: max(gain) if summary == "peak" else sum(gain) / len(gain) for n, gain in speeds.items()}
        case = f"{len(rows)} cases, {summary} gain over {DATA_PARALLEL} (the paper, H100: {PAPER_GAIN[summary]})"
        found.append(Row(case, "%", "higher", values.pop(EVEN_SHARE), kind, peers=values, timing="graph"))
    return found


def show_rates(console: Console, rows: Sequence[Row]) -> None:
    """TFLOP/s, one line a case, one column a planner; the best is marked."""
    table = Table("case", title="TFLOP/s, * the best")
    for name in PLANNERS:
        table.add_column(name, justify="right")
    for _, group in groupby(rows, lambda row: row.case.partition(" ")[0]):
        for row in group:
            us, work = times(row), (row.flops or 0) * 1e-6
            best = min(us, key=lambda name: us[name])
            table.add_row(row.case, *(f"{work / us[name]:.3g}{' *'[name == best]}" for name in PLANNERS))
        table.add_section()
    console.print(table)


def fill(bench: harness.Bench, cases: Sequence[Case] = tuple(CASES)) -> None:
    bench.measure_all(cases, measure)
    if bench.rows:
        show_rates(bench.console, bench.rows)
        bench.rows += gains(bench.rows)


if __name__ == "__main__":
    harness.run("splitk", __doc__, fill, ())

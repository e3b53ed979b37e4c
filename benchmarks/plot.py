"""`python -m benchmarks.plot [--out DIR] [DIR or FILES]`: a figure of each results file, drawn from nothing but these files.

Figures are NAME-DEVICE.svg; NAME-DEVICE.csv beside a results file (every shape of a corpus) is drawn with it. The same files give
the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.check import find_files
from benchmarks.results import Report, Row, read_reports, slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OUT = Path(__file__).parents[1] / "docs" / "images" / "results"
OURS = "evenshare"
COLOURS = {OURS: "#3b6fb6", "cublas": "#8a919c", "sdpa-cudnn": "#3f9a6b", "sdpa-flash": "#e08a2e", "flex": "#8467b0"}
OTHERS = ("#c8504b", "#2f9eb0", "#c9a227", "#b55a93", "#6b727c")
FAINT = "#6b727c"
MAX_BARS = 24


@dataclass(frozen=True)
class Results:
    """A report, and where it was read."""

    report: Report
    path: Path

    @property
    def device(self) -> str:
        return self.report.device

    def ceiling(self, name: str) -> float | None:
        return self.report.ceilings.get(name)

    def corpus(self) -> list[dict[str, float]]:
        """Rows of the .csv beside the file, none if there is no such file or another commit wrote it."""
        path = self.path.with_name(f"{self.report.name}-{slug(self.device)}.csv")
        if not path.exists():
            return []
        with path.open(newline="") as file:
            if file.readline().strip() != f"# {self.report.commit}":
                return []
            return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def times(row: Row) -> dict[str, float]:
    """Ours and the peers', in the row's unit."""
    return {OURS: row.ours, **row.peers}


def draw_gemm(results: Results) -> Figure | None:
    """The utilisation landscape: share of the measured matmul ceiling over flop a byte, under the roof of the read bandwidth."""
    peak, bandwidth = results.ceiling("matmul_bf16_tflop_s"), results.ceiling("read_tb_s")
    points: dict[str, list[tuple[float, float]]] = {}
    for row in results.report.rows:
        if row.flops and row.bytes and row.unit == "us":
            for name, us in times(row).items():
                points.setdefault(name, []).append((row.flops / row.bytes, row.flops / us * 1e-6))
    for shape in results.corpus():
        m, n, k = (shape[name] for name in "mnk")
        intensity, flops = m * n * k / (m * k + n * k + m * n), 2e-6 * m * n * k
        for name, key in ((OURS, "ours"), ("cublas", "cublas")):
            points.setdefault(name, []).append((intensity, flops / shape[key]))
    if not points or peak is None:
        return None
    figure, (panel,) = _panels(results, 1, width=8)
    size = 26 if max(map(len, points.values())) < 100 else 5
    for name in sorted(points, key=lambda name: name == OURS):
        x, y = zip(*points[name], strict=True)
        panel.scatter(
            x, [value / peak for value in y], s=size, color=_colour(name), label=name, linewidths=0, alpha=0.8
        )
    if bandwidth is not None:
        low, high = (bound(x for xy in points.values() for x, _ in xy) for bound in (min, max))
        xs = [low * (high / low) ** (i / 200) for i in range(201)]
        panel.plot(xs, [min(1.0, x * bandwidth / peak) for x in xs], color=FAINT, lw=1, label="measured ceilings")
    panel.set(xscale="log", xlabel="flop a byte", ylabel=f"share of {peak:.0f} TFLOP/s, measured", ylim=(0, 1.15))
    panel.legend(frameon=False, loc="upper left")
    return figure


def draw_prefill(results: Results) -> Figure | None:
    """TFLOP/s by length, a panel for each kind of mask and head dimension."""
    curves: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in results.report.rows:
        found = re.fullmatch(r"dense, D=(\d+), \S+ heads, S=(\d+), (\w+)", row.case)
        if found and row.flops and row.unit == "us":
            lines = curves.setdefault((found[3], found[1]), {})
            for name, us in times(row).items():
                lines.setdefault(name, {})[int(found[2])] = row.flops / us * 1e-6
    curves = {key: lines for key, lines in curves.items() if len(lines[OURS]) > 1}
    if not curves:
        return None
    figure, panels = _panels(results, len(curves), width=4.6 * len(curves))
    for panel, ((mask, dim), lines) in zip(panels, sorted(curves.items(), reverse=True), strict=True):
        _lines(panel, lines)
        panel.set(xlabel="tokens of a request", title=f"{mask}, D = {dim}", ylim=(0, None))
    panels[0].set_ylabel("TFLOP/s")
    panels[0].legend(frameon=False)
    return figure


def draw_decode(results: Results) -> Figure | None:
    """TB/s by batch, beside what the device reads at most."""
    bars = {
        row.case: {name: row.bytes / us * 1e-6 for name, us in times(row).items()}
        for row in results.report.rows
        if row.bytes and row.unit == "us"
    }
    figure = _bars(results, bars, "TB/s of keys and values")
    ceiling = results.ceiling("read_tb_s")
    if figure is not None and ceiling is not None:
        panel = figure.axes[0]
        panel.axvline(ceiling, color=FAINT, lw=1, ls=(0, (4, 3)))
        label = "read bandwidth, measured"
        panel.text(ceiling, 1.01, label, transform=panel.get_xaxis_transform(), ha="right", color=FAINT, fontsize=8)
    return figure


def draw_w4a16(results: Results) -> Figure | None:
    """How many times faster than the 16-bit product, by rows."""
    curves: dict[str, dict[int, float]] = {}
    for row in results.report.rows:
        found = re.fullmatch(r"n=(\d+) k=(\d+) m=(\d+)", row.case)
        if found and "cublas" in row.peers:
            curves.setdefault(f"{found[1]} x {found[2]}", {})[int(found[3])] = row.peers["cublas"] / row.ours
    if not curves:
        return None
    figure, (panel,) = _panels(results, 1, width=8)
    _lines(panel, curves)
    panel.axhline(1, color=FAINT, lw=1, ls=(0, (4, 3)))
    panel.set(xlabel="rows of x (m)", ylabel="times as fast as bf16 cuBLAS", ylim=(0, None))
    panel.legend(title="weight, n x k", frameon=False)
    return figure


def draw_speeds(results: Results) -> Figure | None:
    """Everything that is better the higher it is, beside peers; or leads over the best peer."""
    rates = {row.case: times(row) for row in results.report.rows if row.unit == "tokens/s" and row.peers}
    if rates:
        return _bars(results, rates, "tokens/s")
    leads = {row.case: {OURS: row.lead} for row in results.report.rows if row.kind == "value" and row.lead is not None}
    figure = _bars(results, leads, "times as fast as the best peer")  # type: ignore[arg-type]
    if figure is not None:
        figure.axes[0].axvline(1, color=FAINT, lw=1, ls=(0, (4, 3)))
    return figure


FIGURES: dict[str, tuple[str, Callable[[Results], Figure | None]]] = {
    "gemm": ("GEMM, bf16", draw_gemm),
    "gemm_corpus": ("GEMM, bf16, the corpus of the Stream-K paper", draw_gemm),
    "attention_prefill": ("Attention, bf16, prefill", draw_prefill),
    "attention_decode": ("Attention over pages, bf16, decode", draw_decode),
    "w4a16": ("4-bit weights, 16-bit activations", draw_w4a16),
    "generate": ("Generation", draw_speeds),
}


def draw(report: Report, path: Path, out: Path) -> Path | None:
    """The figure of a report read from `path`, in the folder `out`; None if it has no rows to draw."""
    import matplotlib

    title, function = FIGURES.get(report.name, (report.name.replace("_", " "), draw_speeds))
    with matplotlib.rc_context({"svg.hashsalt": "evenshare", "font.size": 9, "axes.titlesize": 10}):
        figure = function(Results(report, path))
        if figure is None:
            return None
        figure.suptitle(f"{title}\n", fontsize=12, x=0.01, ha="left")
        versions = ", ".join(
            f"{name} {report.versions[name]}" for name in ("torch", "triton") if name in report.versions
        )
        machine = f"{report.device}, {report.date[:10]}, commit {report.commit[:7]}{', ' * bool(versions)}{versions}"
        figure.text(0.012, 1 - 0.32 / figure.get_figheight(), machine, color=FAINT, fontsize=8.5, va="top")
        out.mkdir(parents=True, exist_ok=True)
        target = out / f"{report.name}-{slug(report.device)}.svg"
        figure.savefig(target, facecolor="white", metadata={"Date": None})
    return target


def _panels(results: Results, count: int, width: float, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = list(figure.subplots(1, count, squeeze=False, sharey=True)[0])
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, lw=0.6)
        panel.set_axisbelow(True)
    return figure, panels


def _lines(panel: Axes, lines: dict[str, dict[int, float]]) -> None:
    for index, (name, points) in enumerate(lines.items()):
        xs = sorted(points)
        colour = _colour(name, index)
        panel.plot(
            xs, [points[x] for x in xs], marker="o", ms=4, color=colour, label=name, lw=2 if name == OURS else 1.4
        )
    xs = sorted({x for points in lines.values() for x in points})
    panel.set_xscale("log", base=2)
    panel.set_xticks(xs, map(str, xs))
    panel.minorticks_off()


def _bars(results: Results, bars: dict[str, dict[str, float]], axis: str) -> Figure | None:
    """A group of bars for each case, downwards."""
    if not bars:
        return None
    bars = dict(list(bars.items())[:MAX_BARS])
    names = list(dict.fromkeys(name for group in bars.values() for name in group))
    height = 1.3 + sum(0.14 + 0.15 * len(group) for group in bars.values())
    figure, (panel,) = _panels(results, 1, width=8, height=height)
    ticks, y = [], 0.0
    for group in bars.values():
        ticks.append(y + (len(group) - 1) / 2)
        for name, value in group.items():
            panel.barh(y, value, 0.9, color=_colour(name, names.index(name)), label=name)
            y += 1
        y += 0.9
    panel.set_yticks(ticks, list(bars))
    panel.set_ylim(y - 0.5, -1)
    panel.grid(axis="y", visible=False)
    panel.set_xlabel(axis)
    if len(names) > 1:
        handles, labels = panel.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(unique.values(), unique, loc="outside lower center", ncols=len(unique), frameon=False)
    return figure


def _colour(name: str, index: int = 0) -> str:
    return COLOURS.get(name, OTHERS[index % len(OTHERS)])


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if drawn, 2 for unreadable input or nothing to draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description="Draw figures from results files.")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the figures [default: docs/images/results]")
    parser.add_argument("paths", nargs="*", metavar="DIR or FILES", help="results [default: benchmarks/results]")
    given = parser.parse_args(arguments)
    try:
        drawn = 0
        for file in find_files(given.paths):
            for report in read_reports(file):
                figure = draw(report, file, given.out)
                if figure is not None:
                    print(figure)
                    drawn += 1
        if not drawn:
            raise ValueError(
                f"paths: got {' '.join(map(str, given.paths)) or 'no results'}, want files with rows to draw"
            )
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

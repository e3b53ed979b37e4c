"""The figures of `benchmarks.plot`: each a function of one results file, None where it has no rows for it."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from benchmarks.policy_table import MEAN, read_ratios
from benchmarks.results import Report, Row, slug

OURS = "evenshare"
COLOURS = {
    OURS: "#3b6fb6",
    f"{OURS}, page 64": "#6d93c9",
    f"{OURS}, page 16": "#9db4d6",
    f"{OURS}, page 1": "#c8d6ea",
    "cublas": "#8a919c",
    "sdpa-cudnn": "#3f9a6b",
    "sdpa-flash": "#e08a2e",
    "flex": "#8467b0",
}
OTHERS = ("#c8504b", "#2f9eb0", "#c9a227", "#b55a93", "#6b727c")
SHADES = ("#f0a35e", "#d9694b", "#a5427a", "#5b4a9c", "#20497f", "#0e2238")
FAINT = "#6b727c"
MAX_BARS = 24
MAX_DOTS = 2000  # as vectors, of a panel; more are a picture in the figure


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
    """Shapes under the roof of the measured ceilings, ours and the peers' dots of a shape joined; of a corpus `draw_corpus`."""
    corpus = results.corpus()
    peak, bandwidth = results.ceiling("matmul_bf16_tflop_s"), results.ceiling("read_tb_s")
    if corpus and peak is not None:
        return draw_corpus(results, corpus, peak, bandwidth)
    shapes = [
        (row.flops / row.bytes, {name: row.flops / us * 1e-6 for name, us in times(row).items()})
        for row in results.report.rows
        if re.fullmatch(r"(?!fp8).*\b\d+x\d+x\d+", row.case) and row.flops and row.bytes and row.unit == "us"
    ]
    if not shapes or peak is None:
        return None
    points: dict[str, list[tuple[float, float]]] = {}
    figure, (panel,) = _panels(results, 1, width=8)
    for intensity, rates in shapes:
        for name, rate in rates.items():
            points.setdefault(name, []).append((intensity, rate / peak))
        ys = [rate / peak for rate in rates.values()]
        panel.plot([intensity] * len(ys), ys, color=FAINT, lw=0.8, alpha=0.6, zorder=1)
    for name in sorted(points, key=lambda name: name == OURS):
        x, y = zip(*points[name], strict=True)
        panel.scatter(x, y, s=30, color=_colour(name), label=name, linewidths=0, zorder=2)
    _roof(panel, [x for xy in points.values() for x, _ in xy], peak, bandwidth)
    panel.set(yscale="log", ylim=(0.7 * min(y for xy in points.values() for _, y in xy), 1.4))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.legend(frameon=False, loc="lower right")
    return figure


def draw_corpus(
    results: Results, corpus: list[dict[str, float]], peak: float, bandwidth: float | None
) -> Figure | None:
    """The utilisation landscape: a dot a shape, a panel for each of those that were measured."""
    intensity = [m * n * k / (m * k + n * k + m * n) for m, n, k in ((s["m"], s["n"], s["k"]) for s in corpus)]
    columns = {"cublas": "cuBLAS", "data_parallel": "data parallel, our largest tile", "ours": OURS}
    shares = {
        title: [2e-6 * s["m"] * s["n"] * s["k"] / s[key] / peak for s in corpus]
        for key, title in columns.items()
        if any(s.get(key, math.nan) > 0 for s in corpus)
    }
    figure, panels = _panels(results, len(shares), width=4 * len(shares), height=4)
    for panel, (title, share) in zip(panels, shares.items(), strict=True):
        panel.scatter(
            intensity,
            share,
            s=4,
            color=_colour({"cuBLAS": "cublas"}.get(title, title)),
            linewidths=0,
            alpha=0.6,
            rasterized=len(corpus) > MAX_DOTS,
        )
        _roof(panel, intensity, peak, bandwidth)
        panel.set(title=title, ylim=(0, 1.15))
    panels[0].set_title(f"{panels[0].get_title()}, {len(corpus)} shapes")
    for panel in panels[1:]:
        panel.set_ylabel("")
    return figure


def _roof(panel: Axes, intensity: Sequence[float], peak: float, bandwidth: float | None) -> None:
    """What the ceilings allow, and the axes."""
    low, high = min(intensity), max(intensity)
    if bandwidth is not None:
        xs = [low * (high / low) ** (i / 200) for i in range(201)]
        panel.plot(xs, [min(1.0, x * bandwidth / peak) for x in xs], color=FAINT, lw=1, label="measured ceilings")
    panel.set(xscale="log", xlabel="flop a byte", ylabel=f"share of {peak:.0f} TFLOP/s, measured")


def draw_prefill(results: Results) -> Figure | None:
    """TFLOP/s by length, a panel for each kind of mask and head dimension."""
    curves: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    heads: dict[int, str] = {}
    for row in results.report.rows:
        found = re.fullmatch(r"dense, D=(\d+), (\S+) heads, S=(\d+), (\w+)", row.case)
        if found and row.flops and row.unit == "us":
            lines = curves.setdefault((found[4], found[1]), {})
            for name, us in times(row).items():
                lines.setdefault(name, {})[int(found[3])] = row.flops / us * 1e-6
            heads.setdefault(int(found[3]), found[2])
    curves = {key: lines for key, lines in curves.items() if len(lines[OURS]) > 1}
    if not curves:
        return None
    figure, panels = _panels(results, len(curves), width=4.6 * len(curves))
    for panel, ((mask, dim), lines) in zip(panels, sorted(curves.items(), reverse=True), strict=True):
        lengths = _lines(panel, lines)
        usual = heads[lengths[-1]]
        panel.set_xticks(lengths, [f"{n}" if heads[n] == usual else f"{n}\n{heads[n]}" for n in lengths])
        panel.set(xlabel="tokens of a request", title=f"{mask}, D = {dim}, {usual} heads", ylim=(0, None))
    panels[0].set_ylabel("TFLOP/s")
    panels[0].legend(frameon=False)
    return figure


def draw_ragged(results: Results) -> Figure | None:
    """TFLOP/s of ragged batches, contiguous and over pages."""

    def place(name: str) -> tuple[bool, bool, int]:
        """Ours, large pages before small ones, the peers."""
        page = re.fullmatch(r"page (\d+)", name)
        return name != OURS, page is None, -int(page[1]) if page else 0

    bars = {}
    for row in results.report.rows:
        if row.case.startswith("ragged, ") and row.flops and row.unit == "us":
            rates = {name: row.flops / us * 1e-6 for name, us in times(row).items()}
            bars[row.case.partition(", ")[2]] = {
                f"{OURS}, {name}" if name.startswith("page ") else name: rates[name]
                for name in sorted(rates, key=place)
            }
    return _bars(results, bars, "TFLOP/s")


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
        for (bar,) in (bars for bars in panel.containers if bars.get_label() == OURS):  # how much of it we reach
            share, y = bar.get_width() / ceiling, bar.get_y() + bar.get_height() / 2
            panel.text(0.01 * ceiling, y, f"{share:.0%}", color="white", fontsize=7, va="center_baseline")
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
    curves = dict(sorted(curves.items(), key=lambda item: math.prod(map(int, item[0].split(" x ")))))
    figure, (panel,) = _panels(results, 1, width=8)
    _lines(panel, curves, SHADES)
    panel.axhline(1, color=FAINT, lw=1, ls=(0, (4, 3)))
    panel.set(xlabel="rows of x (m)", ylabel="times as fast as bf16 cuBLAS", ylim=(0, None))
    panel.legend(title="weight, n x k", frameon=False)
    return figure


def draw_policies(results: Results) -> Figure | None:
    """A field for each batch and policy: time over the best policy's, measured and simulated."""
    kinds = {"measured": read_ratios(results.report, "graph"), "simulated": read_ratios(results.report, "simulated")}
    kinds = {title: rows for title, rows in kinds.items() if rows}
    if not kinds:
        return None
    keys = list(dict.fromkeys(key for rows in kinds.values() for key in rows))
    policies = list(next(iter(next(iter(kinds.values())).values())))
    shades = LinearSegmentedColormap.from_list("cost", ["#ffffff", "#f6d9b8", "#d9694b"])
    figure, panels = _panels(results, len(kinds), width=1.9 + 3.7 * len(kinds), height=1.7 + 0.27 * len(keys))
    for panel, (title, rows) in zip(panels, kinds.items(), strict=True):
        values = [[rows.get(key, {}).get(policy, math.nan) for policy in policies] for key in keys]
        panel.imshow(values, cmap=shades, vmin=1, vmax=2, aspect="auto")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                if math.isnan(value):  # not measured
                    continue
                weight = "bold" if value == min(row) else "normal"
                panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, fontweight=weight)
        panel.set_title(title, loc="left")
        panel.set_xticks(
            range(len(policies)), ["\n".join(wrap(name.replace("_", " "), 9)) for name in policies], fontsize=8
        )
        panel.set_yticks(range(len(keys)), [", ".join(key) for key in keys])
        panel.tick_params(length=0)
        panel.grid(visible=False)
        panel.spines[:].set_visible(False)
        for y, (_, batch) in enumerate(keys):
            if batch == MEAN:
                panel.axhline(y - 0.5, color=FAINT, lw=0.8)
                panel.axhline(y + 0.5, color=FAINT, lw=0.8)
    figure.supxlabel("time / the best policy's; the first is the default", fontsize=9)
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


def _panels(results: Results, count: int, width: float, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = list(figure.subplots(1, count, squeeze=False, sharey=True)[0])
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, lw=0.6)
        panel.set_axisbelow(True)
    return figure, panels


def _lines(panel: Axes, lines: dict[str, dict[int, float]], colours: Sequence[str] = ()) -> list[int]:
    """A line for each name over a logarithmic axis; returns the ticks."""
    for index, (name, points) in enumerate(lines.items()):
        xs = sorted(points)
        colour = colours[index % len(colours)] if colours else _colour(name, index)
        panel.plot(
            xs, [points[x] for x in xs], marker="o", ms=4, color=colour, label=name, lw=2 if name == OURS else 1.4
        )
    xs = sorted({x for points in lines.values() for x in points})
    panel.set_xscale("log", base=2)
    panel.set_xticks(xs, map(str, xs))
    panel.minorticks_off()
    return xs


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
        figure.legend(unique.values(), unique, loc="outside lower center", ncols=min(len(unique), 4), frameon=False)
    return figure


def _colour(name: str, index: int = 0) -> str:
    return COLOURS.get(name, OTHERS[index % len(OTHERS)])

"""`python -m benchmarks.plot_splitk [FILE]`: the picture of a results file of `benchmarks.splitk`, beside it as .png."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

from benchmarks.pictures import draw_files
from benchmarks.results import Report
from benchmarks.splitk import DATA_PARALLEL, EVEN_SHARE, PLANNERS, times

Curves = dict[int, dict[str, dict[int, float]]]  # m -> planner -> n = k -> TFLOP/s


def read_curves(report: Report) -> Curves:
    """What the report's cases say; its summaries are left out."""
    curves: Curves = {}
    for row in report.rows:
        found = re.fullmatch(r"n=k=(\d+) m=(\d+)", row.case)
        if found is None or row.flops is None:
            continue
        size, m = map(int, found.groups())
        for name, us in times(row).items():
            curves.setdefault(m, {}).setdefault(name, {})[size] = row.flops / us * 1e-6
    return curves


def draw(report: Report, path: Path) -> None:
    """A panel for each m: TFLOP/s over n = k, a line for each way of dealing the work. Raises ValueError without cases."""
    from matplotlib.figure import Figure

    curves = read_curves(report)
    if not curves:
        raise ValueError(f"report: got {report.name} without cases of splitk, want some to draw")
    figure = Figure(figsize=(3 * len(curves), 3.6), layout="constrained")
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    splits = [name for name in PLANNERS if name not in (DATA_PARALLEL, EVEN_SHARE)]
    styles = {
        DATA_PARALLEL: {"color": "0.3", "linestyle": "--"},
        **{name: {"color": str(0.85 - 0.15 * i)} for i, name in enumerate(splits)},
        EVEN_SHARE: {"color": "tab:orange", "linewidth": 2},
    }
    for panel, (m, lines) in zip(panels, sorted(curves.items()), strict=True):
        for name, style in styles.items():
            sizes = sorted(lines.get(name, {}))
            panel.plot(sizes, [lines[name][size] for size in sizes], marker=".", label=name, **style)
        panel.set(title=f"m = {m}", xlabel="n = k")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
    panels[0].set_ylabel("TFLOP/s")
    panels[0].legend(frameon=False, fontsize="small")
    figure.suptitle(f"4-bit weights, groups of 128, on {report.device}")
    figure.savefig(path, dpi=120)


main = partial(draw_files, "splitk", draw, ".png")


if __name__ == "__main__":
    sys.exit(main())

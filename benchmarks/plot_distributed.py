"""`python -m benchmarks.plot_distributed [FILE]`: the scaling in a results file of `benchmarks.distributed`, beside it as .svg."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

from benchmarks.figures import COLOURS, FAINT, OURS
from benchmarks.pictures import draw_files
from benchmarks.results import Report

Curves = dict[str, dict[bool, dict[int, float]]]  # case -> predicted -> ranks -> microseconds


def read_curves(report: Report) -> Curves:
    curves: Curves = {}
    for row in report.rows:
        found = re.fullmatch(r"(.+), (\d+) ranks(, predicted)?", row.case)
        if found:
            curves.setdefault(found[1], {}).setdefault(found[3] is not None, {})[int(found[2])] = row.ours
    return curves


def draw(report: Report, path: Path) -> None:
    """A panel for each case: microseconds over ranks, measured and predicted, and what perfect scaling would give.

    Raises ValueError without cases.
    """
    import matplotlib
    from matplotlib.figure import Figure

    curves = read_curves(report)
    if not curves:
        raise ValueError(f"report: got {report.name} without cases of distributed, want some to draw")
    with matplotlib.rc_context({"svg.hashsalt": "evenshare", "font.size": 9, "axes.titlesize": 9}):
        figure = Figure(figsize=(3.6 * len(curves), 3.6), layout="constrained")
        panels = figure.subplots(1, len(curves), squeeze=False)[0]
        for panel, (case, lines) in zip(panels, curves.items(), strict=True):
            every = sorted({ranks for points in lines.values() for ranks in points})
            first = min(every)
            one = lines[not lines.get(False)].get(first, next(iter(lines.values()))[first])
            panel.plot(every, [one * first / ranks for ranks in every], color=FAINT, lw=1, label="perfect scaling")
            for predicted, points in sorted(lines.items(), reverse=True):
                style = (
                    {"ls": (0, (4, 3)), "label": "predicted"}
                    if predicted
                    else {"marker": "o", "ms": 4, "label": "measured"}
                )
                ranks = sorted(points)
                panel.plot(ranks, [points[n] for n in ranks], color=COLOURS[OURS], lw=1.6, **style)
            panel.set(title=case.replace(", ", "\n", 1), xlabel="ranks", xscale="log", yscale="log")
            panel.set_xticks(every, map(str, every))
            panel.minorticks_off()
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(alpha=0.25, lw=0.6)
        panels[0].set_ylabel("us")
        panels[0].legend(frameon=False)
        figure.suptitle(f"{report.device}, {report.date[:10]}, commit {report.commit[:7]}", color=FAINT, fontsize=8.5)
        figure.savefig(path, facecolor="white", metadata={"Date": None})


main = partial(draw_files, "distributed", draw, ".svg")


if __name__ == "__main__":
    sys.exit(main())

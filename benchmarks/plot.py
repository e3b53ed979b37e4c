"""`python -m benchmarks.plot [--out DIR] [DIR or FILES]`: figures of each results file, drawn from nothing but these files.

Figures are NAME-DEVICE.svg; splitk and distributed have programs of their own, `benchmarks.plot_NAME`. NAME-DEVICE.csv beside a
results file (every shape of a corpus) is drawn with it. The same files give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks import figures
from benchmarks.check import find_files
from benchmarks.figures import FAINT, Results
from benchmarks.results import Report, read_reports, slug

OUT = Path(__file__).parents[1] / "docs" / "images" / "results"
STYLE = {"svg.hashsalt": "evenshare", "font.size": 9, "axes.titlesize": 10, "savefig.dpi": 200}
ELSEWHERE = ("distributed", "splitk")  # have programs of their own, plot_NAME
Drawing = tuple[str, str, Callable[[Results], Figure | None]]  # what stands after the report's name, title, function
FIGURES: dict[str, tuple[Drawing, ...]] = {
    "gemm": (("", "GEMM, bf16", figures.draw_gemm),),
    "gemm_corpus": (("", "GEMM, bf16, the corpus of the Stream-K paper", figures.draw_gemm),),
    "attention_prefill": (
        ("", "Attention, bf16, prefill", figures.draw_prefill),
        ("_ragged", "Attention, bf16, causal prefill of requests of uneven lengths", figures.draw_ragged),
    ),
    "attention_decode": (("", "Attention over pages, bf16, decode", figures.draw_decode),),
    "w4a16": (("", "4-bit weights, 16-bit activations", figures.draw_w4a16),),
    "policies": (("", "How the policies deal batches of attention, bf16", figures.draw_policies),),
    "generate": (("", "Generation", figures.draw_speeds),),
}


def draw(report: Report, path: Path, out: Path) -> list[Path]:
    """The figures of a report read from `path`, in the folder `out`; those that it has rows for."""
    if report.name in ELSEWHERE:
        return []
    drawn = []
    usual: Drawing = ("", report.name.replace("_", " "), figures.draw_speeds)
    for suffix, title, function in FIGURES.get(report.name, (usual,)):
        with matplotlib.rc_context(STYLE):
            figure = function(Results(report, path))
            if figure is None:
                continue
            figure.suptitle(f"{title}\n", fontsize=12, x=0.01, ha="left")
            versions = [f"{name} {report.versions[name]}" for name in ("torch", "triton") if name in report.versions]
            machine = ", ".join([report.device, report.date[:10], f"commit {report.commit[:7]}", *versions])
            figure.text(0.012, 1 - 0.32 / figure.get_figheight(), machine, color=FAINT, fontsize=8.5, va="top")
            out.mkdir(parents=True, exist_ok=True)
            drawn.append(out / f"{report.name}{suffix}-{slug(report.device)}.svg")
            figure.savefig(drawn[-1], facecolor="white", metadata={"Date": None})
    return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if drawn, 2 for unreadable input or nothing to draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description="Draw figures from results files.")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the figures [default: docs/images/results]")
    parser.add_argument("paths", nargs="*", metavar="DIR or FILES", help="results [default: benchmarks/results]")
    given = parser.parse_args(arguments)
    try:
        drawn = []
        for file in find_files(given.paths):
            for report in read_reports(file):
                drawn += draw(report, file, given.out)
        if not drawn:
            raise ValueError(
                f"paths: got {' '.join(map(str, given.paths)) or 'no results'}, want files with rows to draw"
            )
        print("\n".join(map(str, drawn)))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.policy_table [FILE]`: the results of `benchmarks.policies` as the Markdown table of docs/performance.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import RESULTS, Report, geomean, read_reports

MEAN = "geometric mean"
Ratios = dict[tuple[str, str], dict[str, float]]  # (phase, batch) -> policy -> time over the best policy's


def read_ratios(report: Report, timing: str) -> Ratios:
    """The rows of one timing ("graph" or "simulated"), the default policy first; the mean of a phase after its batches."""
    found: Ratios = {}
    for row in report.rows:
        if row.kind != "value" or row.timing != timing:
            continue
        place, _, default = row.case.rpartition(", ")
        phase, _, batch = place.partition(", ")
        times = {default: row.ours, **row.peers}
        best = min(times.values())
        found[phase, batch] = {policy: time / best for policy, time in times.items()}
    with_means: Ratios = {}
    for phase in dict.fromkeys(phase for phase, _ in found):
        rows = {key: ratios for key, ratios in found.items() if key[0] == phase}
        with_means |= rows
        policies = next(iter(rows.values()))
        with_means[phase, MEAN] = {p: geomean(ratios[p] for ratios in rows.values()) for p in policies}
    return with_means


def make_table(report: Report) -> str:
    """Markdown of the measured ratios: the least of a row is bold. Raises ValueError without any."""
    rows = read_ratios(report, "graph")
    if not rows:
        raise ValueError(f"report: got {report.name} without measured rows, want results of benchmarks.policies")
    policies = list(next(iter(rows.values())))
    lines = [
        f"| {report.device}, {report.date[:10]} | {' | '.join(name.replace('_', ' ') for name in policies)} |",
        "|---|" + "---:|" * len(policies),
    ]
    for (phase, batch), ratios in rows.items():
        least = min(f"{ratio:.2f}" for ratio in ratios.values())
        cells = [f"**{ratio:.2f}**" if f"{ratio:.2f}" == least else f"{ratio:.2f}" for ratio in ratios.values()]
        lines.append(f"| {phase}, {batch} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if printed, 2 if there is nothing to print."""
    given = [Path(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
    try:
        for file in given or sorted(RESULTS.glob("policies-*.json")):
            for report in read_reports(file):
                print(make_table(report), end="")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

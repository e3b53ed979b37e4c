"""`python -m benchmarks.check [DIR or FILES]`: every row that misses its target; exits 1 if there is one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.results import RESULTS, Report, Row, read_reports


def find_files(arguments: Sequence[str]) -> list[Path]:
    """JSON files of the folders and files named; the project's results if none is. Raises ValueError for a path that is none."""
    files: list[Path] = []
    for path in [Path(argument) for argument in arguments] or [RESULTS]:
        if path.is_dir():
            files += sorted(path.glob("*.json"))
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"{path}: got no such file or folder, want benchmark results")
    return files


def missed_rows(reports: Sequence[Report]) -> list[tuple[Report, Row]]:
    return [(report, row) for report in reports for row in report.rows if row.missed]


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Print the missed rows; 0 if none, 1 if some, 2 for unreadable input."""
    console = console or Console()
    try:
        reports = [
            report
            for file in find_files(sys.argv[1:] if arguments is None else arguments)
            for report in read_reports(file)
        ]
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    num_targets = sum(row.target is not None for report in reports for row in report.rows)
    missed = missed_rows(reports)
    if missed:
        table = Table("benchmark", "device", "case", "unit", "ours", "target")
        for report, row in missed:
            wanted = ("<= " if row.better == "lower" else ">= ") + f"{row.target:g}"
            table.add_row(report.name, report.device, row.case, row.unit, f"{row.ours:.4g}", wanted)
        console.print(table)
    console.print(f"{len(missed)} of {num_targets} targets missed in {len(reports)} reports")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

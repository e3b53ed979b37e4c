"""The command line of a program that draws the reports of one benchmark."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.results import RESULTS, Report, read_reports


def draw_files(
    name: str, draw: Callable[[Report, Path], None], suffix: str, arguments: Sequence[str] | None = None
) -> int:
    """Draw each file's report of benchmark `name` into a picture beside it: 0 if drawn, 2 if there is nothing to draw.

    arguments: files; none: those in results/.
    """
    given = [Path(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
    try:
        files = given or sorted(RESULTS.glob(f"{name}-*.json"))
        if not files:
            raise ValueError(f"{RESULTS}: got no {name}-*.json, want what benchmarks.{name} writes")
        for file in files:
            found = [report for report in read_reports(file) if report.name == name]
            if not found:
                raise ValueError(f"{file}: got no report of {name}, want what benchmarks.{name} writes")
            draw(found[0], file.with_suffix(suffix))
            print(file.with_suffix(suffix))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0

"""Every table, one after another, each in a process of its own: `python -m benchmarks --all --out DIR`.

DIR gets NAME-DEVICE.json of a table that ran through, NAME.log with what it printed, and NAME.part with the rows of one that did
not run through. A table with results of this commit in DIR is not run again, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as Grid

from benchmarks import harness
from benchmarks.results import read_reports, write_json
from benchmarks.tables import TABLES, Table

ROOT = Path(__file__).parents[1]
GRACE = 30.0  # seconds for an interrupted table to write the rows that it has
TAIL = 12  # lines of a failed table's log that are shown


@dataclass(frozen=True)
class Outcome:
    state: str  # "done", "kept", "failed", "out of time" or "left out"
    note: str = ""
    seconds: float = 0.0


def command(table: Table, out: Path) -> list[str]:
    """What measures a table into the file `out`."""
    launch = [sys.executable]
    if table.gpus > 1:
        ranks = 1 << (torch.cuda.device_count().bit_length() - 1)  # the largest power of two
        launch += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return [*launch, "-m", f"benchmarks.{table.name}", "--out", str(out)]


def find_results(table: Table, folder: Path, commit: str) -> Path | None:
    """The table's results of this commit; None too where a commit does not say what was measured."""
    if commit == "unknown" or commit.endswith("-dirty"):
        return None
    for path in sorted(folder.glob(f"{table.name}-*.json")):
        if any((report.name, report.commit) == (table.name, commit) for report in read_reports(path)):
            return path
    return None


def run_table(table: Table, folder: Path, commit: str, seconds: float = math.inf) -> Outcome:
    """Run a table's module for at most that many seconds, and keep what it writes."""
    part, log = folder / f"{table.name}.part", folder / f"{table.name}.log"
    part.unlink(missing_ok=True)
    begin = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command(table, part),
            cwd=ROOT,
            env={**os.environ, "EVENSHARE_COMMIT": commit},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(None if math.isinf(seconds) else seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
    took = time.monotonic() - begin
    kept = f"; its rows are in {part}" if part.exists() else ""
    if code is None:
        return Outcome("out of time", f"stopped after {took:.0f} s{kept}", took)
    if code != 0 or not part.exists():
        reason = f"exit code {code}" if code else "wrote no results"
        return Outcome("failed", f"{reason}, see {log}{kept}", took)
    written = []
    for report in read_reports(part):
        path = folder / report.path.name
        write_json(path, report.to_json())
        written.append(f"{path.name}, {len(report.rows)} rows")
    part.unlink()
    return Outcome("done", ", ".join(written), took)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt what still runs, which lets it write its rows; then end it and what it started."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(tables: Sequence[Table], folder: Path, seconds: float, console: Console) -> dict[str, Outcome]:
    """The outcome of each table, in turn; after `seconds` the running one is stopped and no other begins."""
    folder.mkdir(parents=True, exist_ok=True)
    commit, gpus, end = harness.current_commit(), torch.cuda.device_count(), time.monotonic() + seconds
    if commit == "unknown" or commit.endswith("-dirty"):
        advice = "set EVENSHARE_COMMIT where there is no git" if commit == "unknown" else "commit first to go on later"
        console.print(f"commit {commit}: everything is measured again; {advice}", style="dim", markup=False)
    outcomes: dict[str, Outcome] = {}
    for number, table in enumerate(tables, 1):
        heading = f"[{number}/{len(tables)}] {table.name}"
        known = find_results(table, folder, commit)
        if known is not None:
            outcome = Outcome("kept", f"{known.name} is of this commit")
        elif table.gpus > gpus:
            outcome = Outcome("left out", f"needs {table.gpus} GPU{'s' * (table.gpus > 1)}, {gpus} here")
        elif time.monotonic() >= end:
            outcome = Outcome("out of time", "not begun")
        else:
            if not console.is_terminal:  # where a status line is not seen
                console.print(f"{heading}: begins", style="dim", markup=False)
            with console.status(heading):
                outcome = run_table(table, folder, commit, end - time.monotonic())
        outcomes[table.name] = outcome
        style = "red" if outcome.state in ("failed", "out of time") else ""
        took = f" in {outcome.seconds:.0f} s" if outcome.state == "done" else ""
        console.print(f"{heading}: {outcome.state}{took}: {outcome.note}", style=style, markup=False, soft_wrap=True)
        if outcome.state == "failed":
            lines = (folder / f"{table.name}.log").read_text(errors="replace").splitlines()[-TAIL:]
            console.print("\n".join(f"    {line}" for line in lines), style="dim", markup=False, soft_wrap=True)
    return outcomes


def list_tables(console: Console) -> None:
    grid = Grid("table", "GPUs", "what")
    for table in TABLES:
        grid.add_row(table.name, str(table.gpus), table.about)
    console.print(grid)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every table has results or cannot run here, 1 if one failed or the time was too short, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="some of them; --list names them")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument("--list", action="store_true", help="say which there are, and run none")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results of one machine")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        metavar="S",
        help="for all together; what is left over is another call's",
    )
    options = parser.parse_args(arguments)
    console = harness.make_console()
    if options.list:
        list_tables(console)
        return 0
    known = {table.name: table for table in TABLES}
    unknown = [name for name in options.tables if name not in known]
    problem = ""
    if unknown:
        problem = f"tables: got {', '.join(unknown)}, want some of {', '.join(known)}"
    elif options.all == bool(options.tables):
        problem = f"tables: got {'some and --all' if options.all else 'none'}, want names or --all"
    elif options.out is None:
        problem = "out: got none, want a folder for the results"
    elif not options.seconds > 0:
        problem = f"seconds: got {options.seconds:g}, want more than 0"
    if problem:
        console.print(problem, style="red", markup=False, soft_wrap=True)
        return 2
    tables = TABLES if options.all else [known[name] for name in dict.fromkeys(options.tables)]
    try:
        outcomes = run_all(tables, options.out.resolve(), options.seconds, console)
    except (OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    states = [outcome.state for outcome in outcomes.values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    console.print(f"{counts}; python -m benchmarks.check {options.out} lists missed targets", soft_wrap=True)
    return 1 if {"failed", "out of time"} & set(states) else 0


if __name__ == "__main__":
    sys.exit(main())

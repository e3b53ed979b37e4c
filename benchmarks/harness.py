"""What every benchmark shares: its command line, the ceilings, peers side by side, the table and the JSON."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.ceilings import measure_ceilings
from benchmarks.peers import relative_error, select_peers
from benchmarks.results import Report, Row, write_report
from benchmarks.timing import as_events, as_graph, time_events, time_graph, time_host, time_interleaved

PACKAGES = ("evenshare", "torch", "triton", "flashinfer-python", "humming", "gemlite", "transformers")
Call = Callable[[], torch.Tensor]
Calls = Call | Sequence[Call]
LOG_WIDTH = 160
MAX_PEER_ERROR = 0.05  # a peer further off than this does other work


class Titled(Protocol):
    """One line of a table, or a few that belong together."""

    @property
    def title(self) -> str: ...


Case = TypeVar("Case", bound=Titled)


class Bench:
    """Collects the rows of one benchmark."""

    def __init__(
        self,
        device: torch.device,
        ceilings: dict[str, float],
        peers: Sequence[str],
        console: Console,
        only: str = "",
    ) -> None:
        self.device = device
        self.ceilings = ceilings
        self.peers = list(peers)
        self.console = console
        self.only = only
        self.rows: list[Row] = []
        self.failed: list[str] = []  # titles

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        return row

    def wants(self, title: str) -> bool:
        """Whether `--only` leaves this case in."""
        return self.only in title

    def measure_all(self, cases: Iterable[Case], measure: Callable[[Bench, Case], object]) -> None:
        """Every wanted case. One that fails is named, and the others are measured all the same."""
        for case in cases:
            if not self.wants(case.title):
                continue
            try:
                measure(self, case)
            except Exception as failure:
                self.failed.append(case.title)
                self.console.print(f"{case.title}: failed: {failure!r:.500}", style="red", markup=False)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def warm_up(self, calls: Sequence[Call]) -> None:
        """Make these calls once, many at a time: Triton compiles for seconds each, nearly all of it outside the interpreter's lock.
        One that fails is left to the measurement."""

        def attempt(call: Call) -> None:
            try:
                with torch.cuda.device(
                    -1 if self.device.index is None else self.device
                ):  # each thread has one of its own
                    call()
            except Exception as failure:
                self.console.print(f"warming up: {failure!r:.500}", style="dim", markup=False)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(attempt, calls))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def compare(
        self,
        case: str,
        ours: Calls,
        peers: Callable[[str], Calls | None],
        reference: torch.Tensor,
        max_error: float,
        *,
        variants: Mapping[str, Calls] | None = None,
        sample: Callable[[torch.Tensor], torch.Tensor] = lambda output: output,
        timing: str = "graph",
        flops: float | None = None,
        bytes: float | None = None,
        target: float | None = None,
    ) -> Row:
        """Check `ours` and each peer against `reference`, then time them in turn: one row in microseconds.

        ours: a call that returns its whole output, or several that rotate over inputs, the first of which `reference` is for.
        peers: name -> the same or None. variants: other ways of ours to do the same; they stand beside the peers.
        sample: the part of the output that `reference` holds. max_error: of `ours` and its variants, relative, in the Frobenius
        norm. A peer that fails is named and left out.
        Raises RuntimeError if ours or a variant is wrong or leaves a NaN: a wrong result has no speed.
        """
        prepare = as_graph if timing == "graph" else as_events
        candidates = {}
        for name, calls in {"ours": ours, **(variants or {})}.items():
            error = _error(calls, reference, sample)
            if error > max_error:
                raise RuntimeError(f"{case}: {name}: relative error {error:.2e}, want at most {max_error:.0e}")
            candidates[name] = prepare(calls)
        for name in self.peers:
            try:
                found = peers(name)
                if found is None:
                    continue
                error = _error(found, reference, sample)
                if error > MAX_PEER_ERROR:
                    raise RuntimeError(f"relative error {error:.1e}")
                candidates[name] = prepare(found)
            except Exception as failure:
                self.console.print(f"{case}: {name} left out: {failure!r:.200}", style="dim", markup=False)
        times = time_interleaved(candidates)
        own = times.pop("ours")
        return self.add(
            Row(
                case,
                "us",
                "lower",
                own.median,
                peers={name: timing.median for name, timing in times.items()},
                target=target,
                timing=timing,
                spread=own.spread,
                flops=flops,
                bytes=bytes,
            )
        )

    def add_time(
        self, case: str, call: Callable[[], object], timing: str = "graph", target: float | None = None
    ) -> Row:
        """Time a call that has no peers and no result to check."""
        own = time_graph(call) if timing == "graph" else time_events(call)
        return self.add(Row(case, "us", "lower", own.median, timing=timing, spread=own.spread, target=target))

    def add_host_time(self, case: str, calls: Mapping[str, Callable[[], object]]) -> Row:
        """Host time of a call of "ours" beside the others', in turn."""
        times = time_host(calls)
        own = times.pop("ours")
        peers = {name: timing.median for name, timing in times.items()}
        return self.add(Row(case, "us", "lower", own.median, peers=peers, timing="wall", spread=own.spread))

    def add_rate(self, row: Row, unit: str, target: float | None = None) -> Row:
        """A row in microseconds as TFLOP/s or TB/s (10^12), as a row of its own."""
        work = {"TFLOP/s": row.flops, "TB/s": row.bytes}[unit]
        if work is None or row.unit != "us":
            raise ValueError(f"row: got {row.case} in {row.unit}, want microseconds and the work of {unit}")
        peers = {name: work / us * 1e-6 for name, us in row.peers.items()}
        return self.add(
            Row(row.case, unit, "higher", work / row.ours * 1e-6, peers=peers, target=target, timing=row.timing)
        )

    def add_speed(self, row: Row, of: str, to: str, target: float | None = None) -> Row | None:
        """How many times as fast `of` is as `to`, each "ours" or one of the row's peers, as a row of its own.

        None if one of them was not measured.
        """
        times = {**row.peers, "ours": row.ours}
        if of not in times or to not in times:
            return None
        case = f"{row.case}: speed, {of} / {to}"
        return self.add(Row(case, "x", "higher", times[to] / times[of], "ratio", target=target, timing=row.timing))

    def add_ratio(self, row: Row, ceiling: str, target: float | None = None) -> Row:
        """The share of a ceiling (a key of `ceilings`) that a row in microseconds reaches, as a row of its own."""
        work = row.bytes if ceiling.endswith("tb_s") else row.flops
        if work is None or row.unit != "us":
            raise ValueError(f"row: got {row.case} in {row.unit}, want microseconds and the work of {ceiling}")
        reached = work / row.ours * 1e-6 / self.ceilings[ceiling]
        peers = {name: work / us * 1e-6 / self.ceilings[ceiling] for name, us in row.peers.items()}
        case, unit = f"{row.case}, share of {ceiling}", "x"
        return self.add(Row(case, unit, "higher", reached, kind="ratio", peers=peers, target=target, timing=row.timing))


def each(calls: Iterable[Call | None]) -> list[Call] | None:
    """The calls that rotate over inputs; None if the peer has none."""
    found = []
    for call in calls:
        if call is None:
            return None
        found.append(call)
    return found


def _error(calls: Calls, reference: torch.Tensor, sample: Callable[[torch.Tensor], torch.Tensor]) -> float:
    output = (calls if callable(calls) else calls[0])()
    if output.isnan().any():
        return math.inf
    return relative_error(sample(output), reference)


def make_console() -> Console:
    """Of the terminal's width; a log gets lines wide enough for a table."""
    console = Console()
    return console if console.is_terminal else Console(width=LOG_WIDTH)


def show(console: Console, title: str, rows: Sequence[Row]) -> None:
    """One line a case: us, TFLOP/s, GB/s, and how many times better than the best peer."""
    table = Table("case", title=title)
    for name in ("ours", "unit", "spread", "TFLOP/s", "GB/s", "best peer", "lead", "target"):
        table.add_column(name, justify="right")
    for row in rows:
        rate = [f"{work / row.ours * scale:.0f}" if work and row.unit == "us" else ""
                for work, scale in ((row.flops, 1e-6), (row.bytes, 1e-3))]  # fmt: skip
        best, lead = row.best_peer, row.lead
        table.add_row(
            row.case,
            f"{row.ours:.4g}",
            row.unit,
            "" if row.spread is None else f"{row.spread:.1%}",
            *rate,
            "" if best is None else f"{best[1]:.4g} {best[0]}",
            "" if lead is None else f"{lead:.2f}",
            "" if row.target is None else f"{row.target:g}" + (" missed" if row.missed else ""),
            style="red" if row.missed else "",
        )
    console.print(table)


def describe_versions() -> dict[str, str]:
    """Python and the packages that the figures depend on, as far as installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def current_commit() -> str:
    """EVENSHARE_COMMIT where the sources come without git; otherwise git's, with "-dirty" if files differ from it."""
    given = os.environ.get("EVENSHARE_COMMIT")
    if given:
        return given
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def describe_driver() -> str:
    """The NVIDIA driver's version; "" without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return lines[0].strip() if lines else ""


def make_report(name: str, device: str, ceilings: dict[str, float], rows: list[Row]) -> Report:
    """The record of `rows`, with this machine's description."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Report(name, device, describe_driver(), describe_versions(), current_commit(), date, ceilings, rows)


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The command line that all benchmarks share."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument(
        "--peers", nargs="*", help="others to measure side by side; if left out, the usual ones installed"
    )
    parser.add_argument("--out", type=Path, help="one file for everything, instead of results/NAME-DEVICE.json")
    parser.add_argument(
        "--only", default="", metavar="WORD", help="cases whose title holds WORD; written only where --out says"
    )
    return parser


def main(
    name: str,
    description: str | None,
    fill: Callable[[Bench], None],
    arguments: Sequence[str] | None = None,
    peers: Iterable[str] | None = None,
) -> int:
    """`measure` with the shared command line."""
    return measure(name, make_parser(name, description).parse_args(arguments), fill, peers)


def measure(
    name: str, options: argparse.Namespace, fill: Callable[[Bench], None], usual_peers: Iterable[str] | None = None
) -> int:
    """Run one benchmark on the current GPU: 0 if done, 1 if a case failed, 2 if it cannot run here.

    usual_peers: those measured unless `--peers` names others; None: all. Rows measured before a failure are kept.
    """
    console = make_console()
    try:
        peers, absent = select_peers(usual_peers if options.peers is None else options.peers)
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    if not torch.cuda.is_available():
        console.print(f"benchmarks.{name} needs a CUDA GPU, and torch sees none here", style="red", markup=False)
        return 2
    if absent:
        console.print(f"not installed: {', '.join(absent)}", style="dim")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    ceilings = measure_ceilings(device)
    console.print("ceilings: " + ", ".join(f"{key} {value:.4g}" for key, value in ceilings.items()))
    bench = Bench(device, ceilings, peers, console, options.only)
    try:
        fill(bench)
    finally:
        show(console, name, bench.rows)
        if options.only and options.out is None:
            console.print("not written: --only measures a part, and --out is left out")
        else:
            report = make_report(name, torch.cuda.get_device_name(device), ceilings, bench.rows)
            console.print(f"written: {write_report(report, options.out)}")
    if bench.failed:
        console.print(f"failed: {', '.join(bench.failed)}", style="red", markup=False)
    return 1 if bench.failed else 0


def run(name: str, description: str | None, fill: Callable[[Bench], None], peers: Iterable[str] | None = None) -> None:
    """`main` as the end of a benchmark's module."""
    sys.exit(main(name, description, fill, peers=peers))

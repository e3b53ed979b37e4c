"""What the commands of this package read from the command line, and how they stop."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import typer

MAX_REQUESTS = 100_000


def parse_lengths(name: str, text: str) -> list[int]:
    """Parse "65536,15x256": 15 requests of 256. Raises ValueError."""
    lengths: list[int] = []
    for part in text.split(","):
        count, cross, length = part.strip().rpartition("x")
        repeats = parse_integer(name, count, text) if cross else 1
        check_at_least(1, name, repeats)
        lengths += [parse_integer(name, length, text)] * min(repeats, MAX_REQUESTS + 1)
        if len(lengths) > MAX_REQUESTS:
            raise ValueError(f"{name}: got more than {MAX_REQUESTS} requests, want fewer")
    return lengths


def parse_integer(name: str, part: str, text: str) -> int:
    if not (part.isascii() and part.isdigit()) or len(part) > 9:
        raise ValueError(f"{name}: got {text!r}, want whole numbers below 1e9 by commas")
    return int(part)


def check_at_least(least: int, name: str, value: int) -> None:
    if value < least:
        raise ValueError(f"{name}: got {value}, want {least} or more")


def describe_lengths(lengths: list[int]) -> str:
    """65536 + 15 x 256"""
    runs = [(n, len(list(run))) for n, run in groupby(lengths)]
    shown = " + ".join(f"{n}" if count == 1 else f"{count} x {n}" for n, count in runs[:6])
    return shown + (" + ..." if runs[6:] else "")


@contextmanager
def writing(name: str, path: Path) -> Iterator[None]:
    """Stop the command if a file cannot be drawn or written."""
    try:
        yield
    except ModuleNotFoundError as error:
        stop(f"{(error.name or '').split('.')[0]} is not installed: pip install evenshare[report]", 1)
    except OSError as error:
        stop(f"{name}: cannot write {path}: {error.strerror or error}", 2)


def stop(message: str, exit_code: int) -> None:
    typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
    print(message, file=sys.stderr)
    raise typer.Exit(exit_code)

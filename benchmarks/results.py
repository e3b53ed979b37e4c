"""The record that a benchmark leaves: who measured what, on which machine, against whom.

`python -m benchmarks.results FILE` splits a file that `--out` collected into results/NAME-DEVICE.json.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
KINDS = ("value", "ratio", "geomean", "percentile")
BETTER = ("lower", "higher")
TIMINGS = ("events", "graph", "wall", "simulated")


@dataclass(frozen=True)
class Row:
    """One figure of a table. Ratios to peers and summaries are rows of their own."""

    case: str
    unit: str
    better: str  # "lower" or "higher"
    ours: float
    kind: str = "value"
    peers: dict[str, float] = field(default_factory=dict)  # in the same unit
    target: float | None = None  # what `ours` must reach; absent from the file if None
    timing: str = "events"  # "events", "graph" (a replayed CUDA graph), "wall" (the host's clock) or "simulated"
    spread: float | None = None  # half the range between the quartiles, relative to the median
    flops: float | None = None  # operations of one call, for the table's TFLOP/s
    bytes: float | None = None  # least memory traffic of one call, for the table's GB/s

    def __post_init__(self) -> None:
        for name, known in (("kind", KINDS), ("better", BETTER), ("timing", TIMINGS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, want one of {', '.join(known)}")

    @property
    def missed(self) -> bool:
        """True if there is a target and `ours` does not reach it; NaN reaches none."""
        if self.target is None:
            return False
        return not (self.ours <= self.target if self.better == "lower" else self.ours >= self.target)

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """(name, figure) of the best peer."""
        known = {name: value for name, value in self.peers.items() if not math.isnan(value)}
        if not known:
            return None
        name = (min if self.better == "lower" else max)(known, key=lambda peer: known[peer])
        return name, known[name]

    @property
    def lead(self) -> float | None:
        """How many times better than the best peer: above 1 is ahead."""
        best = self.best_peer
        if best is None or not (self.ours > 0 and best[1] > 0):
            return None
        return best[1] / self.ours if self.better == "lower" else self.ours / best[1]

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Report:
    """All rows of one benchmark on one machine."""

    name: str
    device: str
    driver: str
    versions: dict[str, str]
    commit: str
    date: str
    ceilings: dict[str, float]
    rows: list[Row]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [row.to_json() for row in self.rows]}

    @staticmethod
    def from_json(record: dict[str, Any]) -> Report:
        return Report(**{**record, "rows": [Row(**row) for row in record["rows"]]})

    @property
    def path(self) -> Path:
        """Where the report is kept: results/NAME-DEVICE.json."""
        return RESULTS / f"{self.name}-{slug(self.device)}.json"


def slug(device: str) -> str:
    """A device's name as part of a file name."""
    return "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())


def read_reports(path: Path) -> list[Report]:
    """The reports of a file: one report, or the {"reports": [...]} that `--out` collects.

    Raises ValueError naming the file if it holds neither.
    """
    try:
        content = json.loads(path.read_text())
        records = content.get("reports", [content])
        return [Report.from_json(record) for record in records]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: got no benchmark report ({error}), want the JSON that a benchmark writes") from error


def write_report(report: Report, out: Path | None = None) -> Path:
    """Write to results/NAME-DEVICE.json, or into `out` beside the reports of other benchmarks already there."""
    if out is None:
        write_json(report.path, report.to_json())
        return report.path
    others = read_reports(out) if out.exists() else []
    kept = [other for other in others if (other.name, other.device) != (report.name, report.device)]
    write_json(out, {"reports": [other.to_json() for other in (*kept, report)]})
    return out


def unpack(path: Path) -> list[Path]:
    """Split a file that `--out` collected into results/NAME-DEVICE.json files; returns their paths."""
    return [write_report(report) for report in read_reports(path)]


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive values; NaN if there are none."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def percentile(values: Iterable[float], percent: float) -> float:
    """The value that `percent` of 100 values do not exceed, interpolated between neighbours; NaN if there are none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


if __name__ == "__main__":
    for written in [target for argument in sys.argv[1:] for target in unpack(Path(argument))]:
        print(written)

"""The record of a benchmark and the check of its targets."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import check
from benchmarks.results import Report, Row, geomean, percentile, read_reports, slug, unpack, write_report


def make_report(*rows: Row, name: str = "gemm", device: str = "NVIDIA H200") -> Report:
    return Report(name, device, "580.1", {"torch": "2.13.0"}, "abc", "2026-01-01", {"read_tb_s": 4.3}, list(rows))


@pytest.mark.parametrize(
    ("better", "ours", "target", "missed"),
    [
        ("lower", 9.0, 10.0, False),
        ("lower", 10.0, 10.0, False),
        ("lower", 11.0, 10.0, True),
        ("higher", 11.0, 10.0, False),
        ("higher", 9.0, 10.0, True),
        ("higher", math.nan, 10.0, True),
        ("lower", math.nan, 10.0, True),
        ("higher", 0.0, None, False),
    ],
)
def test_missed(better: str, ours: float, target: float | None, missed: bool) -> None:
    assert Row("case", "us", better, ours, target=target).missed is missed


def test_lead_is_above_one_for_the_better() -> None:
    peers = {"slow": 30.0, "fast": 20.0, "failed": math.nan}
    assert Row("case", "us", "lower", 10.0, peers=peers).best_peer == ("fast", 20.0)
    assert Row("case", "us", "lower", 10.0, peers=peers).lead == 2.0
    assert Row("case", "TFLOP/s", "higher", 15.0, peers=peers).best_peer == ("slow", 30.0)
    assert Row("case", "TFLOP/s", "higher", 15.0, peers=peers).lead == 0.5
    assert Row("case", "us", "lower", 10.0).lead is None


@pytest.mark.parametrize(("field", "value"), [("kind", "mean"), ("better", "faster"), ("timing", "cpu")])
def test_unknown_words_are_refused(field: str, value: str) -> None:
    arguments: dict[str, Any] = {"case": "c", "unit": "us", "better": "lower", "ours": 1.0, field: value}
    with pytest.raises(ValueError, match=f"{field}: got '{value}', want one of"):
        Row(**arguments)


def test_the_file_has_the_agreed_form(tmp_path: Path) -> None:
    report = make_report(
        Row("a", "us", "lower", 1.0, peers={"cublas": 2.0}), Row("b", "x", "higher", 0.9, "ratio", target=0.8)
    )
    content = report.to_json()
    assert set(content) == {"name", "device", "driver", "versions", "commit", "date", "ceilings", "rows"}
    common = {"case", "kind", "unit", "better", "ours", "peers", "timing"}
    assert [set(row) for row in content["rows"]] == [common, common | {"target"}]
    assert Report.from_json(json.loads(json.dumps(content))) == report
    assert report.path.name == "gemm-nvidia-h200.json"


def test_slug() -> None:
    assert slug("AMD EPYC 9B14 (2 cores)") == "amd-epyc-9b14-2-cores"


def test_out_collects_and_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "all.json"
    first, second = make_report(Row("a", "us", "lower", 1.0)), make_report(name="w4a16")
    again = make_report(Row("a", "us", "lower", 0.5))
    for report in (first, second, again):
        assert write_report(report, out) == out
    assert read_reports(out) == [second, again]
    monkeypatch.setattr("benchmarks.results.RESULTS", tmp_path / "results")
    paths = unpack(out)
    assert [path.name for path in paths] == ["w4a16-nvidia-h200.json", "gemm-nvidia-h200.json"]
    assert read_reports(paths[1]) == [again]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"reports": [{"name": "x"}]}'])
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.json: got no benchmark report"):
        read_reports(path)


def test_geomean_and_percentile() -> None:
    assert geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(geomean([]))
    assert [percentile([3.0, 1.0, 2.0], percent) for percent in (0, 25, 50, 100)] == [1.0, 1.5, 2.0, 3.0]
    assert math.isnan(percentile([], 50))


def run_check(*arguments: str) -> tuple[int, str]:
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    code = check.main(arguments, console)
    return code, console.export_text()


def test_check_lists_every_missed_row(tmp_path: Path) -> None:
    rows = (
        Row("slow case", "us", "lower", 12.0, target=10.0),
        Row("fast case", "us", "lower", 8.0, target=10.0),
        Row("free case", "us", "lower", 99.0),
        Row("low share", "x", "higher", 0.5, "ratio", target=0.9),
    )
    path = write_report(make_report(*rows), tmp_path / "gemm.json")
    for argument in (path, tmp_path):
        code, text = run_check(str(argument))
        assert code == 1
        assert "slow case" in text
        assert "low share" in text
        assert ">= 0.9" in text
        assert "fast case" not in text
        assert "free case" not in text
        assert "2 of 3 targets missed in 1 reports" in text


def test_check_passes_and_names_what_it_cannot_read(tmp_path: Path) -> None:
    write_report(make_report(Row("a", "us", "lower", 1.0, target=2.0)), tmp_path / "good.json")
    assert run_check(str(tmp_path)) == (0, "0 of 1 targets missed in 1 reports\n")
    code, text = run_check(str(tmp_path / "absent"))
    assert code == 2
    assert "absent: got no such file or folder" in text

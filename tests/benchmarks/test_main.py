"""All tables in turn, with processes that only pretend to measure."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from textwrap import indent

import pytest
import torch

from benchmarks import __main__ as main
from benchmarks import gemm_corpus
from benchmarks.results import read_reports
from benchmarks.tables import TABLES, Table

TOOLS = {"__main__", "check", "cold_start", "plot", "plot_distributed", "plot_splitk", "policy_table", "results"}
WRITE = """
from benchmarks.results import Report, Row, write_report
import os, pathlib, sys
rows = [Row("a", "us", "lower", 1.0)]
report = Report({name!r}, "Some GPU", "", {{}}, os.environ["EVENSHARE_COMMIT"], "2026-01-02", {{}}, rows)
write_report(report, pathlib.Path({out!r}))
"""
ENDS = {
    "good": WRITE,
    "other": WRITE,
    "bad": WRITE + "print('this is wrong'); sys.exit(1)",
    "silent": "",
    "slow": "import time\ntry:\n    time.sleep(60)\nfinally:\n" + indent(WRITE, "    "),
}


@pytest.fixture(autouse=True)
def _tables(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(table: Table, out: Path) -> list[str]:
        return [sys.executable, "-c", ENDS[table.name].format(name=table.name, out=str(out))]

    monkeypatch.setattr(main, "command", command)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("EVENSHARE_COMMIT", "abc")


def use(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(main, "TABLES", [Table(name) for name in names])


def test_every_table_is_on_the_list() -> None:
    folder = Path(main.__file__).parent
    runnable = {file.stem for file in folder.glob("*.py") if '__name__ == "__main__"' in file.read_text()}
    assert runnable - TOOLS == {table.name for table in TABLES}
    assert len({table.name for table in TABLES}) == len(TABLES)
    assert all(table.about for table in TABLES)


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    assert main.command(Table("gemm"), Path("a")) == [sys.executable, "-m", "benchmarks.gemm", "--out", "a"]
    assert "--nproc-per-node=4" in main.command(Table("distributed", 2), Path("a"))


def test_results_are_kept_and_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, "good", "other")
    arguments = ["--all", "--out", str(tmp_path / "new")]
    assert main.main(arguments) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "good-some-gpu.json",
        "good.log",
        "other-some-gpu.json",
        "other.log",
    ]
    (report,) = read_reports(tmp_path / "new" / "good-some-gpu.json")
    assert (report.name, report.commit) == ("good", "abc")
    output = capsys.readouterr().out
    assert "[1/2] good: done" in output
    assert "2 done" in output

    assert main.main(arguments) == 0
    assert "2 kept" in capsys.readouterr().out
    for commit in ("abd", "abc-dirty", "abc-dirty"):
        monkeypatch.setenv("EVENSHARE_COMMIT", commit)
        assert main.main([*arguments[1:], "good"]) == 0
        assert "1 done" in capsys.readouterr().out


def test_a_failing_table_does_not_stop_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, "bad", "silent", "good")
    assert main.main(["--all", "--out", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "[1/3] bad: failed: exit code 1" in output
    assert "this is wrong" in output
    assert "silent: failed: wrote no results" in output
    assert "2 failed, 1 done" in output
    assert [row.case for row in read_reports(tmp_path / "bad.part")[0].rows] == ["a"]
    assert main.main(["--all", "--out", str(tmp_path)]) == 1
    assert "2 failed, 1 kept" in capsys.readouterr().out


def test_the_time_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, "slow", "good")
    assert main.main(["--all", "--out", str(tmp_path), "--seconds", "2"]) == 1
    output = capsys.readouterr().out
    assert "slow: out of time: stopped after" in output
    assert "good: out of time: not begun" in output
    assert len(read_reports(tmp_path / "slow.part")) == 1  # what it had
    assert not list(tmp_path.glob("*.json"))


def test_what_cannot_run_here_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "TABLES", [Table("good", 2), Table("other", 0)])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main.main(["--all", "--out", str(tmp_path)]) == 0
    assert "good: left out: needs 2 GPUs, 0 here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "tables: got none"),
        (["--all", "gemm", "--out", "x"], "tables: got some and --all"),
        (["cutlass", "--out", "x"], "tables: got cutlass, want some of gemm, attention_prefill"),
        (["--all"], "out: got none"),
        (["--all", "--out", "x", "--seconds", "0"], "seconds: got 0"),
        (["--all", "--out", os.devnull], os.devnull),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(arguments) == 2
    assert message in capsys.readouterr().out


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--list"]) == 0
    output = capsys.readouterr().out
    assert all(table.name in output for table in TABLES)


def test_the_corpus_lies_beside_its_results(tmp_path: Path) -> None:
    assert (
        gemm_corpus.times_file("gemm_corpus", "Some GPU", tmp_path / "a.part") == tmp_path / "gemm_corpus-some-gpu.csv"
    )
    assert gemm_corpus.times_file("gemm_corpus", "Some GPU", None).parent.name == "results"

"""The harness on CPU tensors with a clock of its own, and the products' references."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import gemm, harness, peers
from benchmarks.ceilings import read_words
from benchmarks.results import Row, read_reports


def test_compare_times_what_is_right(bench: harness.Bench) -> None:
    want = torch.tensor([1.0, 2.0])

    def peer(name: str) -> Callable[[], torch.Tensor] | None:
        return {"cublas": lambda: want, "flex": lambda: 2 * want}[name]

    row = bench.compare("case", lambda: want, peer, want, 1e-6, flops=1e6, bytes=4e7)
    assert row.ours == 20.0
    assert row.peers == {"cublas": 20.0}  # flex computes something else
    assert "flex left out" in bench.console.export_text()
    ratio = bench.add_ratio(row, "read_tb_s", target=0.9)
    assert ratio.ours == pytest.approx(0.5)  # 4e7 bytes in 20 us are 2 TB/s
    assert ratio.peers == pytest.approx({"cublas": 0.5})
    assert ratio.missed
    assert bench.add_ratio(row, "matmul_bf16_tflop_s").ours == pytest.approx(0.05 / 800)
    assert bench.rows[:2] == [row, ratio]


def test_warming_up_calls_all_and_goes_on_after_a_failure(bench: harness.Bench) -> None:
    called: list[int] = []

    def call(i: int) -> torch.Tensor:
        if i == 1:
            raise ValueError("no such tile")
        called.append(i)
        return torch.empty(0)

    bench.warm_up([partial(call, i) for i in range(20)])
    assert sorted(called) == [0, *range(2, 20)]
    assert "no such tile" in bench.console.export_text()


@pytest.mark.parametrize("wrong", [torch.tensor([1.0, 2.1]), torch.tensor([1.0, math.nan])])
def test_compare_refuses_a_wrong_result(bench: harness.Bench, wrong: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="case: ours: relative error"):
        bench.compare("case", lambda: wrong, lambda name: None, torch.tensor([1.0, 2.0]), 1e-3)
    assert bench.rows == []


def test_compare_refuses_nan_outside_the_sample(bench: harness.Bench) -> None:
    output = torch.tensor([1.0, math.nan])
    with pytest.raises(RuntimeError, match="relative error inf"):
        bench.compare("case", lambda: output, lambda name: None, output[:1], 1e-3, sample=lambda y: y[:1])


def test_a_wrong_variant_is_refused_and_named(bench: harness.Bench) -> None:
    want = torch.tensor([1.0, 2.0])
    row = bench.compare("case", lambda: want, lambda name: None, want, 1e-6, variants={"page 1": lambda: want})
    assert row.peers == {"page 1": 20.0}
    with pytest.raises(RuntimeError, match="case: page 1: relative error"):
        bench.compare("case", lambda: want, lambda name: None, want, 1e-6, variants={"page 1": lambda: 1.01 * want})


def test_rates_and_speeds_are_rows_of_their_own(bench: harness.Bench) -> None:
    row = Row("case", "us", "lower", 20.0, peers={"cublas": 30.0}, flops=1e10, bytes=4e7, timing="graph")
    rate = bench.add_rate(row, "TFLOP/s", target=400)
    assert (rate.ours, rate.peers, rate.missed) == (pytest.approx(500.0), pytest.approx({"cublas": 10e3 / 30}), False)
    assert bench.add_rate(row, "TB/s").ours == pytest.approx(2.0)
    speed = bench.add_speed(row, "ours", "cublas", target=1.6)
    assert speed is not None
    assert (speed.case, speed.ours, speed.missed) == ("case: speed, ours / cublas", 1.5, True)
    assert bench.add_speed(row, "cublas", "ours").ours == pytest.approx(2 / 3)  # type: ignore[union-attr]
    assert bench.add_speed(row, "ours", "flex") is None
    with pytest.raises(ValueError, match="want microseconds and the work of TFLOP/s"):
        bench.add_rate(Row("case", "us", "lower", 1.0), "TFLOP/s")


def test_a_failed_case_leaves_the_others(bench: harness.Bench) -> None:
    @dataclass(frozen=True)
    class Case:
        title: str

    def measure(bench: harness.Bench, case: Case) -> None:
        if case.title == "two":
            raise RuntimeError("illegal address")
        bench.add(Row(case.title, "us", "lower", 1.0))

    bench.measure_all([Case("one"), Case("two"), Case("three")], measure)
    assert [row.case for row in bench.rows] == ["one", "three"]
    assert bench.failed == ["two"]
    assert "two: failed" in bench.console.export_text()
    bench.only = "ree"
    bench.measure_all([Case("one"), Case("three")], measure)
    assert [row.case for row in bench.rows] == ["one", "three", "three"]


def test_ratio_needs_the_work(bench: harness.Bench) -> None:
    with pytest.raises(ValueError, match="want microseconds and the work of read_tb_s"):
        bench.add_ratio(Row("case", "us", "lower", 1.0), "read_tb_s")


def test_table_has_rates_and_lead(bench: harness.Bench) -> None:
    console = Console(record=True, width=200)
    row = Row("case", "us", "lower", 10.0, peers={"cublas": 15.0}, flops=5e9, bytes=3e7, target=5.0)
    harness.show(console, "title", [row])
    text = console.export_text()
    for cell in ("case", "500", "3000", "15 cublas", "1.50", "5 missed"):
        assert cell in text


def test_peers_are_chosen_by_name() -> None:
    present, absent = peers.select_peers(["cublas", "flashinfer", "sdpa-cudnn"])
    assert present[0] == "cublas"
    assert "flashinfer" in present + absent
    with pytest.raises(ValueError, match="peers: got cutlass, want some of cublas"):
        peers.select_peers(["cutlass"])
    assert peers.select_peers([]) == ([], [])


@pytest.mark.parametrize(
    "name", ["attention_decode", "attention_mixed", "attention_prefill", "gemm", "plan", "splitk", "w4a16"]
)
def test_without_a_gpu_it_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fill = importlib.import_module(f"benchmarks.{name}").fill
    assert harness.main(name, None, fill, ["--out", str(tmp_path / "x.json")]) == 2
    assert f"benchmarks.{name} needs a CUDA GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert harness.main(name, None, fill, ["--peers", "cutlass"]) == 2


def test_commit_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSHARE_COMMIT", "0123abc")
    assert harness.make_report("gemm", "device", {}, []).commit == "0123abc"


def test_read_kernel_reads_every_word(device: torch.device) -> None:
    words = torch.randint(-1000, 1000, (40 * 64,), dtype=torch.int32, device=device)
    sums = torch.zeros(7, dtype=torch.int32, device=device)
    read_words(words, sums, 64, 1)
    difference = int(sums.sum(dtype=torch.int64)) - int(words.sum(dtype=torch.int64))
    assert difference % 2**32 == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_benchmark_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "SHAPES", [gemm.Case(64, 128, 256)])
    for table in ("DECODE", "SCALED", "GROUPED"):
        monkeypatch.setattr(gemm, table, [])
    out = tmp_path / "out.json"
    assert harness.main("gemm", None, gemm.fill, ["--peers", "cublas", "--out", str(out)]) == 0
    (report,) = read_reports(out)
    assert report.ceilings["read_tb_s"] > 0.1
    assert [row.kind for row in report.rows] == ["value", "geomean"]
    assert report.rows[0].peers["cublas"] > 0

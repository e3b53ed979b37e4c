"""The table of dense products with small shapes on the CPU: what is measured against whom."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gemm, harness
from benchmarks.gemm import Case, Grouped, Scaled


@pytest.fixture(autouse=True)
def _few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "copies_past_l2", lambda size: 2)
    gemm.make_weights.cache_clear()


def test_a_case(bench: harness.Bench) -> None:
    row = gemm.measure(bench, Case(24, 40, 64))
    assert row.case == "24x40x64"
    assert row.peers == {"cublas": 20.0}
    assert row.flops == 2 * 24 * 40 * 64
    assert row.bytes == 2 * (24 * 64 + 40 * 64 + 24 * 40)


def test_decoding_is_held_against_the_read_ceiling(bench: harness.Bench) -> None:
    row = gemm.measure_decode(bench, Case(1, 4096, 64, "a model "))
    share = bench.rows[1]
    assert row.bytes is not None
    assert share.ours == pytest.approx(row.bytes / 20.0 * 1e-6 / 4.0)


@pytest.mark.parametrize("scales", ["tensors", "rows", "blocks"])
def test_fp8(bench: harness.Bench, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is checked against the numbers that codes and scales stand for."""
    monkeypatch.setattr(gemm.peers, "scaled_matmul", lambda *_: None)
    row = gemm.measure_scaled(bench, Scaled(24, 256, 384, scales=scales))
    assert row.case == f"fp8, scales of {scales}, 24x256x384"
    assert row.bytes == 24 * 384 + 256 * 384 + 2 * 24 * 256


def test_experts(bench: harness.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "NUM_EXPERTS", 5)
    monkeypatch.setattr(gemm, "MOST_ROWS", 7)
    bench.peers = ["cublas", "torch-loop"]
    row = gemm.measure_grouped(bench, Grouped("toy", 24, 32))
    assert row.peers == {"torch-loop": 20.0}


def test_the_whole_table(bench: harness.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "SHAPES", [Case(8, 16, 32)])
    monkeypatch.setattr(gemm, "DECODE", [Case(1, 16, 32, "toy "), Case(2, 16, 32, "toy ")])
    monkeypatch.setattr(gemm, "SCALED", [Scaled(8, 16, 32)])
    monkeypatch.setattr(gemm, "GROUPED", [])
    monkeypatch.setattr(gemm.peers, "scaled_matmul", lambda *_: None)
    gemm.fill(bench)
    assert bench.failed == []
    assert [row.kind for row in bench.rows].count("geomean") == 2  # fp8 has no peer here


def test_the_cases() -> None:
    cases = [*gemm.SHAPES, *gemm.DECODE, *gemm.SCALED, *gemm.GROUPED]
    assert len({case.title for case in cases}) == len(cases) == 9 + 24 + 3 + 4
    of_a, of_b = gemm.make_scales(Scaled(256, 512, 1024, scales="blocks"), torch.device("cpu"))
    assert of_a.shape == (256, 8)
    assert of_a.stride(0) == 1
    assert of_b.shape == (8, 4)

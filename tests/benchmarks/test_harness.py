"""Timing arithmetic, the harness on CPU tensors with a clock of its own, and the benchmarks' references."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import attention_decode, gemm, harness, peers, w4a16
from benchmarks.ceilings import read_words
from benchmarks.results import Row, read_reports
from benchmarks.timing import MAX_SAMPLES, MIN_SAMPLES, Timing, num_samples, summarise
from evenshare import paged_attention, quantize


def test_summary_is_median_and_half_the_quartile_range() -> None:
    timing = summarise([10.0, 8.0, 12.0, 100.0, 9.0])
    assert timing == Timing(10.0, (12.0 - 9.0) / 2 / 10.0)
    assert math.isnan(summarise([]).median)


def test_number_of_samples_fits_the_budget() -> None:
    assert num_samples(0.0) == MAX_SAMPLES
    assert num_samples(1e9) == MIN_SAMPLES
    assert num_samples(5_000.0) == 40


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> harness.Bench:
    """A bench on the CPU whose clock says 20 us for whatever it times."""

    def clock(calls: harness.Calls) -> Timing:
        return Timing(20.0, 0.01)

    monkeypatch.setattr(harness, "time_graph", clock)
    monkeypatch.setattr(harness, "time_events", clock)
    ceilings = {"read_tb_s": 4.0, "matmul_bf16_tflop_s": 800.0}
    return harness.Bench(torch.device("cpu"), ceilings, ["cublas", "flex"], Console(record=True, width=200))


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


@pytest.mark.parametrize("wrong", [torch.tensor([1.0, 2.1]), torch.tensor([1.0, math.nan])])
def test_compare_refuses_a_wrong_result(bench: harness.Bench, wrong: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="case: relative error"):
        bench.compare("case", lambda: wrong, lambda name: None, torch.tensor([1.0, 2.0]), 1e-3)
    assert bench.rows == []


def test_compare_refuses_nan_outside_the_sample(bench: harness.Bench) -> None:
    output = torch.tensor([1.0, math.nan])
    with pytest.raises(RuntimeError, match="relative error inf"):
        bench.compare("case", lambda: output, lambda name: None, output[:1], 1e-3, sample=lambda y: y[:1])


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


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert harness.main("gemm", None, gemm.fill, ["--out", str(tmp_path / "x.json")]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert harness.main("gemm", None, gemm.fill, ["--peers", "cutlass"]) == 2


def test_commit_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSHARE_COMMIT", "0123abc")
    assert harness.make_report("gemm", "device", {}, []).commit == "0123abc"


def test_read_kernel_reads_every_word(device: torch.device) -> None:
    words = torch.randint(-1000, 1000, (40 * 64,), dtype=torch.int32, device=device)
    sums = torch.zeros(7, dtype=torch.int32, device=device)
    read_words(words, sums, 64, 1)
    difference = int(sums.sum(dtype=torch.int64)) - int(words.sum(dtype=torch.int64))
    assert difference % 2**32 == 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_decode_reference(page_size: int) -> None:
    case = attention_decode.Case("small", [33, 1, 16], page_size, num_qo_heads=6, num_kv_heads=2)
    batch = attention_decode.make_batch(case, torch.device("cpu"), torch.float32)
    got = paged_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        kv_indptr=batch.kv_indptr,
        kv_indices=batch.kv_indices,
        last_page_len=batch.last_page_len,
    )
    want = torch.stack([attention_decode.reference(batch, case, request) for request in range(3)])
    assert peers.relative_error(got, want) < 1e-6
    assert case.bytes == 50 * 2 * 2 * 128 * 2


def test_decode_of_equal_lengths_has_dense_peers() -> None:
    case = attention_decode.Case("small", [5, 5], 2, num_qo_heads=4, num_kv_heads=2)
    batch = attention_decode.make_batch(case, torch.device("cpu"), torch.float32)
    call = attention_decode.dense_peer("sdpa-flash", batch, case)
    assert call is not None
    want = torch.stack([attention_decode.reference(batch, case, request) for request in range(2)])
    assert peers.relative_error(call(), want) < 1e-6
    assert attention_decode.dense_peer("flashinfer", batch, case) is None


def test_w4a16_reference_is_what_the_codes_mean() -> None:
    weight = quantize(torch.randn(8, 256), w4a16.GROUP_SIZE)
    dense = w4a16.dequantize(weight.unpacked_codes(), weight.scales)
    x = torch.randn(3, 256)
    from evenshare import w4a16_matmul

    assert peers.relative_error(w4a16_matmul(x, weight, backend="cpu"), x @ dense.T) < 1e-6


@pytest.mark.parametrize("lengths", [[40, 40], [33, 1]])
def test_a_decode_case_on_the_cpu(bench: harness.Bench, lengths: list[int]) -> None:
    attention_decode.measure(bench, attention_decode.Case("small", lengths, 16, target=0.9))
    value, ratio, plan = bench.rows
    assert value.bytes == attention_decode.Case("small", lengths, 16).bytes
    assert (ratio.kind, ratio.target, ratio.missed) == ("ratio", 0.9, True)
    assert plan.case.endswith(", plan")


def test_a_gemm_case_on_the_cpu(bench: harness.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "copies_past_l2", lambda size: 3)
    row = gemm.measure(bench, 8, 16, 32)
    assert row.peers == {"cublas": 20.0}
    assert (row.flops, row.bytes) == (2 * 8 * 16 * 32, 2 * (8 * 32 + 16 * 32 + 8 * 16))


def test_a_w4a16_case_on_the_cpu(bench: harness.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w4a16, "copies_past_l2", lambda size: 2)
    weight = quantize(torch.randn(64, 256), w4a16.GROUP_SIZE, scale_dtype=torch.bfloat16)
    row = w4a16.measure(bench, [weight, weight], 3)
    assert row.peers == {"cublas": 20.0}
    assert row.bytes == 64 * 256 // 2 + 64 * 2 * 2 + 2 * 3 * (64 + 256)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_benchmark_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "SHAPES", [(64, 128, 256)])
    out = tmp_path / "out.json"
    assert harness.main("gemm", None, gemm.fill, ["--peers", "cublas", "--out", str(out)]) == 0
    (report,) = read_reports(out)
    assert report.ceilings["read_tb_s"] > 0.1
    assert [row.kind for row in report.rows] == ["value", "geomean"]
    assert report.rows[0].peers["cublas"] > 0

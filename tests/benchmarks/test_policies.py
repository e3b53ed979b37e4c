"""The comparison of policies, simulated and with a clock of the tests' own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import harness, policies
from benchmarks.batches import Shape
from benchmarks.results import Row, read_reports
from benchmarks.workloads import Trace
from evenshare.schedule import simulate
from evenshare.schedule.policies import POLICIES

SMALL = policies.Case("decode", "small", Shape([1, 1, 1], [900, 20, 30], 8, 2, 32, page_size=16))
SMALL_CARD = policies.Sizes((9, 0), 8)
DEFAULT = policies.make_executor(SMALL.shape, None, SMALL_CARD).policy


def test_traces_join_the_cases() -> None:
    trace = Trace("conv", [policies.PREFILL_TOKENS * 2], [7])
    found = {case.title: case.shape for case in policies.make_cases([trace])}
    assert found["prefill, conv"].qo_lens == [policies.PREFILL_TOKENS]
    assert found["decode, conv"].qo_lens == [1] * policies.DECODE_BATCH
    assert "decode, 64k + 15x256" in found


@pytest.mark.parametrize("policy", POLICIES)
def test_a_schedule_has_every_block_once(policy: str) -> None:
    tile = policies.make_executor(SMALL.shape, policy, SMALL_CARD).tile
    schedule = policies.make_schedule(SMALL.shape, policy, SMALL_CARD)
    blocks = [-(-length // tile.block_n) for length in SMALL.shape.kv_lens]
    assert simulate(schedule).iterations == 2 * sum(blocks)


def test_costs_follow_from_bytes_or_arithmetic() -> None:
    decode, prefill = (policies.make_executor(shape, None, SMALL_CARD) for shape in (SMALL.shape, Shape([512], [512])))
    costs = policies.estimate_costs(decode.problem, decode.tile)
    assert costs.store == pytest.approx(4 * decode.tile.block_m * 33 / (decode.tile.block_n * 2 * 64))  # bound by bytes
    assert costs.store < 0.5 < policies.estimate_costs(prefill.problem, prefill.tile).store < 2


def test_even_shares_beat_whole_tiles_in_the_simulation() -> None:
    row = policies.simulate_case(SMALL, SMALL_CARD)
    assert (row.case, row.unit, row.timing) == (f"decode, small, {DEFAULT}", "iterations", "simulated")
    assert set(row.peers) == set(POLICIES) - {DEFAULT}
    assert {**row.peers, DEFAULT: row.ours}["stream_k"] < row.peers["data_parallel"]


def test_a_case_is_timed_under_every_policy(bench: harness.Bench) -> None:
    policies.measure(bench, SMALL, SMALL_CARD)
    assert bench.rows[0].case == f"decode, small, {DEFAULT}"
    assert set(bench.rows[0].peers) == set(POLICIES) - {DEFAULT}


def test_summaries_keep_phases_and_timings_apart() -> None:
    rows = [
        Row("decode, a, stream_k", "us", "lower", 10.0, peers={"level_fill": 20.0}, timing="graph"),
        Row("decode, b, stream_k", "us", "lower", 20.0, peers={"level_fill": 10.0}, timing="graph"),
        Row("decode, a, stream_k", "iterations", "lower", 1.0, peers={"level_fill": 3.0}, timing="simulated"),
        Row("prefill, a, level_fill", "us", "lower", 4.0, peers={"stream_k": 2.0}, timing="graph"),
    ]
    found = {(row.case.partition(",")[0], row.timing): row for row in policies.summarise(rows)}
    assert found["decode", "graph"].ours == pytest.approx(2**0.5)
    assert found["decode", "graph"].peers == pytest.approx({"level_fill": 2**0.5})
    assert found["decode", "simulated"].peers == pytest.approx({"level_fill": 3.0})
    assert found["prefill", "graph"].ours == pytest.approx(2.0)


def test_fill_simulates_and_times(bench: harness.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(major=9, minor=0, multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    policies.fill(bench, [SMALL])
    assert [row.timing for row in bench.rows] == ["simulated", "graph", "graph", "simulated"]
    assert bench.rows[2].ours == 1.0
    assert "20*" in bench.console.export_text()


def test_simulation_needs_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(policies, "make_cases", lambda traces: [SMALL])
    out = tmp_path / "out.json"
    assert policies.main(["--simulate", "--out", str(out)]) == 0
    (report,) = read_reports(out)
    assert report.device == "simulated, 132 SMs"
    assert [row.kind for row in report.rows] == ["value", "geomean"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert policies.main([]) == 2
    assert "benchmarks.policies needs a CUDA GPU" in capsys.readouterr().out
    assert policies.main(["--traces", str(tmp_path / "absent"), "--simulate"]) == 2
    assert "got no traces" in capsys.readouterr().out

"""The benchmark of several ranks on one CPU rank: its cases are right, its predictions add up, its picture is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import distributed, plot_distributed
from benchmarks.distributed_cases import CASES, DRY_CASES, GROUP_SIZE, Decode, Layer, Prefill
from benchmarks.results import read_reports
from evenshare.distributed.scaling import Link


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(distributed, "PREDICTED", (1, 2, 16))
    out = tmp_path / "dry.json"
    links = ["--link", "100,5", "--network", "50,20"]
    assert distributed.main(["--dry-run", *links, "--out", str(out)]) == 0
    return out


def test_a_dry_run(results: Path) -> None:
    (report,) = read_reports(results)
    assert report.ceilings == {"link_gb_s": 100, "link_latency_us": 5, "network_gb_s": 50, "network_latency_us": 20}
    rows = {row.case: row for row in report.rows}
    for case in DRY_CASES:
        assert rows[f"{case.title}, 1 ranks"].timing == "wall"
        for ranks in filter(case.supports, (1, 2, 16)):
            assert rows[f"{case.title}, {ranks} ranks, predicted"].timing == "simulated"
    assert plot_distributed.main([str(results)]) == 0
    assert results.with_suffix(".svg").exists()
    curves = plot_distributed.read_curves(report)
    assert list(curves[DRY_CASES[0].title]) == [False, True]
    assert list(curves[DRY_CASES[0].title][True]) == [1, 2, 16]


def test_a_wrong_result_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(distributed, "MAX_ERROR", -1.0)
    with pytest.raises(RuntimeError, match="relative error"):
        distributed.main(["--dry-run", "--only", "decode"])


def test_cases_divide() -> None:
    for case in CASES:
        assert [ranks for ranks in distributed.PREDICTED if not case.supports(ranks)] == [], case.title
    layer = next(case for case in CASES if isinstance(case, Layer))
    shares = [layer._shares(rank, 64)[2] for rank in range(64)]
    assert [i for share in shares for i in share] == list(range(layer.intermediate))
    assert {len(share) % GROUP_SIZE for share in shares} == {0}


def test_predictions() -> None:
    link = Link(100, 5)
    decode, prefill, layer = (
        next(case for case in CASES if isinstance(case, kind)) for kind in (Decode, Prefill, Layer)
    )
    assert decode.predict((50.0,), 4, link) == pytest.approx(50 + 2 * 5 + 3 * 64 * (256 + 4) * 1e-5)
    assert prefill.predict((9e3, 7e3), 8, link) == 9e3 + 7 * 7e3  # 67 MB in 676 us
    assert layer.predict((30.0,), 2, link) == pytest.approx(30 + 2 * 2 * (5 + 8192 * 1e-5))
    assert torch.bfloat16 == layer.heads.dtype


def test_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        distributed.main(["--link", "fast"])
    assert "want GB/s and microseconds" in capsys.readouterr().err
    assert plot_distributed.main([str(tmp_path / "none.json")]) == 2

"""Figures from results files: each kind drawn from made-up rows, the values those of the rows, the same bytes twice."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import plot
from benchmarks.results import Report, Row, write_json

CEILINGS = {"read_tb_s": 4.0, "matmul_bf16_tflop_s": 800.0}


def report(name: str, *rows: Row) -> Report:
    return Report(
        name, "Some GPU", "1", {"torch": "2.0", "triton": "3.0"}, "abcdef0123", "2026-01-02T03:04", CEILINGS, list(rows)
    )


def us(case: str, ours: float, *, flops: float | None = None, bytes: float | None = None, **peers: float) -> Row:
    return Row(case, "us", "lower", ours, peers=peers, flops=flops, bytes=bytes)


PREFILL = [(s, mask) for s in (512, 1024) for mask in ("full", "causal")]
ROWS = {
    "gemm": [us("a", 10.0, flops=4e9, bytes=2e7, cublas=8.0), us("b", 10.0, flops=4e9, bytes=4e9, cublas=8.0)],
    "attention_prefill": [
        us(f"dense, D=128, 16/16 heads, S={s}, {mask}", 5.0, flops=s * 1e6, flex=9.0) for s, mask in PREFILL
    ],
    "attention_decode": [
        us("B=1", 10.0, bytes=2e7, flex=20.0),
        us("B=2", 10.0, bytes=4e7),
        us("B=2, plan", 1.0),
    ],
    "w4a16": [
        *(us(f"n=64 k=128 m={m}", 10.0, cublas=20.0 / m) for m in (1, 8)),
        us("n=64 k=128 m=8, nf4", 1.0, cublas=2.0),
    ],
    "generate": [Row("48 tokens", "tokens/s", "higher", 80.0, peers={"transformers": 25.0})],
    "policies": [us("x", 10.0, other=30.0)],
}
REPORTS = {name: report(name, *rows) for name, rows in ROWS.items()}


@pytest.mark.parametrize("name", REPORTS)
def test_each_kind_is_drawn_the_same_twice(name: str, tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    write_json(source, REPORTS[name].to_json())
    for out in ("one", "two"):
        assert plot.main(["--out", str(tmp_path / out), str(source)]) == 0
    first, second = (tmp_path / out / f"{name}-some-gpu.svg" for out in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()
    assert ElementTree.fromstring(first.read_text()).tag.endswith("svg")
    assert first.stat().st_size < 200_000


def lines(figure: object) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for panel in figure.axes for line in panel.lines}  # type: ignore[attr-defined]


def test_values() -> None:
    def results(name: str) -> plot.Results:
        return plot.Results(REPORTS[name], Path("nowhere"))

    landscape = plot.draw_gemm(results("gemm"))
    assert landscape is not None
    points = {dots.get_label(): dots.get_offsets().tolist() for dots in landscape.axes[0].collections}  # type: ignore[union-attr]
    assert points == {
        "cublas": [[200, pytest.approx(500 / 800)], [1, pytest.approx(500 / 800)]],
        "evenshare": [[200, pytest.approx(400 / 800)], [1, pytest.approx(400 / 800)]],
    }
    roof = lines(landscape)["measured ceilings"]
    assert (roof[0], roof[-1]) == (
        pytest.approx(4 / 800),
        pytest.approx(1),
    )  # 4 TFLOP/s at a flop a byte; 200 flop a byte

    decode = plot.draw_decode(results("attention_decode"))
    assert decode is not None
    assert [bar.get_width() for bar in decode.axes[0].patches] == pytest.approx([2, 1, 4])  # type: ignore[attr-defined]
    prefill = plot.draw_prefill(results("attention_prefill"))
    assert prefill is not None
    assert [panel.get_title() for panel in prefill.axes] == ["full, D = 128", "causal, D = 128"]
    assert lines(prefill)["evenshare"] == pytest.approx([102.4, 204.8])
    speed = plot.draw_w4a16(results("w4a16"))
    assert speed is not None
    assert lines(speed)["64 x 128"] == pytest.approx([2, 0.25])


def test_a_corpus_beside_the_results_of_its_commit(tmp_path: Path) -> None:
    results = plot.Results(report("gemm_corpus"), tmp_path / "a.json")
    assert plot.draw_gemm(results) is None
    path = tmp_path / "gemm_corpus-some-gpu.csv"
    path.write_text("# abcdef0123\nm,n,k,ours,cublas,best_tile\n128,128,128,10,20,nan\n")
    figure = plot.draw_gemm(results)
    assert figure is not None
    offsets = figure.axes[0].collections[-1].get_offsets().tolist()  # type: ignore[union-attr]
    assert offsets == [[pytest.approx(128 / 3), pytest.approx(2e-6 * 128**3 / 10 / 800)]]
    path.write_text(path.read_text().replace("abc", "other"))
    assert results.corpus() == []


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "a.json"
    write_json(empty, report("gemm").to_json())
    for paths, message in (
        ([str(tmp_path / "none")], "got no such file or folder"),
        ([str(empty)], "want files with rows to draw"),
    ):
        assert plot.main(["--out", str(tmp_path), *paths]) == 2
        assert message in capsys.readouterr().err

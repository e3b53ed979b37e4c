"""Figures from results files: each kind drawn from made-up rows, the values those of the rows, the same bytes twice."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import figures, plot, policy_table
from benchmarks.results import Report, Row, write_json

CEILINGS = {"read_tb_s": 4.0, "matmul_bf16_tflop_s": 800.0}


def report(name: str, *rows: Row) -> Report:
    return Report(
        name, "Some GPU", "1", {"torch": "2.0", "triton": "3.0"}, "abcdef0123", "2026-01-02T03:04", CEILINGS, list(rows)
    )


def us(case: str, ours: float, *, flops: float | None = None, bytes: float | None = None, **peers: float) -> Row:
    return Row(case, "us", "lower", ours, peers=peers, flops=flops, bytes=bytes, timing="graph")


PREFILL = [(s, mask) for s in (512, 1024) for mask in ("full", "causal")]
ROWS = {
    "gemm": [
        us("8x8x8", 10.0, flops=4e9, bytes=2e7, cublas=8.0),
        us("Llama 1x8x8", 10.0, flops=4e9, bytes=4e9, cublas=8.0),
        us("fp8, scales of rows, 8x8x8", 1.0, flops=4e9, bytes=2e7),
    ],
    "attention_prefill": [
        *(us(f"dense, D=128, 16/16 heads, S={s}, {mask}", 5.0, flops=s * 1e6, flex=9.0) for s, mask in PREFILL),
        us("ragged, 4/2 heads, zipf", 10.0, flops=1e9, **{"page 16": 20.0, "page 1": 50.0}),
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
    "policies": [
        *(us(f"decode, {name}, level_fill", 10.0, stream_k=20.0, whole=5.0) for name in ("a", "U(1,2)")),
        Row(
            "decode, a, level_fill",
            "iterations",
            "lower",
            3.0,
            peers={"stream_k": 4.5, "whole": 6.0},
            timing="simulated",
        ),
        Row("decode, time / the best policy's, level_fill", "x", "lower", 2.0, "geomean", peers={"stream_k": 4.0}),
    ],
    "cascade": [us("x", 10.0, paged=30.0)],
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
    def results(name: str) -> figures.Results:
        return figures.Results(REPORTS[name], Path("nowhere"))

    landscape = figures.draw_gemm(results("gemm"))
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

    decode = figures.draw_decode(results("attention_decode"))
    assert decode is not None
    assert [bar.get_width() for bar in decode.axes[0].patches] == pytest.approx([2, 1, 4])  # type: ignore[attr-defined]
    assert [text.get_text() for text in decode.axes[0].texts] == ["read bandwidth, measured", "50%", "100%"]
    prefill = figures.draw_prefill(results("attention_prefill"))
    assert prefill is not None
    assert [panel.get_title() for panel in prefill.axes] == [
        "full, D = 128, 16/16 heads",
        "causal, D = 128, 16/16 heads",
    ]
    assert lines(prefill)["evenshare"] == pytest.approx([102.4, 204.8])
    ragged = figures.draw_ragged(results("attention_prefill"))
    assert ragged is not None
    assert [bar.get_width() for bar in ragged.axes[0].patches] == pytest.approx([100, 50, 20])  # type: ignore[attr-defined]
    assert [text.get_text() for text in ragged.axes[0].get_yticklabels()] == ["4/2 heads, zipf"]
    speed = figures.draw_w4a16(results("w4a16"))
    assert speed is not None
    assert lines(speed)["64 x 128"] == pytest.approx([2, 0.25])


def test_policies_are_held_against_the_best() -> None:
    table = figures.draw_policies(figures.Results(REPORTS["policies"], Path("nowhere")))
    assert table is not None
    assert [panel.get_title(loc="left") for panel in table.axes] == ["measured", "simulated"]
    measured, simulated = ([text.get_text() for text in panel.texts] for panel in table.axes)
    assert measured == 3 * ["2.00", "4.00", "1.00"]  # two batches and their mean
    assert simulated == 2 * ["1.00", "1.50", "2.00"]
    assert [label.get_text() for label in table.axes[0].get_xticklabels()] == ["level\nfill", "stream k", "whole"]


def test_the_table_of_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.json"
    write_json(source, REPORTS["policies"].to_json())
    assert policy_table.main([str(source)]) == 0
    head, _, first, *_, mean = capsys.readouterr().out.splitlines()
    assert head == "| Some GPU, 2026-01-02 | level fill | stream k | whole |"
    assert first == "| decode, a | 2.00 | 4.00 | **1.00** |"
    assert mean == "| decode, geometric mean | 2.00 | 4.00 | **1.00** |"
    write_json(source, REPORTS["gemm"].to_json())
    source.write_text(source.read_text().replace("graph", "events"))
    assert policy_table.main([str(source)]) == 2
    assert "without measured rows" in capsys.readouterr().err


def test_a_corpus_beside_the_results_of_its_commit(tmp_path: Path) -> None:
    results = figures.Results(report("gemm_corpus"), tmp_path / "a.json")
    assert figures.draw_gemm(results) is None
    path = tmp_path / "gemm_corpus-some-gpu.csv"
    path.write_text("# abcdef0123\nm,n,k,ours,cublas,data_parallel\n128,128,128,10,20,nan\n128,128,256,10,20,nan\n")
    figure = figures.draw_gemm(results)
    assert figure is not None
    assert [panel.get_title() for panel in figure.axes] == ["cuBLAS, 2 shapes", "evenshare"]
    offsets = figure.axes[1].collections[-1].get_offsets().tolist()  # type: ignore[union-attr]
    assert offsets[0] == [pytest.approx(128 / 3), pytest.approx(2e-6 * 128**3 / 10 / 800)]
    path.write_text(path.read_text().replace("abc", "other"))
    assert results.corpus() == []


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "a.json"
    write_json(empty, report("gemm").to_json())
    write_json(tmp_path / "b.json", report("splitk", us("x", 1.0, other=2.0)).to_json())  # has a program of its own
    for paths, message in (
        ([str(tmp_path / "none")], "got no such file or folder"),
        ([str(empty), str(tmp_path / "b.json")], "want files with rows to draw"),
    ):
        assert plot.main(["--out", str(tmp_path), *paths]) == 2
        assert message in capsys.readouterr().err

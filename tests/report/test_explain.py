"""`evenshare explain`: its table, its picture, its errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from evenshare.report.explain import compare, decode_work, explain_command, gemm_work

pytest.importorskip("matplotlib")

README = ["--lens", "65536,15x256", "--heads", "8"]
app = typer.Typer()
app.command()(explain_command)


def explain(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})
    return result.exit_code, result.output


def rows(output: str) -> dict[str, list[str]]:
    """Cells by policy."""
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if line.startswith("│")
    ]
    return {row[0]: row[1:] for row in cells}


def test_readme_batch() -> None:
    code, output = explain(*README)
    assert code == 0
    table = rows(output)
    labels = ["data parallel", "fixed split in 4", "even share", "level fill", "cost sorted"]
    assert list(table) == [*labels, "batch invariant, 16"]
    assert table["data parallel"] == ["513", "6%", "128", "0", "0"]
    assert float(table["even share"][0]) < 513 / 13
    assert "Decode of 16 requests: 65536 + 15 x 256 keys, 8 KV heads, 132 workers" in output


def test_lens_spelled_out_are_the_same() -> None:
    assert explain("--lens", "512,3x256") == explain("--lens", "512, 256,256, 256")


def test_fixed_split_cuts_as_asked() -> None:
    code, output = explain(*README, "--policies", "fixed_split", "--num-splits", "16")
    assert code == 0
    assert rows(output)["fixed split in 16"][2:] == ["368", "128", "368"]  # 8 tiles in 16 parts, 120 of 2 blocks in 2


def test_gemm() -> None:
    code, output = explain("--gemm", "4096,4096,4096", "--policies", "data_parallel,level_fill")
    assert code == 0
    table = rows(output)
    assert list(table) == ["data parallel", "level fill"]
    assert table["data parallel"] == ["520", "95%", "1024", "0", "0"]  # 8 waves of 64 + 1 steps
    assert "1024 tiles of 128 x 128" in output


def test_gemm_tiles_cover_odd_shapes() -> None:
    work = gemm_work([129, 1, 65], [128, 128, 64])
    assert work.space.tile_iterations().tolist() == [2, 2]


def test_decode_blocks_cover_odd_lengths() -> None:
    assert decode_work([1, 128, 129], 2, 128).space.tile_iterations().tolist() == [1, 1, 1, 1, 2, 2]


def test_even_share_is_never_worse_than_whole_tiles_on_skewed_batches() -> None:
    for tail in (0, 1, 15, 63):
        spans = compare(decode_work([65536] + tail * [256], 8, 128), 132, ("data_parallel", "stream_k"))
        assert spans["stream_k"].makespan <= spans["data_parallel"].makespan


def test_picture(tmp_path: Path) -> None:
    out = tmp_path / "timeline.png"
    code, _ = explain(*README, "--policies", "data_parallel,fixed_split,stream_k", "--out", str(out))
    assert code == 0
    assert 10_000 < out.stat().st_size < 150_000


def test_without_matplotlib_the_table_is_still_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    code, output = explain("--lens", "512", "--out", str(tmp_path / "a.png"))
    assert code == 1
    assert "makespan" in output
    assert "error: matplotlib is not installed: pip install evenshare[report]" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "lens, gemm, profile: got none, want one of them"),
        (["--lens", "1", "--gemm", "1,1,1"], "lens, gemm, profile: got lens and gemm, want one of them"),
        (["--lens", "3,,4"], "lens: got '3,,4', want whole numbers"),
        (["--lens", "-3"], "lens: got '-3', want whole numbers"),
        (["--lens", "0"], "lens: got 0, want 1 or more"),
        (["--lens", "0x8"], "lens: got 0, want 1 or more"),
        (["--lens", "999999999x8"], "lens: got more than 100000 requests"),
        (["--lens", "999999999"], "lens: got 8 tiles and 62500000 iterations, want at most"),
        (["--lens", "8", "--heads", "0"], "heads: got 0, want 1 or more"),
        (["--lens", "8", "--block", "0"], "block: got 0, want 1 or more"),
        (["--lens", "8", "--workers", "0"], "workers: got 0, want 1 to 10000"),
        (["--lens", "8", "--num-splits", "0"], "num_splits: got 0, want 1 to 50000 for 8 tiles"),
        (["--lens", "8", "--policies", "fastest"], "policy: got 'fastest', want one of data_parallel"),
        (["--lens", "8", "--out", "a.gif"], "out: got 'a.gif', want a name that ends in .png"),
        (["--lens", "8", "--out", "/no/such/folder/a.png"], "want a folder that exists"),
        (["--lens", "8", "--html", "a.png"], "html: got 'a.png', want a name that ends in .html"),
        (["--profile", "/no/such/file.json"], "profile: cannot read /no/such/file.json: No such file"),
        (["--gemm", "1,2"], "gemm: got '1,2', want three numbers by commas"),
        (["--gemm", "1,2,0"], "gemm: got 0, want 1 or more"),
        (["--gemm", "1,2,3", "--tile", "1,2,x"], "tile: got '1,2,x', want whole numbers"),
        (["--gemm", "99999,99999,3"], "gemm: got 611524 tiles"),
    ],
)
def test_wrong_input_is_named_and_prints_no_table(arguments: list[str], message: str) -> None:
    code, output = explain(*arguments)
    assert code == 2
    assert output.startswith("error: ")
    assert message in output
    assert "makespan" not in output

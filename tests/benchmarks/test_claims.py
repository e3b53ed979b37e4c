"""What README.md and docs/performance.md say was measured is what the files in benchmarks/results hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.results import RESULTS, Row, read_reports

ROOT = Path(__file__).parents[2]


class Results:
    """The rows of one results file, by case and unit."""

    def __init__(self, name: str, device: str = "nvidia-h200") -> None:
        (file,) = RESULTS.glob(f"{name}-{device}*.json")
        (self.report,) = read_reports(file)

    def row(self, case: str, unit: str) -> Row:
        return next(row for row in self.report.rows if (row.case, row.unit) == (case, unit))

    def values(self, pattern: str) -> dict[str, float]:
        return {row.case: row.ours for row in self.report.rows if re.fullmatch(pattern, row.case)}


def prefill() -> list[str]:
    results = Results("attention_prefill")
    speeds = results.values(r"dense, D=128, 16/16 heads, S=\d+, \w+: speed, ours / sdpa-cudnn")
    (mean,) = results.values(r"dense, D=128, \d+ shapes: speed, ours / sdpa-cudnn").values()
    ragged = results.row("ragged, 32/8 heads, 64k + 15x256", "TFLOP/s")
    (short,) = results.values(r"dense, D=128, 8/8 heads, S=512, full: speed, ours / sdpa-cudnn").values()
    single = results.values(r"ragged, .*: speed, page 1 / ours").values()
    least, most = (bound(speeds, key=speeds.__getitem__) for bound in (min, max))
    assert "S=1024" in least
    assert "S=16384, causal" in most
    tflops = [f"{rate:.0f}" for rate in (ragged.ours, ragged.peers["page 16"], ragged.peers["page 64"])]
    return [
        f"{mean:.2f}x the speed in the geometric mean, from {speeds[least]:.2f}x at 1k to {speeds[most]:.2f}x at 16k causal",
        f"{tflops[0]} TFLOP/s; {tflops[1]} over pages of 16, {tflops[2]} over pages of 64",
        f"{short:.2f}x cuDNN at 512",
        f"{min(single):.1f}x to {max(single):.1f}x of contiguous keys",
    ]


def decode() -> list[str]:
    results = Results("attention_decode")
    rows = [results.row(f"32/8 heads, page {page}, B=64 L=8192, share of read_tb_s", "x") for page in (1, 16)]
    ours, cudnn = (
        [100 * share for share in shares]
        for shares in zip(*((r.ours, r.peers["sdpa-cudnn"]) for r in rows), strict=True)
    )
    return [
        f"{ours[0]:.0f} and {ours[1]:.0f} % of the card's read bandwidth",
        f"cuDNN {cudnn[0]:.0f} and {cudnn[1]:.0f} %",
    ]


def w4a16() -> list[str]:
    results = Results("w4a16")
    (mean,) = results.values(r"\d+ cases, best peer's time / ours").values()
    many = results.values(r"n=\d+ k=\d+ m=(2048|8192): speed, ours / cublas").values()
    speed = results.row("n=28672 k=8192 m=1: speed, ours / cublas", "x").ours
    return [
        f"{mean:.2f}x the speed in the geometric mean; {speed:.1f}x at 28672 x 8192, m = 1",
        f"slower than bf16 cuBLAS at 2048 rows and more ({min(many):.2f}x to {max(many):.2f}x)",
    ]


def gemm() -> list[str]:
    results = Results("gemm")
    row = results.row("8192x8192x8192", "us")
    (mean,) = results.values("all shapes, best peer's time / ours").values()
    assert row.flops is not None
    return [
        f"{row.flops / row.ours * 1e-6:.0f} TFLOP/s, {row.peers['cublas'] / row.ours:.2f}x",
        f"{mean:.2f} of cuBLAS over all shapes",
    ]


def generate() -> list[str]:
    row = next(row for row in Results("generate", "intel").report.rows if row.unit == "tokens/s")
    whole, half = (row.peers[f"transformers {dtype}"] for dtype in ("float32", "bfloat16"))
    return [f"{row.ours:.0f} tokens/s, {row.ours / max(whole, half):.1f}x", f"{whole:.0f} (fp32) and {half:.0f} (bf16)"]


def mixed() -> list[str]:
    results = Results("attention_mixed")
    one, two = (results.values(rf".*: speed, ours / two {what}").values() for what in ("plans", "streams"))
    return [
        f"within {100 * max(abs(1 - speed) for speed in one):.0f} % (`attention_mixed`)",
        f"up to {100 * (1 - min(two)):.0f} % faster than one",
    ]


CLAIMS: list[tuple[str, Callable[[], list[str]]]] = [
    ("README.md", prefill),
    ("README.md", decode),
    ("README.md", w4a16),
    ("README.md", gemm),
    ("README.md", generate),
    ("docs/performance.md", mixed),
]


@pytest.mark.parametrize(("page", "claims"), CLAIMS, ids=lambda value: getattr(value, "__name__", value))
def test_figures_are_those_of_the_results(page: str, claims: Callable[[], list[str]]) -> None:
    text = " ".join((ROOT / page).read_text().split())
    for claim in claims():
        assert claim in text, f"{page}: want {claim!r}, as in the results file"

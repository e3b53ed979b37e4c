"""The benchmarks of variants, sparse attention and cascades on the CPU: their references, their peers, and a small case of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from benchmarks import cascade, harness, masks, sparse, variants
from benchmarks.batches import Shape
from benchmarks.peers import relative_error

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"heads": (4, 2), "head_dim": 16}


@pytest.fixture(autouse=True)
def _operator_by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention without a compiler."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_reference_and_work() -> None:
    tensors = masks.make_tensors(2, 40, (4, 2), 16, CPU, lambda b, h, q, k: k <= q, dtype=torch.float32)
    call = tensors.peer("flex", tensors.block_mask(16))
    assert call is not None
    assert relative_error(tensors.sample(call()), tensors.reference()) < 1e-6
    assert tensors.flops() == 4 * 16 * 4 * 2 * 40 * 41 // 2
    assert tensors.peer("sdpa-flash", tensors.block_mask(16)) is None


@pytest.mark.parametrize("case", variants.CASES[::2], ids=lambda case: case.name)
def test_a_prefill_with_a_variant(bench: harness.Bench, monkeypatch: pytest.MonkeyPatch, case: variants.Case) -> None:
    for name, size in (("WINDOW", 9), ("DOCUMENT", 50), ("PREFIX", 30)):
        monkeypatch.setattr(variants, name, size)
    variants.measure_prefill(bench, replace(case, length=130, total=260, **SMALL))
    row, rate, *speeds = bench.rows
    assert row.peers == {"blocks": 20.0, "flex": 20.0}
    assert rate.unit == "TFLOP/s"
    assert [speed.ours for speed in speeds] == [1.0, 1.0]


@pytest.mark.parametrize("codes", [False, True])
def test_a_decode_with_a_transform(bench: harness.Bench, codes: bool) -> None:
    shape = Shape([], [], 4, 2, 32, 16)
    variants.measure_decode(bench, variants.Decode(2, 40, codes, shape))
    row, rate, speed = bench.rows
    assert row.bytes == 2 * 40 * 2 * 2 * 32 * (2 - codes)
    assert (rate.unit, speed.case) == ("TB/s", f"{row.case}: speed, ours / ready")


@pytest.mark.parametrize("make", [sparse.window_and_sinks, sparse.packed_documents])
def test_a_block_mask(bench: harness.Bench, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:
    monkeypatch.setattr(sparse, "SINKS", 3)
    sparse.measure_masked(bench, sparse.Masked("small", 200, make, **SMALL))
    row, rate, speed, planning = bench.rows
    assert row.peers == {"flex": 20.0}
    assert (rate.unit, speed.ours, planning.case) == ("TFLOP/s", 1.0, f"{row.case}: planning")


def test_random_blocks(bench: harness.Bench) -> None:
    case = sparse.Random(160, 16, 0.3, **SMALL)
    lists = case.lists(CPU)
    assert lists.shape == (10, 3)
    assert all(i in row for i, row in enumerate(lists.tolist()))
    sparse.measure_random(bench, case)
    assert bench.rows[0].peers == {"flex": 20.0}
    assert bench.rows[0].flops == 4 * 16 * 4 * 10 * 3 * 16 * 16


def test_selected_pages(bench: harness.Bench) -> None:
    sparse.measure_selected(bench, sparse.Selected(3, 64, 2, 8))
    row, rate, selection, everything = bench.rows
    assert row.bytes == 3 * 64 * 2 * 8 * 128 * 2 // 4
    assert (rate.unit, selection.case) == ("TB/s", f"{row.case}: selection")
    assert everything.case == f"{row.case}: all pages"


@pytest.mark.parametrize("case", [cascade.Case(4, 64, 0, 20), cascade.Case(4, 32, 32, 20, groups=2)])
def test_a_cascade(bench: harness.Bench, case: cascade.Case) -> None:
    cascade.measure(bench, case, (4, 2), 16)
    row, rate, *speeds, planning = bench.rows
    assert set(row.peers) == {"found", "found, one launch", "paged"}
    assert rate.unit == "TB/s"
    assert len(speeds) == 3
    assert planning.case == f"{case.title}: finding and planning"


@pytest.mark.parametrize(
    "cases", [[*variants.CASES, *variants.DECODES], [*sparse.MASKED, *sparse.RANDOM, *sparse.SELECTED], cascade.CASES]
)
def test_titles_are_different(cases: list[harness.Titled]) -> None:
    titles = [case.title for case in cases]
    assert len(set(titles)) == len(titles)

"""The attention benchmarks on the CPU: their batches' references, their peers, and a small case of each."""

from __future__ import annotations

import pytest
import torch

from benchmarks import attention_decode, attention_mixed, attention_prefill, harness, plan
from benchmarks.batches import Batch, Shape, make_batch
from benchmarks.peers import relative_error
from evenshare import paged_attention

CPU = torch.device("cpu")
SMALL = Shape([3, 1, 5], [33, 1, 16], 6, 2, 32)


def run(batch: Batch) -> torch.Tensor:
    plan = batch.plan()
    return batch.run_call(plan)()


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_reference_is_what_attention_computes(page_size: int, causal: bool) -> None:
    shape = Shape(SMALL.qo_lens, SMALL.kv_lens, 6, 2, 32, page_size, causal)
    batch = make_batch(shape, CPU, torch.float32)
    got, tokens = run(batch), batch.sampled_tokens()
    assert tokens.tolist() == [0, 1, 2, 3, 4, 6, 8]
    assert relative_error(got[tokens], batch.reference()) < 1e-6
    assert shape.kv_bytes == 50 * 2 * 2 * 32 * 2


def test_pages_hold_the_same_keys() -> None:
    ragged = make_batch(SMALL, CPU, torch.float32)
    paged = ragged.paged(4)
    assert paged.shape.page_size == 4
    assert relative_error(run(paged), run(ragged)) < 1e-6
    for request in range(3):
        for got, want in zip(paged.gather(request), ragged.gather(request), strict=True):
            assert torch.equal(got, want)


def test_a_selection_is_a_batch_of_its_own() -> None:
    batch = make_batch(Shape([3, 1, 5], [33, 1, 16], 6, 2, 32, 4), CPU, torch.float32)
    whole = run(batch)
    assert relative_error(run(batch.select(0, 1)), whole[:3]) < 1e-6
    assert relative_error(run(batch.select(1, 3)), whole[3:]) < 1e-6


def test_paged_attention_takes_the_metadata() -> None:
    batch = make_batch(Shape([1, 1], [5, 9], 4, 2, 32, 4), CPU, torch.float32)
    got = paged_attention(
        batch.q,
        batch.k,
        batch.v,
        kv_indptr=batch.kv_indptr,
        kv_indices=batch.kv_indices,
        last_page_len=batch.last_page_len,
    )
    assert relative_error(got, batch.reference()) < 1e-6


def test_decode_of_equal_lengths_has_dense_peers() -> None:
    batch = make_batch(Shape([1, 1], [5, 5], 4, 2, 32, 2), CPU, torch.float32)
    call = attention_decode.dense_peer("sdpa-flash", batch)
    assert call is not None
    assert relative_error(call(), batch.reference()) < 1e-6
    assert attention_decode.dense_peer("flashinfer", batch) is None
    uneven = make_batch(Shape([1, 1], [5, 6], 4, 2, 32, 2), CPU, torch.float32)
    assert attention_decode.dense_peer("sdpa-flash", uneven) is None


@pytest.mark.parametrize(("lengths", "rows"), [([40, 40], 1), ([33, 1], 1), ([33, 7], 4)])
def test_a_decode_case(bench: harness.Bench, lengths: list[int], rows: int) -> None:
    case = attention_decode.case("small", lengths, rows=rows, target=2.4)
    attention_decode.measure(bench, case)
    value, rate, ratio = bench.rows
    assert value.case == "32/8 heads, page 16, small"
    assert (value.bytes, value.flops) == (case.shape.kv_bytes, case.shape.flops)
    assert (rate.unit, rate.target, ratio.kind, ratio.target) == ("TB/s", 2.4, "ratio", None)


def test_large_caches_have_a_share_of_the_ceiling_to_reach() -> None:
    large = [case.title for case in attention_decode.CASES if case.shape.kv_bytes >= attention_decode.LARGE_KV]
    assert "64/8 heads, page 16, B=16 const 8192" in large
    assert "32/8 heads, page 1, B=64 L=8192" in large
    assert "64/8 heads, page 16, B=16 64k + 15x256" not in large


@pytest.mark.parametrize(
    "cases",
    [
        attention_decode.CASES,
        attention_mixed.CASES,
        [*attention_prefill.DENSE, *attention_prefill.MORE_DENSE, *attention_prefill.RAGGED, *attention_prefill.APPEND],
        [*plan.PLANS, *plan.CALLS, *plan.STARTS],
    ],
)
def test_titles_are_different(cases: list[harness.Titled]) -> None:
    titles = [case.title for case in cases]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("timing", ["graph", "events"])
def test_a_dense_prefill_case(bench: harness.Bench, timing: str) -> None:
    bench.peers = ["sdpa-flash"]
    case = attention_prefill.dense(24, True, heads=2, batch=3, timing=timing)
    row = attention_prefill.measure_dense(bench, case)
    assert row.peers == {"sdpa-flash": 20.0}
    assert row.flops == 3 * 4 * 128 * 2 * 24 * 25 // 2
    assert bench.rows[1].case == f"{case.title}: speed, ours / sdpa-flash"
    assert bench.rows[1].ours == 1.0


def test_a_ragged_prefill_case(bench: harness.Bench) -> None:
    case = attention_prefill.Case("small", Shape([40, 7], [40, 7], 4, 2, 32), target=1.0)
    attention_prefill.measure_ragged(bench, case)
    row, rate, *speeds = bench.rows
    assert set(row.peers) == {"page 1", "page 16", "page 64"}
    assert (rate.unit, rate.target) == ("TFLOP/s", 1.0)
    assert [speed.case for speed in speeds] == [f"small: speed, page {size} / ours" for size in (16, 64, 1)]
    assert [speed.target for speed in speeds] == [0.96, 0.96, 0.85]


def test_an_append_case(bench: harness.Bench) -> None:
    attention_prefill.measure_append(bench, attention_prefill.Case("small", Shape([7, 7], [40, 40], 4, 2, 32, 16)))
    assert [row.unit for row in bench.rows] == ["us", "TFLOP/s"]


def test_a_mixed_case(bench: harness.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_mixed, "side_by_side", attention_mixed.in_turn)  # the CPU has no streams
    case = attention_mixed.Case(2, 3, 20, 4, 33)
    assert case.title == "2 x 3 on 20 + 4 x 1 on 33"
    assert (case.shape.qo_lens, case.shape.kv_lens) == ([3, 3, 1, 1, 1, 1], [23, 23, 33, 33, 33, 33])
    attention_mixed.measure(bench, case)
    assert set(bench.rows[0].peers) == {"two plans", "two streams"}
    assert [row.case for row in bench.rows[1:]] == [
        f"{case.title}: speed, ours / two {w}" for w in ("plans", "streams")
    ]


def test_planning_and_calls(bench: harness.Bench) -> None:
    plan.measure_plan(bench, plan.Case("small", Shape([1, 1], [40, 7], 4, 2, 32, 16), "stream_k"))
    assert (bench.rows[0].ours, bench.rows[0].target) == (20.0, 15.0)
    plan.measure_call(bench, plan.Case("small", Shape([1, 1], [8, 8], 2, 2, 32, causal=False)))
    assert bench.rows[1].timing == "wall"
    assert bench.rows[2].case == "small: speed, ours / sdpa"


def test_a_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, match="cold start: "):
        plan.cold_start("decode")

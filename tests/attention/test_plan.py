"""One plan for many runs: layers, steps, capacity, both planners, and what it reports."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from evenshare.attention import AttentionPlan, plan_attention
from tests.attention.helpers import (
    Batch,
    Pages,
    Place,
    assert_matches,
    int32,
    move,
    nan_outputs,
    oracle,
    random_batch,
    run_paged,
    to_pages,
)

STEPS = [((1, 4, 1), (33, 6, 0)), ((1, 1, 2), (0, 18, 40)), ((0, 0, 6), (3, 0, 6))]


def make_plan(batch: Batch, pages: Pages, place: Place, form: str = "indptr", **options: Any) -> AttentionPlan:
    return plan_attention(
        num_qo_heads=batch.q.shape[1], num_kv_heads=batch.k.shape[1], head_dim=batch.q.shape[2], dtype=torch.float32,
        page_size=pages.page_size, qo_indptr=int32(batch.qo_indptr, place.device), max_q_rows=8, backend=place.backend,
        **pages.table(form, place.device), **options,
    )  # fmt: skip


def run(plan: AttentionPlan, batch: Batch, pages: Pages, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = nan_outputs(batch, place, torch.float32)
    plan.run(batch.q.to(place.device), pages.k, pages.v, **outputs)
    return outputs["out"], outputs["lse"]


def test_one_plan_for_all_layers(place: Place) -> None:
    plan = None
    for _ in range(3):
        batch = random_batch(*STEPS[0], heads=(4, 2), dim=16)
        torch.manual_seed(0)  # the same pages in every layer
        pages = to_pages(move(batch, place), 4)
        plan = make_plan(batch, pages, place) if plan is None else plan
        assert_matches(*run(plan, batch, pages, place), batch)
        torch.manual_seed(int(batch.q.sum() * 1000) % 1000)
    assert plan is not None
    plan.check()


@pytest.mark.parametrize("form", ["indptr", "block_table"])
def test_update_for_every_step(place: Place, form: str) -> None:
    plan = None
    for qo_lens, kv_lens in [*STEPS, STEPS[0]]:
        batch = random_batch(qo_lens, kv_lens, heads=(4, 2), dim=16)
        pages = to_pages(move(batch, place), 4)
        if plan is None:
            plan = make_plan(batch, pages, place, form)
        else:
            plan.update(qo_indptr=int32(batch.qo_indptr, place.device), **pages.table(form, place.device))
        assert_matches(*run(plan, batch, pages, place), batch)
        plan.check()


def test_values_changed_in_place(place: Place) -> None:
    """The tensors stay, their values change, and `update()` without arguments plans them again."""
    table, lens = torch.zeros(3, 11, dtype=torch.int32, device=place.device), int32([0, 0, 0], place.device)
    plan = plan_attention(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, page_size=4, block_table=table, kv_lens=lens,
        backend=place.backend,
    )  # fmt: skip
    for kv_lens in ((5, 0, 33), (1, 40, 4)):
        batch = random_batch((1, 1, 1), kv_lens, heads=(4, 2), dim=16)
        pages = to_pages(move(batch, place), 4)
        columns = pages.block_table.shape[1] - 1
        table.fill_(2**31 - 1)
        table[:, :columns], lens[:] = pages.block_table[:, :columns].to(place.device), pages.kv_lens.to(place.device)
        plan.update()
        assert_matches(*run(plan, batch, pages, place), batch)


def test_ragged_plan_with_fewer_requests_than_capacity(place: Place) -> None:
    options = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32, "backend": place.backend}
    indptrs = {"qo_indptr": int32([0, 2, 4, 6], place.device), "kv_indptr": int32([0, 4, 8, 12], place.device)}
    plan = plan_attention(**options, **indptrs, max_q_rows=6)
    batch = random_batch((3, 1), (18, 25), heads=(4, 2), dim=16)
    moved = move(batch, place)
    plan.update(qo_indptr=int32(batch.qo_indptr, place.device), kv_indptr=int32(batch.kv_indptr, place.device))
    outputs = nan_outputs(batch, place, torch.float32)
    plan.run(moved.q, moved.k, moved.v, **outputs)
    assert_matches(outputs["out"], outputs["lse"], batch)


def test_padding_rows_do_no_harm(place: Place) -> None:
    """q, out and lse may be longer than the batch."""
    batch = random_batch((1, 2), (18, 5), heads=(4, 2), dim=16)
    pages = to_pages(move(batch, place), 4)
    plan = make_plan(batch, pages, place)
    q = torch.cat((batch.q, torch.full((4, 4, 16), math.nan))).to(place.device)
    out, lse = plan.run(q, pages.k, pages.v, return_lse=True)
    assert (out.shape, lse.shape) == ((7, 4, 16), (7, 4))
    assert_matches(out[:3], lse[:3], batch)


def test_lse_in_the_base_of_the_plan(place: Place) -> None:
    batch = random_batch((1, 2), (18, 5), heads=(4, 2), dim=16)
    pages = to_pages(move(batch, place), 4)
    plan = make_plan(batch, pages, place, base=2.0)
    assert_matches(*run(plan, batch, pages, place), batch, base=2.0)
    # A second run reads scratch that the first has left clean.
    assert_matches(*run(plan, batch, pages, place), batch, base=2.0)


def test_return_values(place: Place) -> None:
    batch = random_batch((1, 2), (18, 5), heads=(4, 2), dim=16)
    pages = to_pages(move(batch, place), 4)
    plan, q = make_plan(batch, pages, place), batch.q.to(place.device)
    out = torch.empty_like(q)
    assert plan.run(q, pages.k, pages.v, out=out) is out
    both = plan.run(q, pages.k, pages.v, return_lse=True)
    torch.testing.assert_close(both[0], out, atol=1e-6, rtol=0)
    assert both[1].shape == (3, 4)


@pytest.mark.parametrize("form", ["indptr", "block_table"])
@pytest.mark.parametrize("window_left", [-1, 5])
def test_device_planner_gives_the_host_planners_bits(kernel_place: Place, form: str, window_left: int) -> None:
    for qo_lens, kv_lens in STEPS:
        batch = random_batch(qo_lens, kv_lens, heads=(4, 2), dim=16)
        pages = to_pages(move(batch, kernel_place), 4)
        plans = [make_plan(batch, pages, Place(torch.device("cpu"), "triton", ()), form, planner=name, window_left=window_left,
                           device=kernel_place.device) for name in ("host", "device")]  # fmt: skip
        host, device = (run(plan, batch, pages, kernel_place) for plan in plans)
        assert_matches(*host, batch, window_left=window_left)
        for a, b in zip(host, device, strict=True):
            assert torch.equal(a, b)


def test_a_page_outside_the_cache(place: Place) -> None:
    """Torch refuses it; kernels, which the host cannot warn, give zeros for that request and say so in the status."""
    batch = random_batch((1, 1, 1), (40, 9, 20), heads=(4, 2), dim=16)
    pages = to_pages(move(batch, place), 4)
    pages.block_table[0, 3] = 1000
    pages.block_table[2, 0] = -1
    plan = make_plan(batch, pages, place, "block_table")
    plan.check()
    if place.backend == "cpu":
        with pytest.raises(ValueError, match="page of request 0: got 1000"):
            run(plan, batch, pages, place)
        return
    out, lse = run(plan, batch, pages, place)
    want, _ = oracle(batch)
    torch.testing.assert_close(out[1].cpu().double(), want[1], atol=2e-5, rtol=0)
    for bad in (0, 2):
        assert (out[bad] == 0).all()
        assert torch.isneginf(lse[bad]).all()
    with pytest.raises(RuntimeError, match="outside the cache"):
        plan.check()
    plan.update(block_table=to_pages(batch, 4).block_table.to(place.device))
    plan.check()


def test_a_fixed_capacity_is_not_exceeded(place: Place) -> None:
    batch = random_batch((1, 2), (18, 5), heads=(4, 2), dim=16)
    pages = to_pages(move(batch, place), 4)
    plan = make_plan(batch, pages, place)
    if place.device.type == "cpu" and place.backend == "triton":
        with pytest.raises(ValueError, match=r"qo_indptr: got .* row tiles, want at most the plan's capacity"):
            plan.update(qo_indptr=int32([0, 100, 200], place.device))
    assert_matches(*run(plan, batch, pages, place), batch)


@pytest.mark.parametrize(
    "policy", ["data_parallel", "fixed_split", "stream_k", "level_fill", "cost_sorted", "batch_invariant"]
)
def test_every_policy(kernel_place: Place, policy: str) -> None:
    batch = random_batch((1, 4, 1), (70, 20, 9), heads=(4, 2), dim=16)
    pages = to_pages(move(batch, kernel_place), 4)
    host = Place(torch.device("cpu"), "triton", ())
    plan = make_plan(batch, pages, host, policy=policy, device=kernel_place.device, planner="host", max_kv_len=80)
    assert_matches(*run(plan, batch, pages, kernel_place), batch)


def run_invariant(batch: Batch, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    pages = to_pages(move(batch, place), 4)
    host = Place(torch.device("cpu"), "triton", ())
    plan = make_plan(batch, pages, host, policy="batch_invariant", device=place.device, max_kv_len=80)
    return run(plan, batch, pages, place)


def test_batch_invariance(kernel_place: Place) -> None:
    """Under fixed boundaries a request's bits do not depend on what else is in the batch."""
    batch = random_batch((1, 4, 1), (70, 20, 9), heads=(4, 2), dim=16)
    many, _ = run_invariant(batch, kernel_place)
    for r in range(3):
        rows = slice(batch.qo_indptr[r], batch.qo_indptr[r + 1])
        keys = slice(batch.kv_indptr[r], batch.kv_indptr[r + 1])
        alone = Batch(batch.qo_lens[r : r + 1], batch.kv_lens[r : r + 1], batch.q[rows], batch.k[keys], batch.v[keys])
        assert torch.equal(run_invariant(alone, kernel_place)[0], many[rows])


def test_plan_and_function_agree(place: Place) -> None:
    torch.manual_seed(3)
    batch = random_batch((1, 4), (33, 6), heads=(4, 2), dim=16)
    torch.manual_seed(3)
    pages = to_pages(move(batch, place), 4)
    plan = make_plan(batch, pages, place)
    torch.manual_seed(3)
    out, lse = run_paged(batch, place, 4)
    got = run(plan, batch, pages, place)
    torch.testing.assert_close(got[0], out, atol=1e-6, rtol=0)
    assert lse is not None
    torch.testing.assert_close(got[1], lse, atol=1e-6, rtol=1e-6)


def test_a_plan_grows_to_its_max_batch(place: Place) -> None:
    small = random_batch((1,), (18,), heads=(4, 2), dim=16)
    large = random_batch((1, 1, 1), (5, 40, 0), heads=(4, 2), dim=16)
    plan = make_plan(small, to_pages(move(small, place), 4), place, max_batch=3)
    pages = to_pages(move(large, place), 4)
    plan.update(qo_indptr=int32(large.qo_indptr, place.device), **pages.table("indptr", place.device))
    assert_matches(*run(plan, large, pages, place), large)
    with pytest.raises(ValueError, match="batch: got 4 requests, want at most the plan's max_batch 3"):
        plan.update(
            qo_indptr=int32(range(5), place.device),
            kv_indptr=int32([0] * 5, place.device),
            last_page_len=int32([0] * 4, place.device),
        )
    with pytest.raises(ValueError, match="max_batch: got 2, want at least the 3 requests"):
        make_plan(large, pages, place, max_batch=2)


def test_update_follows_int64_tensors_changed_in_place(place: Place) -> None:
    """int64 metadata is planned from int32 copies; the next update must see the caller's tensors, not those."""
    batch = random_batch((1, 1), (18, 30), heads=(4, 2), dim=16)
    pages = to_pages(move(batch, place), 4)
    table, lens = pages.block_table.to(place.device).long(), torch.tensor([9, 9], device=place.device)
    plan = plan_attention(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, page_size=4, block_table=table, kv_lens=lens,
        backend=place.backend,
    )  # fmt: skip
    lens.copy_(torch.tensor([18, 30]))
    plan.update()
    assert_matches(*run(plan, batch, pages, place), batch)

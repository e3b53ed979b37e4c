"""Every policy deals every iteration exactly once, within the capacity; and each keeps its own promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import evenshare.schedule
from evenshare.schedule import (
    Policy,
    RaggedSpace,
    UniformPlan,
    capacity_of,
    expand,
    make_plan,
    uniform_plan,
    uniform_space,
)
from evenshare.schedule.plan import BEGIN, END, TILE
from evenshare.schedule.policies import POLICIES
from tests.schedule.helpers import check_plan, lengths, segments_of, shares_of, spaces, workers

quick = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize("policy", POLICIES)
@quick
@given(space=spaces(), num_workers=workers, parameter=st.integers(1, 7))
def test_each_iteration_once(policy: str, space: RaggedSpace, num_workers: int, parameter: int) -> None:
    plan = make_plan(space, policy, num_workers, num_splits=parameter, split_iterations=parameter, max_chunk=parameter)
    check_plan(plan, space)


@quick
@given(space=spaces(), num_workers=workers)
def test_level_fill_cuts_only_where_that_pays(space: RaggedSpace, num_workers: int) -> None:
    whole = make_plan(space, "data_parallel", num_workers)
    costs = [sum(s[END] - s[BEGIN] + space.overhead for s in segments) for segments in segments_of(whole)]
    plan = make_plan(space, "level_fill", num_workers)
    if max(costs) - space.cut_cost <= sum(costs) / num_workers:
        assert segments_of(plan) == segments_of(whole)
    elif sum(costs) >= num_workers:  # enough for everybody
        shares = [
            sum(s[END] - s[BEGIN] + space.overhead * (s[BEGIN] == 0) for s in segments)
            for segments in segments_of(plan)
        ]
        assert max(shares) <= sum(costs) / num_workers + space.overhead + 1


@given(space=spaces(max_overhead=0), num_workers=workers)
def test_even_shares_differ_by_one(space: RaggedSpace, num_workers: int) -> None:
    shares = shares_of(make_plan(space, "stream_k", num_workers))
    assert max(shares) - min(shares) <= 1


@quick
@given(space=spaces(), num_workers=workers)
def test_even_share_in_cost_space(space: RaggedSpace, num_workers: int) -> None:
    """With a constant per tile a share is off by at most that constant at either end, in cost."""
    plan = make_plan(space, "stream_k", num_workers)
    total = sum(n + space.overhead for n in space.tile_iterations().tolist() if n)
    for segments in segments_of(plan):
        cost = sum(s[END] - s[BEGIN] + space.overhead * (s[BEGIN] == 0) for s in segments)
        assert total // num_workers - space.overhead <= cost <= -(-total // num_workers) + space.overhead


@quick
@given(num_tiles=st.integers(0, 60), iters=st.integers(1, 9), num_workers=workers)
def test_level_fill_of_equal_tiles_is_two_tile_stream_k(num_tiles: int, iters: int, num_workers: int) -> None:
    plan = make_plan(uniform_space(num_tiles, iters), "level_fill", num_workers)
    whole, rest = divmod(num_tiles, num_workers)
    waves = whole if rest == 0 else max(whole - 1, 0)
    for w, segments in enumerate(segments_of(plan)):
        assert [s[TILE] for s in segments[:waves]] == [i * num_workers + w for i in range(waves)]
        tail = segments[waves:]
        assert all(s[TILE] >= waves * num_workers for s in tail)
        share = sum(s[END] - s[BEGIN] for s in tail)
        assert (
            share * num_workers >= (rest + num_workers * (whole >= 1 and rest > 0)) * iters - num_workers + 1
            or rest == 0
        )
    shares = shares_of(plan)
    assert max(shares) - min(shares) <= 1
    if rest == 0:
        assert all(s[BEGIN] == 0 and s[END] == iters for segments in segments_of(plan) for s in segments)


@quick
@given(num_tiles=st.integers(0, 60), iters=st.integers(1, 9), num_workers=workers)
def test_uniform_plan_is_level_fill(num_tiles: int, iters: int, num_workers: int) -> None:
    uniform = uniform_plan(num_tiles, iters, num_workers)
    assert uniform.num_workers == min(num_workers, max(num_tiles * iters, 1))
    closed = expand(uniform)
    space = uniform_space(num_tiles, iters)
    check_plan(closed, space)
    plan = make_plan(space, "level_fill", uniform.num_workers)
    assert torch.equal(closed.worker_indptr, plan.worker_indptr)
    assert torch.equal(closed.segments, plan.segments)


def test_uniform_plan_without_split_deals_whole_tiles() -> None:
    plan = uniform_plan(10, 5, 4, split=False)
    assert plan == UniformPlan(4, 10, 5, 10)
    assert (plan.max_slots, plan.max_counters) == (0, 0)
    check_plan(expand(plan), uniform_space(10, 5))


@quick
@given(first=lengths, second=lengths, length=st.integers(1, 50), num_workers=workers)
def test_batch_invariant_cuts_do_not_depend_on_the_batch(
    first: list[int], second: list[int], length: int, num_workers: int
) -> None:
    def cuts(before: list[int], after: list[int]) -> set[tuple[int, int]]:
        space = RaggedSpace(torch.tensor([*before, length, *after], dtype=torch.int32))
        plan = make_plan(space, "batch_invariant", num_workers, split_iterations=7)
        return {(s[BEGIN], s[END]) for segments in segments_of(plan) for s in segments if s[TILE] == len(before)}

    assert cuts(first, second) == cuts(second, []) == cuts([], first)


@quick
@given(space=spaces(), num_workers=workers, chunk=st.integers(1, 20))
def test_cost_sorted_is_within_a_chunk_of_level(space: RaggedSpace, num_workers: int, chunk: int) -> None:
    """The greedy bound: the last chunk went to the least loaded worker, so none ends later than the mean plus one chunk."""
    plan = make_plan(space, "cost_sorted", num_workers, max_chunk=chunk)
    loads = [sum(s[END] - s[BEGIN] + space.overhead for s in segments) for segments in segments_of(plan)]
    assert max(loads) <= sum(loads) / num_workers + chunk + space.overhead
    for segments in segments_of(plan):
        sizes = [s[END] - s[BEGIN] for s in segments]
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("policy", POLICIES)
@quick
@given(first=lengths, second=lengths, num_workers=workers)
def test_capacity_is_independent_of_lengths(policy: str, first: list[int], second: list[int], num_workers: int) -> None:
    size = max(len(first), len(second))
    sizes = set()
    for rows in (first, second):
        iterations = torch.zeros(size, dtype=torch.int32)
        iterations[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
        plan = make_plan(RaggedSpace(iterations), policy, num_workers, max_iterations=size * 60)
        sizes.add((plan.max_segments, plan.max_slots, plan.max_counters, plan.segments.shape))
    assert len(sizes) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_out_is_overwritten_in_place(policy: str) -> None:
    rows = torch.tensor([30, 1, 1, 2], dtype=torch.int32)
    first, second = RaggedSpace(rows, 2), RaggedSpace(rows.flip(0) - 1, 2)
    plan = make_plan(first, policy, 5, max_iterations=68)
    tensors = plan.worker_indptr, plan.segments, plan.status
    plan.status.fill_(4)  # what a kernel has set
    assert make_plan(second, policy, 5, max_iterations=68, out=plan) is plan
    fresh = make_plan(second, policy, 5, max_iterations=68)
    for mine, its in zip(tensors, (fresh.worker_indptr, fresh.segments, fresh.status), strict=True):
        assert torch.equal(mine, its)


def test_out_of_another_capacity_is_left_alone() -> None:
    plan = make_plan(uniform_space(3, 4), "stream_k", 4)
    before = plan.segments.clone()
    with pytest.raises(ValueError, match="out: got a plan with max_segments 7, want 8"):
        make_plan(uniform_space(4, 5), "stream_k", 4, out=plan)
    with pytest.raises(ValueError, match="out: got a plan with num_workers 4, want 5"):
        make_plan(uniform_space(3, 4), "stream_k", 5, out=plan)
    assert torch.equal(plan.segments, before)


@pytest.mark.parametrize("policy", ["data_parallel", "fixed_split", "stream_k", "level_fill"])
def test_sums_past_32_bits(policy: str) -> None:
    space = RaggedSpace(torch.tensor([2**31 - 1, 5, 2**30], dtype=torch.int32), 7, 3)
    check_plan(make_plan(space, policy, 5), space)


def test_errors_name_the_argument() -> None:
    space = uniform_space(3, 4)
    with pytest.raises(ValueError, match="policy: got 'greedy', want one of data_parallel"):
        make_plan(space, "greedy", 4)
    with pytest.raises(ValueError, match="num_workers: got 0"):
        make_plan(space, "stream_k", 0)
    with pytest.raises(ValueError, match="num_splits: got 0"):
        make_plan(space, "fixed_split", 4, num_splits=0)
    with pytest.raises(ValueError, match="split_iterations: got 0"):
        Policy("batch_invariant", split_iterations=0)
    with pytest.raises(ValueError, match="iterations: got -1"):
        make_plan(RaggedSpace(torch.tensor([3, -1], dtype=torch.int32)), "stream_k", 4)
    with pytest.raises(ValueError, match=r"iterations: got torch.int64"):
        RaggedSpace(torch.tensor([3]))
    with pytest.raises(ValueError, match="inner, overhead, cut_cost: got 0, 0 and 0"):
        RaggedSpace(torch.tensor([3], dtype=torch.int32), inner=0)
    with pytest.raises(ValueError, match="space: got 12 segments, want at most the capacity of 6"):
        make_plan(space, "batch_invariant", 4, split_iterations=1, max_iterations=3)
    with pytest.raises(ValueError, match="num_workers: got 0"):
        uniform_plan(3, 4, 0)
    with pytest.raises(ValueError, match="num_tiles, iters_per_tile: got -1 and 4"):
        uniform_plan(-1, 4, 2)


def test_capacity_of_even_shares_is_linear_in_workers() -> None:
    assert capacity_of(Policy("stream_k"), 1000, 264).max_slots == 528


def test_the_scheduler_knows_no_operator() -> None:
    for path in Path(evenshare.schedule.__file__).parent.glob("**/*.py"):
        assert "attention" not in path.read_text().lower(), path.name

"""The simulator against hand-made plans, and against bounds that hold for every schedule."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenshare.schedule import RaggedSpace, make_plan
from evenshare.schedule.plan import BEGIN, END, SEGMENT_COLUMNS, Plan
from evenshare.schedule.policies import POLICIES
from evenshare.schedule.simulator import Costs, Event, simulate

README_BATCH = RaggedSpace(torch.tensor([512] + 15 * [2], dtype=torch.int32), inner=8, overhead=1)


def plan_of(indptr: list[int], rows: list[list[int]]) -> Plan:
    """rows: tile, begin, end, slot, slot_begin, num_slots, counter."""
    segments = torch.zeros(len(rows), SEGMENT_COLUMNS, dtype=torch.int32)
    segments[:, :7] = torch.tensor(rows, dtype=torch.int32).reshape(-1, 7)
    return Plan(
        num_workers=len(indptr) - 1,
        max_segments=len(rows),
        max_slots=len(rows),
        max_counters=len(rows),
        worker_indptr=torch.tensor(indptr, dtype=torch.int32),
        segments=segments,
        status=torch.zeros(1, dtype=torch.int32),
    )


def test_last_arriver_merges_then_goes_on() -> None:
    plan = plan_of([0, 2, 3], [[0, 0, 4, 0, 0, 2, 0], [1, 0, 3, 0, 0, 1, 0], [0, 4, 7, 1, 0, 2, 0]])
    timeline = simulate(plan, Costs(segment=1.0, store=0.5, merge=0.25))
    first = (Event(0, 0.0, 5.5, "partial"), Event(0, 5.5, 6.0, "merge"), Event(1, 6.0, 10.0, "whole"))
    assert timeline.workers == (first, (Event(0, 0.0, 4.5, "partial"),))
    assert timeline.makespan == 10.0
    assert timeline.utilisation == 10 / (2 * 10.0)
    assert (timeline.num_segments, timeline.num_split_tiles, timeline.num_partials) == (3, 1, 2)


def test_merging_delays_a_later_arrival() -> None:
    """Worker 0 would be first at tile 1, but has merged tile 0 by then: worker 1 is, and worker 0 merges again."""
    rows = [[0, 0, 4, 0, 0, 2, 0], [1, 0, 1, 2, 2, 2, 1], [0, 4, 7, 1, 0, 2, 0], [1, 1, 4, 3, 2, 2, 1]]
    timeline = simulate(plan_of([0, 2, 4], rows), Costs(merge=2.0))
    assert [event.kind for event in timeline.workers[0]] == ["partial", "merge", "partial", "merge"]
    assert timeline.makespan == 4 + 4 + 1 + 4


def test_contributors_that_finish_together_merge_once() -> None:
    timeline = simulate(plan_of([0, 1, 2], [[0, 0, 4, 0, 0, 2, 0], [0, 4, 8, 1, 0, 2, 0]]), Costs(merge=1.0))
    assert [len(events) for events in timeline.workers] == [1, 2]


def test_missing_contributor_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"plan: counters \[3\] wait"):
        simulate(plan_of([0, 1], [[0, 0, 4, 0, 0, 2, 3]]))


def test_negative_cost_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"store: got -1.0, want 0 or more"):
        Costs(store=-1.0)


def test_no_work() -> None:
    timeline = simulate(make_plan(RaggedSpace(torch.zeros(3, dtype=torch.int32)), "stream_k", 4))
    assert (timeline.makespan, timeline.utilisation, timeline.num_segments) == (0.0, 1.0, 0)
    assert timeline.workers == ((), (), (), ())


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    inner=st.integers(1, 4),
    workers=st.integers(1, 20),
    policy=st.sampled_from(POLICIES),
    costs=st.builds(Costs, *3 * [st.sampled_from([0.0, 0.25, 2.0])]),
)
def test_bounds(lengths: list[int], inner: int, workers: int, policy: str, costs: Costs) -> None:
    space = RaggedSpace(torch.tensor(lengths, dtype=torch.int32), inner=inner)
    plan = make_plan(space, policy, workers)
    timeline = simulate(plan, costs)
    total = sum(lengths) * inner
    assert timeline.iterations == total
    assert timeline.makespan >= total / workers - 1e-9
    assert timeline.makespan >= int((plan.segments[:, END] - plan.segments[:, BEGIN]).max())
    assert 0 < timeline.utilisation <= 1 + 1e-12
    for events in timeline.workers:
        for before, after in itertools.pairwise(events):
            assert before.end == after.begin
    busy = sum(event.end - event.begin for events in timeline.workers for event in events)
    paid = total + costs.segment * timeline.num_segments + (costs.store + costs.merge) * timeline.num_partials
    assert math.isclose(busy, paid, abs_tol=1e-6)


@pytest.mark.parametrize("costs", [Costs(), Costs(segment=1.0, store=0.125, merge=0.125)])
def test_even_share_levels_a_skewed_batch(costs: Costs) -> None:
    spans = {name: simulate(make_plan(README_BATCH, name, 132), costs).makespan for name in POLICIES}
    assert spans["stream_k"] <= spans["data_parallel"] / 10
    assert spans["level_fill"] <= spans["data_parallel"] / 10
    assert spans["stream_k"] <= spans["fixed_split"]


@pytest.mark.parametrize("lengths", [[2] * 132, [64] * 264])
def test_whole_waves_gain_nothing_from_splitting(lengths: list[int]) -> None:
    space = RaggedSpace(torch.tensor(lengths, dtype=torch.int32))
    costs = Costs(segment=1.0, store=1.0, merge=1.0)
    whole = simulate(make_plan(space, "data_parallel", 132), costs)
    level = simulate(make_plan(space, "level_fill", 132), costs)
    assert level.makespan == whole.makespan
    assert level.num_partials == 0

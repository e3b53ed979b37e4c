"""The device planner's arrays are the host planner's, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenshare.schedule import DevicePlanner, Plan, RaggedSpace, Status, make_plan
from evenshare.schedule.policies import DEVICE_POLICIES, Policy
from tests.schedule.helpers import spaces, workers

CASES = [  # iterations, inner, overhead, workers
    ([], 1, 0, 3),
    ([0, 0], 2, 1, 3),
    ([7], 1, 0, 4),
    ([1, 0, 30, 2, 2, 0, 9], 2, 1, 5),
    ([5] * 11, 1, 0, 4),
    ([5] * 9, 3, 2, 4),
    ([40, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], 1, 3, 7),
    ([3] * 20, 1, 9, 8),  # shares shorter than the constant cost
    ([2] * 37, 2, 1, 3),  # more rows than one block of the interpreter
    ([1] * 25, 2, 0, 2),  # more waves than one block
    ([0] * 17 + [3, 0, 9], 1, 1, 4),  # a whole block of empty rows first
]


def assert_same(host: Plan, device: Plan) -> None:
    for name in ("worker_indptr", "segments", "status"):
        assert torch.equal(getattr(host, name), getattr(device, name).cpu()), name
    assert (host.num_workers, host.max_segments) == (device.num_workers, device.max_segments)
    assert (host.max_slots, host.max_counters) == (device.max_slots, device.max_counters)


@pytest.mark.parametrize("policy", DEVICE_POLICIES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{len(c[0])}x{c[1]}+{c[2]} on {c[3]}")
def test_same_as_host(device: torch.device, policy: str, case: tuple[list[int], int, int, int]) -> None:
    rows, inner, overhead, num_workers = case
    iterations = torch.tensor(rows, dtype=torch.int32)
    space = RaggedSpace(iterations.to(device), inner, overhead)
    planner = DevicePlanner(space, policy, num_workers, max_iterations=4000)
    for values in (iterations, iterations.flip(0), iterations * 2):  # the same planner, again and again
        host = make_plan(RaggedSpace(values, inner, overhead), policy, num_workers, max_iterations=4000)
        assert_same(host, planner.plan(values.to(device)))


@pytest.mark.parametrize("cut_cost", [0, 1, 3, 50])
def test_level_fill_weighs_cuts_as_on_the_host(device: torch.device, cut_cost: int) -> None:
    for rows, inner, overhead, num_workers in CASES:
        iterations = torch.tensor(rows, dtype=torch.int32)
        planner = DevicePlanner(
            RaggedSpace(iterations.to(device), inner, overhead, cut_cost), "level_fill", num_workers
        )
        for values in (iterations, iterations.flip(0)):
            host = make_plan(RaggedSpace(values, inner, overhead, cut_cost), "level_fill", num_workers)
            assert_same(host, planner.plan(values.to(device)))


@pytest.mark.parametrize("policy", DEVICE_POLICIES)
def test_rows_past_the_number_on_the_device_are_not_read(device: torch.device, policy: str) -> None:
    iterations = torch.tensor([3, 9, 0, 4] + [-7] * 20, dtype=torch.int32)
    planner = DevicePlanner(RaggedSpace(iterations.to(device), 2, 1), policy, 3, max_iterations=200)
    number = torch.zeros(1, dtype=torch.int32, device=device)
    for count in (4, 0, 2, 1, 4):
        number.fill_(count)
        values = torch.zeros_like(iterations)
        values[:count] = iterations[:count]
        host = make_plan(RaggedSpace(values, 2, 1), policy, 3, max_iterations=200)
        assert_same(host, planner.plan(iterations.to(device), number))
    number.fill_(1000)  # clamped to the rows that there are
    assert int(planner.plan(iterations.to(device), number).status) == Status.BAD_LENGTHS


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(space=spaces(), num_workers=workers, name=st.sampled_from(DEVICE_POLICIES), parameter=st.integers(1, 20))
def test_random_spaces_are_the_host_s(
    device: torch.device, space: RaggedSpace, num_workers: int, name: str, parameter: int
) -> None:
    policy = Policy(name, num_splits=parameter, split_iterations=parameter)
    limit = 12 * 3 * 60
    there = replace(space, iterations=space.iterations.to(device))
    planner = DevicePlanner(there, policy, num_workers, max_iterations=limit)
    assert_same(make_plan(space, policy, num_workers, max_iterations=limit), planner.plan(there.iterations))


@pytest.mark.parametrize("name", DEVICE_POLICIES)
def test_sums_past_32_bits(device: torch.device, name: str) -> None:
    iterations = torch.tensor([2**31 - 1, 5, 2**30], dtype=torch.int32)
    policy, limit = Policy(name, split_iterations=2**30 - 1), 2**35
    planner = DevicePlanner(RaggedSpace(iterations.to(device), 7, 3), policy, 5, max_iterations=limit)
    host = make_plan(RaggedSpace(iterations, 7, 3), policy, 5, max_iterations=limit)
    assert_same(host, planner.plan(iterations.to(device)))


@pytest.mark.parametrize("policy", DEVICE_POLICIES)
def test_negative_lengths_are_empty_rows(device: torch.device, policy: str) -> None:
    iterations = torch.tensor([9, -5, 2, -(2**31)], dtype=torch.int32)
    planner = DevicePlanner(RaggedSpace(iterations.to(device), 2, 1), policy, 3, max_iterations=100)
    plan = planner.plan(iterations.to(device))
    assert int(plan.status) == Status.BAD_LENGTHS
    plan.status.zero_()
    space = RaggedSpace(iterations.clamp(min=0), 2, 1)
    assert_same(make_plan(space, policy, 3, max_iterations=100), plan)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", DEVICE_POLICIES)
def test_large_spaces(policy: str) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = ((3000, 8, 264, 50), (256, 8, 132, 2000), (70, 4, 1000, 60000), (1500, 8, 264, 2), (1, 1, 264, 9))
    for (num_rows, inner, num_workers, longest), holes in product(sizes, (True, False)):
        iterations = torch.randint(0 if holes else 1, longest + 1, (num_rows,), generator=generator, dtype=torch.int32)
        if holes:
            iterations[::7] = 0
        limit = num_rows * inner * (longest + 1)
        planner = DevicePlanner(RaggedSpace(iterations.cuda(), inner, 1), policy, num_workers, max_iterations=limit)
        host = make_plan(RaggedSpace(iterations, inner, 1), policy, num_workers, max_iterations=limit)
        assert_same(host, planner.plan(iterations.cuda()))


@pytest.mark.gpu
def test_graph_replay_plans_new_lengths() -> None:
    iterations = torch.full((40,), 9, dtype=torch.int32, device="cuda")
    planner = DevicePlanner(RaggedSpace(iterations, 4, 1), "stream_k", 64)
    planner.plan(iterations)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = planner.plan(iterations)
    for values in ([1] * 40, [0] * 39 + [500], list(range(40))):
        iterations.copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        assert_same(make_plan(RaggedSpace(torch.tensor(values, dtype=torch.int32), 4, 1), "stream_k", 64), plan)


def test_beyond_the_capacity_the_plan_is_empty(device: torch.device) -> None:
    iterations = torch.tensor([50, 3], dtype=torch.int32, device=device)
    planner = DevicePlanner(RaggedSpace(iterations), "batch_invariant", 4, max_iterations=0)
    plan = planner.plan(iterations)
    assert int(plan.status) == Status.SEGMENTS_OVERFLOW
    assert not plan.worker_indptr.any()
    assert not plan.segments.any()
    for row in (2**31 - 1, 2**30):  # inner times the number of parts passes 32 bits
        huge = torch.full((4,), row, dtype=torch.int32, device=device)
        space = RaggedSpace(huge, 8)
        plan = DevicePlanner(space, Policy("batch_invariant", split_iterations=1), 4, max_iterations=64).plan(huge)
        assert int(plan.status) == Status.SEGMENTS_OVERFLOW
        assert not plan.segments.any()
    plan = planner.plan(torch.tensor([5, 3], dtype=torch.int32, device=device))  # it fits again
    assert int(plan.status) == 0
    assert int(plan.worker_indptr[-1]) == 2


def test_errors_name_the_argument(device: torch.device) -> None:
    space = RaggedSpace(torch.ones(3, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"policy: got 'cost_sorted', want one of .* on the device"):
        DevicePlanner(space, "cost_sorted", 4)
    with pytest.raises(ValueError, match="num_workers: got 0"):
        DevicePlanner(space, "stream_k", 0)
    planner = DevicePlanner(space, "stream_k", 4)
    with pytest.raises(ValueError, match=r"iterations: got torch.int32 \(2,\)"):
        planner.plan(torch.ones(2, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"iterations: got torch.int64 \(3,\) on .*, want torch.int32 \(3,\)"):
        planner.plan(torch.ones(3, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match=r"num_rows: got torch.int64 \(1,\) on .*, want torch.int32 \(1,\) on"):
        planner.plan(torch.ones(3, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="iterations: got stride 2, want 1"):
        planner.plan(torch.ones(6, dtype=torch.int32, device=device)[::2])

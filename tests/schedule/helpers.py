"""Random spaces, and what every plan must satisfy."""

from __future__ import annotations

from collections import defaultdict

import torch
from hypothesis import strategies as st

from evenshare.schedule import Plan, RaggedSpace
from evenshare.schedule.plan import BEGIN, COUNTER, END, NUM_SLOTS, SLOT, SLOT_BEGIN, TILE

lengths = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 60)), max_size=12)
workers = st.integers(1, 10)


@st.composite
def spaces(draw: st.DrawFn, max_overhead: int = 3) -> RaggedSpace:
    iterations = torch.tensor(draw(lengths), dtype=torch.int32)
    inner, overhead = draw(st.integers(1, 3)), draw(st.integers(0, max_overhead))
    return RaggedSpace(iterations, inner, overhead, cut_cost=draw(st.sampled_from((0, 0, 2, 20))))


def segments_of(plan: Plan) -> list[list[list[int]]]:
    """Per worker, its segments in the order it runs them."""
    rows, indptr = plan.segments.tolist(), plan.worker_indptr.tolist()
    return [rows[indptr[w] : indptr[w + 1]] for w in range(plan.num_workers)]


def shares_of(plan: Plan) -> list[int]:
    """Iterations of each worker."""
    return [sum(s[END] - s[BEGIN] for s in segments) for segments in segments_of(plan)]


def check_plan(plan: Plan, space: RaggedSpace) -> None:
    lengths = space.tile_iterations().tolist()
    tiles: dict[int, list[list[int]]] = defaultdict(list)
    assert plan.worker_indptr[0] == 0
    for segments in segments_of(plan):
        for segment in segments:
            assert segment[BEGIN] < segment[END], "no segment is empty"
            tiles[segment[TILE]].append(segment)
    assert set(tiles) == {t for t, n in enumerate(lengths) if n}, "every tile with work is there"
    slots, counters = set(), set()
    for tile, segments in tiles.items():
        segments.sort(key=lambda s: s[BEGIN])
        edges = [s[BEGIN] for s in segments] + [segments[-1][END]]
        assert edges == [0] + [s[END] for s in segments], "each iteration exactly once"
        assert edges[-1] == lengths[tile]
        assert {s[NUM_SLOTS] for s in segments} == {len(segments)}
        if len(segments) == 1:
            assert segments[0][SLOT] == segments[0][SLOT_BEGIN] == segments[0][COUNTER] == 0
            continue
        first = segments[0][SLOT_BEGIN]
        assert [s[SLOT] for s in segments] == list(range(first, first + len(segments))), "slots in tile order"
        assert {s[SLOT_BEGIN] for s in segments} == {first}
        assert len({s[COUNTER] for s in segments}) == 1
        assert not slots & {s[SLOT] for s in segments}, "a slot has one writer"
        assert segments[0][COUNTER] not in counters, "a counter has one tile"
        slots |= {s[SLOT] for s in segments}
        counters.add(segments[0][COUNTER])
    assert slots == set(range(len(slots)))
    assert len(slots) <= plan.max_slots
    assert len(counters) <= plan.max_counters
    count = int(plan.worker_indptr[-1])
    assert count <= plan.max_segments
    assert not plan.segments[count:].any(), "unused rows are zero"
    assert int(plan.status) == 0

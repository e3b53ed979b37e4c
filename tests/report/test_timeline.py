"""The picture: a panel a policy, every event a block, blocks where the events are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evenshare.report.timeline import draw_timelines, format_time, save_timelines
from evenshare.schedule import RaggedSpace, make_plan
from evenshare.schedule.policies import POLICIES
from evenshare.schedule.simulator import Costs, Timeline, simulate

pytest.importorskip("matplotlib")


def timelines(workers: int, policies: tuple[str, ...], lengths: tuple[int, ...] = (40, 2, 3, 1)) -> dict[str, Timeline]:
    space = RaggedSpace(torch.tensor(lengths, dtype=torch.int32), overhead=1)
    return {name: simulate(make_plan(space, name, workers), Costs(1.0, 0.5, 0.25)) for name in policies}


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_one_panel_a_policy(count: int) -> None:
    figure = draw_timelines(timelines(4, POLICIES[:count]), title="work")
    panels = [axis for axis in figure.axes if axis.get_visible()]
    assert len(panels) == count
    assert figure.get_suptitle() == "work"
    assert "makespan 41.0, utilisation 28%" in [text.get_text() for text in panels[0].texts]


@pytest.mark.parametrize("workers", [1, 4, 264])
def test_every_event_is_a_block_in_its_worker_s_row(workers: int) -> None:
    given = timelines(workers, ("stream_k",))
    axis = draw_timelines(given).axes[0]
    blocks = [path.get_extents() for collection in axis.collections for path in collection.get_paths()]
    events = [(worker, event) for worker, row in enumerate(given["stream_k"].workers) for event in row]
    assert len(blocks) == len(events)
    for block, (worker, event) in zip(blocks, events, strict=True):
        assert (block.x0, block.x1) == (event.begin, event.end)
        assert worker <= block.y0 < block.y1 <= worker + 1


def test_kinds_have_their_own_colours() -> None:
    axis = draw_timelines(timelines(2, ("stream_k",), (9, 1, 1))).axes[0]
    kinds = {event.kind for row in timelines(2, ("stream_k",), (9, 1, 1))["stream_k"].workers for event in row}
    assert kinds == {"whole", "partial", "merge"}
    colours = {tuple(colour) for collection in axis.collections for colour in collection.get_facecolors()}
    assert len(colours) >= 4  # a split tile, its merge, and two whole tiles


def test_short_panel_is_drawn_again_in_its_idle_room() -> None:
    figure = draw_timelines(timelines(32, ("data_parallel", "stream_k"), (300, 1)))
    first, second = figure.axes
    assert not first.child_axes
    assert [axis.get_xlim()[1] for axis in second.child_axes] == [simulated_makespan(second)]


def simulated_makespan(axis: object) -> float:
    return max(path.get_extents().x1 for path in axis.collections[0].get_paths())  # type: ignore[attr-defined]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"picture.{suffix}"
    save_timelines(draw_timelines(timelines(4, ("stream_k",))), path)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml", b"%PDF-")


def test_no_work_is_drawn() -> None:
    assert len(draw_timelines(timelines(4, ("stream_k",), (0,))).axes) == 1


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="timelines: got none"):
        draw_timelines({})
    figure = draw_timelines(timelines(4, ("stream_k",)))
    with pytest.raises(ValueError, match=r"out: got 'a.gif', want a name that ends in .png"):
        save_timelines(figure, tmp_path / "a.gif")
    with pytest.raises(ValueError, match="want a folder that exists"):
        save_timelines(figure, tmp_path / "none" / "a.png")


@pytest.mark.parametrize(("time", "text"), [(0.0, "0.0"), (37.375, "37.4"), (513.0, "513"), (1e6, "1,000,000")])
def test_format_time(time: float, text: str) -> None:
    assert format_time(time) == text

"""Timelines as a picture: workers downwards, time to the right, a colour per tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from evenshare.schedule.simulator import Event, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Hues that stay apart in print and for colour-blind eyes; neighbouring tiles get neighbouring entries.
HUES = ("#3b6fb6", "#e08a2e", "#3f9a6b", "#c8504b", "#8467b0", "#2f9eb0", "#c9a227", "#b55a93")
MERGE = "#20242b"
IDLE = "#eceef1"
TEXT = "#20242b"
FAINT = "#7a818c"
SUFFIXES = (".png", ".svg", ".pdf")
PANELS_A_ROW = 4
ZOOM_BELOW = 0.2  # a panel that ends before this part of the axis is drawn again, wider, in its idle room
ZOOM_BOX = (0.32, 0.08, 0.65, 0.83)  # where, in parts of the panel: left, bottom, width, height


def describe(timeline: Timeline) -> str:
    """A panel's numbers."""
    return f"makespan {format_time(timeline.makespan)}, utilisation {timeline.utilisation:.0%}"


def draw_timelines(
    timelines: Mapping[str, Timeline],
    *,
    title: str = "",
    axis: str = "simulated time (iterations)",
    columns: int | None = None,
    describe: Callable[[Timeline], str] = describe,
) -> Figure:
    """One panel a timeline, on one time axis.

    timelines: label -> timeline. Pale blocks are whole tiles, full ones parts of split tiles, dark ones
    merging; what is left grey is idle. axis: the label of the time axis. columns: panels side by side; None: as many as fit.
    describe: what to write under a panel's label. Raises ValueError without a timeline.
    """
    if not timelines:
        raise ValueError("timelines: got none, want at least one")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = columns or min(len(timelines), PANELS_A_ROW if len(timelines) != 6 else 3)
    rows = math.ceil(len(timelines) / columns)
    workers = max(len(timeline.workers) for timeline in timelines.values())
    height = min(max(0.22 * workers, 2.0), 5.2)  # inches of a panel's blocks
    size = (16.0 if columns > 2 else 6.0 + 4.0 * columns, 0.7 + (height + 1.1) * rows)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    span = max(timeline.makespan for timeline in timelines.values()) * 1.015 or 1.0
    for panel, (label, timeline) in zip(axes, timelines.items(), strict=False):
        _panel(panel, label, describe(timeline), timeline, span)
    for panel in axes[len(timelines) :]:
        panel.set_visible(False)
    for index, panel in enumerate(axes[: len(timelines)]):
        if index % columns == 0:
            panel.set_ylabel("worker", color=FAINT)
        if index + columns >= len(timelines):
            panel.set_xlabel(axis, color=FAINT)
    if title:
        figure.suptitle(title, fontsize=14, color=TEXT)
    _legend(figure)
    return figure


def format_time(time: float) -> str:
    """Three digits or more, without an exponent."""
    return f"{time:,.0f}" if time >= 100 else f"{time:.1f}"


def check_picture(path: Path) -> None:
    """Raise ValueError for a path that `save_timelines` cannot write."""
    check_file("out", path, SUFFIXES)


def check_file(name: str, path: Path, suffixes: tuple[str, ...]) -> None:
    """Raise ValueError for another suffix or a missing folder."""
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"{name}: got {path.name!r}, want a name that ends in {', '.join(suffixes)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{name}: got {str(path)!r}, want a folder that exists")


def save_timelines(figure: Figure, path: Path) -> None:
    """Write a PNG, SVG or PDF, by the suffix. Raises ValueError for another one or a missing folder."""
    check_picture(path)
    figure.savefig(path, dpi=100)


def _panel(axis: Axes, label: str, numbers: str, timeline: Timeline, span: float) -> None:
    axis.set_title(label, loc="left", fontsize=13, fontweight="bold", color=TEXT, pad=20)
    axis.text(0, 1.008, numbers, transform=axis.transAxes, fontsize=10.5, color=FAINT, va="bottom")
    _style(axis)
    axis.set_xlim(0, span)
    axis.set_ylim(len(timeline.workers), 0)
    if len(timeline.workers) <= 16:
        axis.set_yticks(
            [worker + 0.5 for worker in range(len(timeline.workers))], map(str, range(len(timeline.workers)))
        )
    _blocks(axis, timeline)
    axis.axvline(timeline.makespan, color=MERGE, linewidth=0.8, linestyle=(0, (4, 3)))
    if 0 < timeline.makespan < ZOOM_BELOW * span:
        _zoom(axis, timeline, span)


def _zoom(axis: Axes, timeline: Timeline, span: float) -> None:
    from matplotlib.patches import Polygon

    left, bottom, width, height = ZOOM_BOX
    end = timeline.makespan / span
    beam = [(end, 0), (end, 1), (left, bottom + height), (left, bottom)]
    axis.add_patch(Polygon(beam, transform=axis.transAxes, facecolor="white", alpha=0.55, linewidth=0))
    inset = axis.inset_axes(ZOOM_BOX)
    _style(inset)
    inset.set_xlim(0, timeline.makespan)
    inset.set_ylim(len(timeline.workers), 0)
    inset.set_yticks([])
    inset.tick_params(labelsize=8)
    inset.set_title(f"the same, {width * span / timeline.makespan:.0f}x wider", fontsize=9, color=FAINT, pad=4)
    _blocks(inset, timeline)


def _style(axis: Axes) -> None:
    axis.set_facecolor(IDLE)
    axis.tick_params(colors=FAINT, length=0, labelsize=9)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _blocks(axis: Axes, timeline: Timeline) -> None:
    from matplotlib.collections import PolyCollection

    room = 0.0 if len(timeline.workers) > 48 else 0.08  # a gap between few workers; many would turn grey
    corners, colours = [], []
    for worker, events in enumerate(timeline.workers):
        for event in events:
            low, high = worker + room, worker + 1 - room
            corners.append([(event.begin, low), (event.end, low), (event.end, high), (event.begin, high)])
            colours.append(_colour(event))
    blocks = PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.25)  # type: ignore[arg-type]
    axis.add_collection(blocks, autolim=False)


def _colour(event: Event) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    if event.kind == "merge":
        return to_rgb(MERGE)
    red, green, blue = to_rgb(HUES[event.tile % len(HUES)])
    if event.kind == "partial":
        return red, green, blue
    return tuple(0.42 + 0.58 * channel for channel in (red, green, blue))  # type: ignore[return-value]


def _legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    hue = HUES[0]
    patches = [
        Patch(facecolor=_colour(Event(0, 0.0, 0.0, "whole")), label="whole tile"),
        Patch(facecolor=hue, label="part of a split tile"),
        Patch(facecolor=MERGE, label="merging"),
        Patch(facecolor=IDLE, label="idle"),
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize=10, labelcolor=TEXT)

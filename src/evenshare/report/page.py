"""Timelines as one self-contained web page: panels to point at and step through, the tiles as a strip, a table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from string import Template
from typing import TypeVar

from evenshare.report.timeline import HUES, check_file, format_time
from evenshare.schedule.plan import BEGIN, END, NUM_SLOTS, TILE, Plan
from evenshare.schedule.simulator import Event, Timeline

# What a browser draws at once and a page of 2 MB holds. Beyond, neighbouring short blocks become one, rows are left out.
MAX_BLOCKS = 36_000  # of all panels
MAX_ROWS = 264  # of a panel
MAX_CUTS = 2_000  # of a panel's strip
WHOLE, PARTIAL, MERGE, MANY = range(4)  # kinds of block, as the script knows them
AXES = {"shared": "shared", "shortest": "as long as the shortest", "own": "each its own"}
KINDS = {"whole": WHOLE, "partial": PARTIAL, "merge": MERGE}

Number = TypeVar("Number", int, float)
Range = tuple[int, int, int, int]  # tile, [begin, end) of its iterations, the parts it is cut in
Block = list[
    int | float
]  # kind, tile, begin, end, start, stop, parts; MERGE: parts at begin; MANY: count, first and last tile


@dataclass(frozen=True)
class Panel:
    """A timeline, and which iterations its events are."""

    label: str
    timeline: Timeline
    ranges: tuple[tuple[Range, ...], ...]  # of each worker, in the order of its events, merges left out


@dataclass(frozen=True)
class Tiles:
    """The iteration space in words and numbers."""

    iterations: Sequence[int]  # of each tile
    outer: str = "tile"  # tile t is `outer` t // count and `inner` t % count
    inner: str = ""
    count: int = 1
    partial_bytes: int | None = None  # of a split tile's partial; None: unknown


def ranges_of(plan: Plan) -> tuple[tuple[Range, ...], ...]:
    """What a panel of a plan's timeline needs besides."""
    indptr = plan.worker_indptr.tolist()
    rows = plan.segments[: indptr[-1]].tolist()
    return tuple(
        tuple((row[TILE], row[BEGIN], row[END], row[NUM_SLOTS]) for row in rows[indptr[w] : indptr[w + 1]])
        for w in range(plan.num_workers)
    )


def draw_page(
    panels: Sequence[Panel], tiles: Tiles, *, title: str, unit: str, note: str = "", axis: str = "shared"
) -> str:
    """One HTML page without any reference to another file.

    panels: one a policy, or measured and predicted, all in the same unit of time. title: a heading in plain text, a second line
    becomes a smaller one. unit: what the times are in. note: a sentence below the table. axis: of the times at first, one of AXES.
    Raises ValueError without a panel, and for ranges that are not those of the events.
    """
    if not panels:
        raise ValueError("panels: got none, want at least one")
    heading, _, subtitle = title.partition("\n")
    data = {
        "unit": unit,
        "tiles": [[n, len(list(run))] for n, run in groupby(tiles.iterations)],
        "names": [tiles.outer, tiles.inner, tiles.count],
        "panels": [_panel_data(panel, MAX_BLOCKS // len(panels), tiles) for panel in panels],
    }
    content = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Template(_asset("page.html")).substitute(
        heading=escape(heading),
        subtitle=f"\n<p>{escape(subtitle)}</p>" if subtitle else "",
        table=_table(panels, tiles, unit),
        note=escape(note),
        size=f"{_count(len(tiles.iterations), 'tile')}, {_count(sum(tiles.iterations), 'iteration')}",
        strip=_plot('id="tiles" class="strip"', "strip of tiles", "the tiles, as wide as their iterations"),
        axes="\n".join(_choice(name, words, name == axis) for name, words in AXES.items()),
        figures="\n".join(_figure(index, panel, unit) for index, panel in enumerate(panels)),
        data=content,
        style=_hues() + _asset("page.css"),
        script=_asset("page.js"),
    )


def save_page(page: str, path: Path) -> None:
    """Write a page. Raises ValueError for a name that does not end in .html or a missing folder."""
    check_page(path)
    path.write_text(page, encoding="utf-8")


def check_page(path: Path) -> None:
    """Raise ValueError for a path that `save_page` cannot write."""
    check_file("html", path, (".html", ".htm"))


def _panel_data(panel: Panel, max_blocks: int, tiles: Tiles) -> dict[str, object]:
    workers = panel.timeline.workers
    shown = _rows_shown(panel.timeline)
    rows = _fit([_blocks(workers[w], panel.ranges[w]) for w in shown], max_blocks, panel.timeline.makespan)
    cuts, all_cuts = _cuts(panel, tiles.iterations)
    return {
        "makespan": _short(panel.timeline.makespan),
        "workers": shown,
        "rows": [[[_short(x) for x in block] for block in row] for row in rows],
        "cuts": cuts,
        "allCuts": all_cuts,
    }


def _rows_shown(timeline: Timeline) -> list[int]:
    """All workers, or some at equal distances and the one that finishes last."""
    count = len(timeline.workers)
    if count <= MAX_ROWS:
        return list(range(count))
    last = max(range(count), key=lambda w: timeline.workers[w][-1].end if timeline.workers[w] else 0.0)
    return sorted({last, *(i * count // (MAX_ROWS - 1) for i in range(MAX_ROWS - 1))})


def _blocks(events: Sequence[Event], ranges: Sequence[Range]) -> list[Block]:
    blocks: list[Block] = []
    place = -1
    for event in events:
        place += event.kind != "merge"
        if not 0 <= place < len(ranges) or ranges[place][0] != event.tile:
            raise ValueError(f"ranges: got {ranges[max(place, 0) :][:1]}, want one of tile {event.tile}")
        tile, begin, end, parts = ranges[place]
        block: Block = [KINDS[event.kind], tile, begin, end, event.begin, event.end]
        if event.kind == "merge":
            block[2:4] = parts, 0
        elif event.kind == "partial":
            block.append(parts)
        blocks.append(block)
    return blocks


def _fit(rows: list[list[Block]], max_blocks: int, makespan: float) -> list[list[Block]]:
    """The rows in at most about max_blocks blocks: what lies side by side and is shorter than a grain becomes one."""
    grain = makespan / 4096
    fitting = rows
    while sum(map(len, fitting)) > max(max_blocks, 2 * len(rows)) and grain <= 2 * makespan:
        fitting = [_coarse(row, grain) for row in rows]
        grain *= 2
    return fitting


def _coarse(row: list[Block], grain: float) -> list[Block]:
    coarse: list[Block] = []
    run: list[Block] = []

    def close() -> None:
        if len(run) == 1:
            coarse.append(run[0])
        elif run:
            coarse.append([MANY, len(run), run[0][1], run[-1][1], run[0][4], run[-1][5]])
        run.clear()

    for block in row:
        if run and block[5] - run[0][4] > grain:
            close()
        run.append(block)
    close()
    return coarse


def _cuts(panel: Panel, iterations: Sequence[int]) -> tuple[list[int], bool]:
    """Where tiles are cut, in iterations of the whole space, no two closer than can be seen; and whether these are all cuts."""
    begins = [0]
    for n in iterations:
        begins.append(begins[-1] + n)
    grain = begins[-1] / MAX_CUTS
    every = sorted(begins[tile] + begin for ranges in panel.ranges for tile, begin, _, _ in ranges if begin)
    if len(every) <= MAX_CUTS:
        return every, True
    cuts: list[int] = []
    for cut in every:
        if not cuts or cut - cuts[-1] > grain:
            cuts.append(cut)
    return cuts, False


def _table(panels: Sequence[Panel], tiles: Tiles, unit: str) -> str:
    least = min(panel.timeline.makespan for panel in panels)
    rows = []
    for panel in panels:
        t = panel.timeline
        best = ' class="best"' if math.isclose(t.makespan, least) else ""
        numbers = (t.num_segments, t.num_split_tiles, t.num_partials)
        cells = "".join(f"<td>{n:,}</td>" for n in numbers)
        rows.append(
            f'<tr{best}><th scope="row">{escape(panel.label)}</th><td>{format_time(t.makespan)}</td>'
            f'<td>{t.utilisation:.0%}</td><td class="wide">{_shares(t)}</td>{cells}<td>{_traffic(t, tiles)}</td></tr>'
        )
    headings = ("utilisation", "its time", "segments", "split tiles", "partials", "merge traffic")
    wide = ' class="wide"'
    head = "".join(
        f'<th scope="col"{wide * (name == "its time")}>{name}</th>' for name in (f"time ({escape(unit)})", *headings)
    )
    body = "\n".join(rows)
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="Numbers">
<table>
<thead><tr><th scope="col">dealt by</th>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>"""


def _shares(timeline: Timeline) -> str:
    """All workers' time as a bar: iterations, what they cost besides, merging; the rest is idle."""
    merging = timeline.share("merge")
    other = max(1 - timeline.idle - timeline.utilisation - merging, 0.0)
    parts = (("iterations", timeline.utilisation), ("besides", other), ("merging", merging))
    bars, x = [], 0.0
    for name, share in parts:
        bars.append(f'<rect class="{name}" x="{x:.4f}" width="{share:.4f}" height="1"/>')
        x += share
    words = (
        f"{timeline.utilisation:.1%} iterations, {other:.1%} their begin and end, {merging:.1%} merging, "
        f"{timeline.idle:.1%} idle"
    )
    return (
        f'<svg class="shares" viewBox="0 0 1 1" preserveAspectRatio="none" role="img" aria-label="{words}">'
        f"<title>{words}</title>{''.join(bars)}</svg>"
    )


def _traffic(timeline: Timeline, tiles: Tiles) -> str:
    """Each partial is written once and read once."""
    if timeline.num_partials == 0:
        return "none"
    if tiles.partial_bytes is None:
        return "unknown"
    size = 2.0 * timeline.num_partials * tiles.partial_bytes
    for name in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.3g} {name}"
        size /= 1000
    return f"{size:,.3g} GB"


def _figure(index: int, panel: Panel, unit: str) -> str:
    t = panel.timeline
    shown = len(_rows_shown(t))
    rows = "" if shown == len(t.workers) else f", {shown} of {len(t.workers)} workers drawn"
    numbers = f"{format_time(t.makespan)} {escape(unit)}, utilisation {t.utilisation:.0%}{rows}"
    label = escape(panel.label)
    return f"""<figure data-panel="{index}">
<figcaption><strong>{label}</strong> <span class="faint">{numbers}</span></figcaption>
{_plot('class="timeline"', "timeline", f"{label}: {numbers}. Arrow keys move over blocks and workers.")}
<div class="axis" aria-hidden="true"></div>
{_plot('class="strip"', "strip of tiles", f"{label}: where tiles are cut")}
</figure>"""


def _choice(axis: str, words: str, chosen: bool) -> str:
    return f'<label><input type="radio" name="axis" value="{axis}"{" checked" * chosen}> {words}</label>'


def _plot(attributes: str, role: str, label: str) -> str:
    return (
        f'<svg {attributes} preserveAspectRatio="none" tabindex="0" role="application" aria-roledescription="{role}" '
        f'aria-label="{label}"></svg>'
    )


def _hues() -> str:
    return ":root{" + "".join(f"--hue{i}:{hue};" for i, hue in enumerate(HUES)) + f"--hues:{len(HUES)}}}\n"


def _asset(name: str) -> str:
    return (files("evenshare.report") / "assets" / name).read_text(encoding="utf-8")


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"


def _short(x: Number) -> int | float:
    """Three digits behind the point, which JSON writes without zeros."""
    rounded = round(x, 3)
    return int(rounded) if rounded == int(rounded) else rounded

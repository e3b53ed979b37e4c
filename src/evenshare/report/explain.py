"""The command `evenshare explain`: how each policy would deal a piece of work, as a table and a picture."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from evenshare.report.arguments import (
    MAX_REQUESTS,
    check_at_least,
    describe_lengths,
    parse_integer,
    parse_lengths,
    stop,
    writing,
)
from evenshare.report.page import Panel, Range, Tiles, check_page, draw_page, ranges_of, save_page
from evenshare.report.timeline import check_picture, draw_timelines, format_time, save_timelines
from evenshare.schedule import Plan, RaggedSpace, make_plan
from evenshare.schedule.policies import POLICIES, Policy
from evenshare.schedule.simulator import Costs, Timeline, simulate

if TYPE_CHECKING:
    from evenshare.report.profile import Profile

# A timeline is Python objects: more would take minutes and gigabytes.
MAX_TILES = MAX_REQUESTS
MAX_ITERATIONS = 10_000_000
MAX_WORKERS = 10_000
MAX_PARTS = 400_000


@dataclass(frozen=True)
class Work:
    """A piece of work in the scheduler's terms."""

    space: RaggedSpace
    costs: Costs
    title: str
    unit: str  # of time
    tiles: Tiles
    unit_time: float = 1.0  # what an iteration takes, in the unit


def decode_work(lens: list[int], heads: int, block: int) -> Work:
    """One query token a request over `lens` keys; a tile is a request and a KV head, an iteration a block of keys.

    Costs are ratios of bytes at a head dimension of 128: a block of 128 keys is 64 KB of bf16 keys and values, a partial of 16
    rows 8 KB of fp32. A segment's prologue and epilogue cost one block of 128 keys.
    """
    check_at_least(1, "lens", min(lens))
    check_at_least(1, "heads", heads)
    check_at_least(1, "block", block)
    blocks = [-(-n // block) for n in lens]
    _small_enough("lens", len(lens) * heads, sum(blocks) * heads)
    relative = 128 / block
    space = RaggedSpace(torch.tensor(blocks, dtype=torch.int32), inner=heads, overhead=max(round(relative), 1))
    return Work(
        space,
        Costs(segment=relative, store=relative / 8, merge=relative / 8),
        f"Decode of {len(lens)} request{'s' * (len(lens) > 1)}: {describe_lengths(lens)} keys, {heads} KV head{'s' * (heads > 1)}",
        f"blocks of {block} keys",
        Tiles(space.tile_iterations().tolist(), "request", "KV head", heads, partial_bytes=16 * 128 * 4),
    )


def gemm_work(shape: list[int], tile: list[int]) -> Work:
    """m x n x k in tiles of tile[0] x tile[1]; an iteration is tile[2] of k.

    Storing and merging cost what Stream-K (section 5.1) measured for a tile of 128 x 128 x 32, scaled to this step of k.
    """
    check_at_least(1, "gemm", min(shape))
    check_at_least(1, "tile", min(tile))
    m, n, k = (-(-size // step) for size, step in zip(shape, tile, strict=True))
    _small_enough("gemm", m * n, m * n * k)
    space = RaggedSpace(torch.full((m * n,), k, dtype=torch.int32), overhead=1)
    return Work(
        space,
        Costs(segment=1.0, store=9 * 32 / tile[2], merge=8 * 32 / tile[2]),
        f"{' x '.join(map(str, shape))} GEMM in {m * n} tiles of {tile[0]} x {tile[1]}",
        f"steps of {tile[2]} of k",
        Tiles(space.tile_iterations().tolist(), "row", "column", n, partial_bytes=4 * tile[0] * tile[1]),
    )


def profiled_work(recorded: Profile) -> Work:
    """What a profile's plan dealt, with the costs of its kernel; an iteration takes what it takes if the prediction is right."""
    iterations = list(recorded.tile_iterations)
    if not iterations:
        raise ValueError("profile: got one without segments, want at least one")
    costs = recorded.costs
    space = RaggedSpace(
        torch.tensor(iterations, dtype=torch.int32), overhead=round(costs.segment), cut_cost=round(2 * costs.store)
    )
    unit_time = recorded.summary.predicted_iteration_ns / 1000
    tiles = Tiles(iterations, partial_bytes=recorded.partial_bytes)
    return Work(space, costs, recorded.title, "us", tiles, unit_time)


def compare(work: Work, workers: int, policies: tuple[str, ...] = POLICIES, num_splits: int = 4) -> dict[str, Timeline]:
    """Timeline of each policy; num_splits is fixed split's. Raises ValueError for an unknown policy, workers or num_splits < 1."""
    return {name: play(work, plan) for name, plan in deal(work, workers, policies, num_splits).items()}


def deal(work: Work, workers: int, policies: tuple[str, ...] = POLICIES, num_splits: int = 4) -> dict[str, Plan]:
    """The plan of each policy, as `compare` plays it."""
    return {name: make_plan(work.space, name, workers, num_splits=num_splits) for name in policies}


def play(work: Work, plan: Plan) -> Timeline:
    """A plan's timeline, in the work's unit of time."""
    timeline = simulate(plan, work.costs)
    return timeline if work.unit_time == 1.0 else timeline.scaled(work.unit_time)


def _label(name: str, num_splits: int) -> str:
    """What a reader needs to judge the policy: its name in words, and how it cuts."""
    words = {
        "stream_k": "even share",
        "fixed_split": f"fixed split in {num_splits}",
        "batch_invariant": f"batch invariant, {Policy(name).split_iterations}",
    }
    return words.get(name, name.replace("_", " "))


def explain_command(
    lens: Annotated[
        str | None,
        typer.Option(help="Keys of each request, by commas; 15x256 stands for 15 requests of 256", show_default=False),
    ] = None,
    heads: Annotated[int, typer.Option(help="KV heads")] = 8,
    block: Annotated[int, typer.Option(help="Keys of one iteration")] = 128,
    gemm: Annotated[str | None, typer.Option(help="m,n,k of a product, instead of --lens", show_default=False)] = None,
    tile: Annotated[str, typer.Option(help="Rows, columns and k-step of a tile of --gemm")] = "128,128,64",
    workers: Annotated[int, typer.Option(help="Programs that run at once; an H200 has 132 SMs")] = 132,
    policies: Annotated[str, typer.Option(help="Which, by commas")] = ",".join(POLICIES),
    num_splits: Annotated[int, typer.Option(help="Parts of every tile by fixed split")] = 4,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="A .json of `evenshare profile --save`: its work, beside what was measured", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Draw the timelines into this .png, .svg or .pdf", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Draw them into this .html, to look at every segment", show_default=False)
    ] = None,
) -> None:
    """Compare how the policies deal a piece of work, as a table and a timeline.

    The times are simulated, in iterations (a block of keys, a step of k); nothing runs. With --profile they are in microseconds, as
    if an iteration took what it took in the run.
    """
    try:
        if out is not None:
            check_picture(out)
        if html is not None:
            check_page(html)
        given = [name for name, value in (("lens", lens), ("gemm", gemm), ("profile", profile)) if value is not None]
        if len(given) != 1:
            raise ValueError(f"lens, gemm, profile: got {' and '.join(given) or 'none'}, want one of them")
        recorded = None
        if lens is not None:
            work = decode_work(parse_lengths("lens", lens), heads, block)
        elif gemm is not None:
            work = gemm_work(_triple("gemm", gemm), _triple("tile", tile))
        else:
            assert profile is not None
            recorded = _load(profile)
            work = profiled_work(recorded)
            workers = len(recorded.simulated.workers)
        if not 1 <= workers <= MAX_WORKERS:
            raise ValueError(f"workers: got {workers}, want 1 to {MAX_WORKERS}")
        most = MAX_PARTS // work.space.num_tiles
        if not 1 <= num_splits <= most:
            raise ValueError(f"num_splits: got {num_splits}, want 1 to {most} for {work.space.num_tiles} tiles")
        names = tuple(name.strip() for name in policies.split(","))
        panels = [] if recorded is None else _profile_panels(recorded)
        panels += _policy_panels(work, workers, names, num_splits)
        timelines = {panel.label: panel.timeline for panel in panels}
        _print_table(work, timelines, workers)
        if out is not None:
            with writing("out", out):
                save_timelines(draw_timelines(timelines, title=work.title, axis=f"simulated time ({work.unit})"), out)
        if html is not None:
            with writing("html", html):
                heading = work.title if recorded is not None else f"{work.title}, {workers} workers"
                axis = "shared" if recorded is None else "shortest"
                page = draw_page(panels, work.tiles, title=heading, unit=work.unit, note=_note(work), axis=axis)
                save_page(page, html)
    except ValueError as error:
        stop(str(error), 2)


def profile_page(recorded: Profile) -> str:
    """What was measured, the prediction for the same plan, and all policies with the same tiles, as a page."""
    work = profiled_work(recorded)
    panels = _profile_panels(recorded) + _policy_panels(work, len(recorded.simulated.workers), POLICIES, 4)
    return draw_page(panels, work.tiles, title=recorded.title, unit=work.unit, note=_note(work), axis="shortest")


def _policy_panels(work: Work, workers: int, policies: tuple[str, ...], num_splits: int) -> list[Panel]:
    return [
        Panel(_label(name, num_splits), play(work, plan), ranges_of(plan))
        for name, plan in deal(work, workers, policies, num_splits).items()
    ]


def _load(path: Path) -> Profile:
    from evenshare.report.profile import Profile

    try:
        return Profile.load(path)
    except OSError as error:
        raise ValueError(f"profile: cannot read {path}: {error.strerror or error}") from None


def _profile_panels(recorded: Profile) -> list[Panel]:
    """What was measured, and the prediction for the same plan."""
    count = Counter(segment.tile for segment in recorded.segments)
    ranges: list[list[Range]] = [[] for _ in recorded.simulated.workers]
    for s in recorded.segments:
        ranges[s.worker].append((s.tile, s.begin, s.end, count[s.tile]))
    frozen = tuple(map(tuple, ranges))
    return [
        Panel("measured", recorded.timeline().scaled(1e-3), frozen),
        Panel("predicted", recorded.predicted().scaled(1e-3), frozen),
    ]


def _note(work: Work) -> str:
    costs = work.costs
    if work.unit_time == 1.0:
        unit = f"Simulated. Time in {work.unit}"
    else:
        unit = f"All but the measured timeline is simulated. An iteration takes {work.unit_time:.3g} {work.unit}"
    return (
        f"{unit}; besides its iterations a segment costs {costs.segment:.3g}, storing a partial {costs.store:.3g}, "
        f"merging one {costs.merge:.3g}."
    )


def _print_table(work: Work, timelines: dict[str, Timeline], workers: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{work.title}, {workers} workers",
        caption=_note(work),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("policy")
    for heading in ("makespan", "utilisation", "segments", "split", "partials"):
        table.add_column(heading, justify="right")
    least = min(timeline.makespan for timeline in timelines.values())
    for label, timeline in timelines.items():
        table.add_row(
            label,
            format_time(timeline.makespan),
            f"{timeline.utilisation:.0%}",
            str(timeline.num_segments),
            str(timeline.num_split_tiles),
            str(timeline.num_partials),
            style="bold" if math.isclose(timeline.makespan, least) else None,
        )
    Console(highlight=False).print(table)


def _triple(name: str, text: str) -> list[int]:
    sizes = [parse_integer(name, part.strip(), text) for part in text.split(",")]
    if len(sizes) != 3:
        raise ValueError(f"{name}: got {text!r}, want three numbers by commas")
    return sizes


def _small_enough(name: str, tiles: int, iterations: int) -> None:
    if tiles > MAX_TILES or iterations > MAX_ITERATIONS:
        limits = f"{MAX_TILES} and {MAX_ITERATIONS}"
        raise ValueError(f"{name}: got {tiles} tiles and {iterations} iterations, want at most {limits}")

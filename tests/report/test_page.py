"""The page: well-formed, self-contained, small, its numbers the simulator's; walked over in Chromium where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from evenshare.report.explain import Work, compare, deal, decode_work, explain_command, gemm_work, play
from evenshare.report.page import (
    KINDS,
    MANY,
    MAX_BLOCKS,
    MAX_CUTS,
    MAX_ROWS,
    MERGE,
    Panel,
    Tiles,
    draw_page,
    ranges_of,
    save_page,
)
from evenshare.report.profile import make_profile
from evenshare.schedule import Costs, RaggedSpace, make_plan
from evenshare.schedule.policies import POLICIES
from evenshare.schedule.simulator import simulate

VOID = {"meta", "link", "input"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """Elements of a page, checked for balance while it is read."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(page)
        self.close()
        assert self.open == []
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.text.setdefault(self.open[-1], []).append(data)

    @property
    def data(self) -> Any:
        return json.loads(next(text for text in self.text["script"] if text.startswith("{")))


def page_of(work: Work, workers: int, policies: tuple[str, ...] = POLICIES) -> str:
    panels = [Panel(name, play(work, plan), ranges_of(plan)) for name, plan in deal(work, workers, policies).items()]
    return draw_page(panels, work.tiles, title=work.title, unit=work.unit, note="Simulated.")


WORKS = [decode_work([2000, 3, 700, 700], 2, 128), gemm_work([300, 500, 900], [128, 128, 64])]


@pytest.mark.parametrize("work", WORKS, ids=["decode", "gemm"])
def test_blocks_are_the_simulator_s_events(work: Work) -> None:
    data = Page(page_of(work, 6)).data
    assert len(data["panels"]) == len(POLICIES)
    for panel, (name, timeline) in zip(data["panels"], compare(work, 6).items(), strict=True):
        plan = make_plan(work.space, name, 6)
        assert panel["makespan"] == pytest.approx(timeline.makespan, abs=5e-4)
        assert panel["workers"] == list(range(6))
        drawn = []
        for row, events in zip(panel["rows"], timeline.workers, strict=True):
            assert [block[0] for block in row] == [KINDS[event.kind] for event in events]
            assert [block[4:6] for block in row] == [pytest.approx([e.begin, e.end], abs=5e-4) for e in events]
            drawn += [block[1:4] for block in row if block[0] != MERGE]
            assert all(block[2] > 1 for block in row if block[0] == MERGE)
        assert drawn == plan.segments[: int(plan.worker_indptr[-1]), :3].tolist()
    tiles = [n for n, count in data["tiles"] for _ in range(count)]
    assert tiles == work.space.tile_iterations().tolist()


def test_cuts_are_where_tiles_are_cut() -> None:
    work = decode_work([8 * 128, 2 * 128], 1, 128)
    cuts = [panel["cuts"] for panel in Page(page_of(work, 2, ("data_parallel", "stream_k"))).data["panels"]]
    assert cuts == [[], [5]]


def test_of_more_cuts_than_a_strip_holds_some_are_kept_and_none_counted() -> None:
    plan = make_plan(RaggedSpace(torch.full((20,), 400, dtype=torch.int32)), "fixed_split", 20, num_splits=200)
    panel = Panel("many", simulate(plan), ranges_of(plan))
    data = Page(draw_page([panel], Tiles([400] * 20), title="", unit="")).data["panels"][0]
    assert not data["allCuts"]
    assert len(data["cuts"]) <= MAX_CUTS
    assert data["cuts"] == sorted(set(data["cuts"]))


def test_table() -> None:
    work = decode_work([65536] + 15 * [256], 8, 128)
    page = page_of(work, 132, ("data_parallel", "fixed_split"))
    cells = Page(page).text["td"]
    assert cells[:6] == ["513", "6%", "128", "0", "0", "none"]
    assert cells[6:] == ["134", "24%", "272", "128", "272", "4.46 MB"]  # 272 partials of 8 KiB, written and read
    assert '<tr class="best"><th scope="row">fixed split' in page.replace("fixed_split", "fixed split")
    timeline = compare(work, 132, ("fixed_split",))["fixed_split"]
    parts = timeline.utilisation, timeline.share("merge"), timeline.idle
    shares = f"{parts[0]:.1%} iterations, {1 - sum(parts):.1%} their begin and end, {parts[1]:.1%} merging, {parts[2]:.1%} idle"
    assert f"<title>{shares}</title>" in page


def test_the_page_refers_to_nothing_and_takes_any_title() -> None:
    work = WORKS[0]
    plan = make_plan(work.space, "stream_k", 2)
    evil = "</script><b>&amp; \"'</b>"
    page = draw_page(
        [Panel(evil, simulate(plan, work.costs), ranges_of(plan))], work.tiles, title=f"{evil}\n{evil}", unit=evil
    )
    read = Page(page)
    assert read.text["h1"] == [evil]
    assert read.data["unit"] == evil
    assert "b" not in {tag for tag, _ in read.elements}
    links = [attributes.get(name) for _, attributes in read.elements for name in ("src", "href") if name in attributes]
    assert links == ["data:,"]
    assert set(re.findall(r"https?://[^\"\s]*", page)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in page


def test_every_plot_has_a_name_and_takes_the_focus() -> None:
    plots = [a for tag, a in Page(page_of(WORKS[0], 6)).elements if tag == "svg" and a.get("class") != "shares"]
    assert len(plots) == 1 + 2 * len(POLICIES)
    assert all(plot["tabindex"] == "0" and plot["aria-label"] for plot in plots)


def test_many_segments_are_drawn_coarsely() -> None:
    """Fewer blocks; every row begins and ends where it did, without a gap."""
    work = decode_work(4000 * [300] + 10 * [9000], 8, 128)
    page = page_of(work, 132, ("batch_invariant", "data_parallel"))
    assert len(page) < 2_000_000
    timeline = compare(work, 132, ("data_parallel",))["data_parallel"]
    panel = Page(page).data["panels"][1]
    assert sum(map(len, panel["rows"])) <= MAX_BLOCKS // 2
    for row, events in zip(panel["rows"], timeline.workers, strict=True):
        assert row[-1][5] == events[-1].end
        assert all(first[5] == second[4] for first, second in pairwise(row))
        assert sum(block[1] if block[0] == MANY else 1 for block in row) == len(events)


def test_the_largest_page_is_below_two_megabytes() -> None:
    lens = torch.randint(1, 9000, (12_000,), generator=torch.Generator().manual_seed(0)).tolist()
    work = decode_work(lens, 8, 1024)
    plan = make_plan(work.space, "data_parallel", 264)
    panels = [Panel(str(i), play(work, plan), ranges_of(plan)) for i in range(2)]
    assert 500_000 < len(draw_page(panels, work.tiles, title="", unit="")) < 2_000_000


def test_of_many_workers_the_last_to_finish_is_among_those_drawn() -> None:
    lengths = torch.ones(3001, dtype=torch.int32)
    lengths[2000] = 7
    plan = make_plan(RaggedSpace(lengths), "data_parallel", 3001)
    panel = Panel("many", simulate(plan), ranges_of(plan))
    page = draw_page([panel], Tiles(lengths.tolist()), title="", unit="")
    data = Page(page).data["panels"][0]
    assert len(data["workers"]) in (MAX_ROWS - 1, MAX_ROWS)
    assert 2000 in data["workers"]
    assert [row[0][1] for row in data["rows"]] == data["workers"]
    assert f"{len(data['workers'])} of 3001 workers drawn" in page


def test_no_work() -> None:
    plan = make_plan(RaggedSpace(torch.zeros(2, dtype=torch.int32)), "stream_k", 3)
    data = Page(draw_page([Panel("", simulate(plan), ranges_of(plan))], Tiles([0, 0]), title="", unit="")).data
    assert data["panels"] == [{"makespan": 0, "workers": [0, 1, 2], "rows": [[], [], []], "cuts": [], "allCuts": True}]


def test_errors(tmp_path: Path) -> None:
    plan = make_plan(RaggedSpace(torch.tensor([3, 4], dtype=torch.int32)), "data_parallel", 1)
    with pytest.raises(ValueError, match="panels: got none"):
        draw_page([], Tiles([1]), title="", unit="")
    with pytest.raises(ValueError, match=r"ranges: got \(\), want one of tile 0"):
        draw_page([Panel("", simulate(plan), ((),))], Tiles([3, 4]), title="", unit="")
    with pytest.raises(ValueError, match=r"html: got 'a.txt', want a name that ends in .html"):
        save_page("", tmp_path / "a.txt")


app = typer.Typer()
app.command()(explain_command)


def test_command(tmp_path: Path) -> None:
    out = tmp_path / "a.html"
    result = CliRunner().invoke(app, ["--gemm", "512,512,4096", "--workers", "12", "--html", str(out)])
    assert result.exit_code == 0
    read = Page(out.read_text(encoding="utf-8"))
    assert read.text["h1"] == ["512 x 512 x 4096 GEMM in 16 tiles of 128 x 128, 12 workers"]
    assert read.data["names"] == ["row", "column", 4]


def test_a_profile_beside_its_prediction_and_other_policies(tmp_path: Path) -> None:
    plan = make_plan(RaggedSpace(torch.tensor([8, 2], dtype=torch.int32)), "stream_k", 2)
    times = torch.zeros(plan.max_segments, 2, 5, dtype=torch.int64)
    times[0, 0] = torch.tensor([10_000, 10_320, 0, 15_008, 7])
    times[1, 0] = torch.tensor([10_064, 10_160, 14_048, 16_000, 3])
    times[2, 0] = torch.tensor([16_000, 16_064, 0, 18_016, 3])
    recorded = make_profile(plan, times, Costs(1.0, 0.5, 0.5), "two workers\nof a GPU", partial_bytes=1000)
    recorded.save(tmp_path / "p.json")
    out = tmp_path / "a.html"
    arguments = ["--profile", str(tmp_path / "p.json"), "--policies", "data_parallel,stream_k", "--html", str(out)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert "measured" in result.output
    page = Page(out.read_text(encoding="utf-8"))
    assert [a["value"] for tag, a in page.elements if tag == "input" and "checked" in a] == ["shortest"]
    assert page.text["p"][1].startswith("All but the measured timeline is simulated. An iteration takes 1.07 us")
    assert page.text["td"][5] == page.text["td"][11] == "4 KB"  # two partials of 1000 bytes, written and read
    data = page.data
    measured, predicted, whole, even = data["panels"]
    assert measured["rows"] == [
        [[1, 0, 0, 5, 0, 5.008, 2]],
        [[1, 0, 5, 8, 0.064, 4.048, 2], [2, 0, 2, 0, 4.048, 6], [0, 1, 0, 2, 6, 8.016]],
    ]
    assert predicted["makespan"] == measured["makespan"] == 8.016
    assert predicted["rows"] == even["rows"]  # the plan was stream_k's
    assert whole["makespan"] == pytest.approx(9 * 8.016 / 7.5, abs=5e-4)
    assert data["tiles"] == [[8, 1], [2, 1]]


# Appended to a page: does what a person does, and leaves what they would see in the DOM.
WALK = """
const seen = {};
const press = (svg, key) => svg.dispatchEvent(new KeyboardEvent("keydown", {key, cancelable: true}));
const tip = document.getElementById("tip");
const svg = document.querySelectorAll(".timeline")[1];
seen.hidden = tip.hidden;
svg.focus();
seen.first = tip.textContent;
press(svg, "ArrowRight");
seen.second = tip.textContent;
press(svg, "ArrowDown");
press(svg, "Home");
seen.below = tip.textContent;
seen.said = document.getElementById("said").textContent;
seen.marked = svg.querySelector(".here").getAttribute("d");
press(svg, "Escape");
seen.escaped = tip.hidden;
const around = svg.getBoundingClientRect();
const at = (x, y) => ({clientX: around.left + x * around.width, clientY: around.top + y * around.height});
svg.dispatchEvent(new PointerEvent("pointermove", at(0.01, 0.1)));
seen.pointed = tip.textContent;
const strip = document.getElementById("tiles");
strip.focus();
press(strip, "End");
seen.tile = tip.textContent;
seen.width = svg.viewBox.baseVal.width;
document.querySelector("input[value=own]").click();
seen.own = svg.viewBox.baseVal.width;
document.querySelector("input[value=shortest]").click();
const figures = [...document.querySelectorAll("figure")];
seen.shortest = figures.map((f) => f.querySelector(".timeline").viewBox.baseVal.width);
seen.beyond = figures.map((f) => f.classList.contains("beyond"));
seen.boxes = [...document.querySelectorAll(".timeline")].map(
  (s) => [...s.querySelectorAll(".whole, .partial, .merge")].map((p) => p.getAttribute("d")).join("").split("M").length - 1);
seen.fits = document.documentElement.scrollWidth <= innerWidth;
const channels = (colour) => colour.match(/[\\d.]+/g).map(Number).slice(0, 3);
const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const luminance = (colour) => channels(colour).map((c) => linear(c / 255))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const style = (selector) => getComputedStyle(document.querySelector(selector));
seen.back = luminance(style("body").backgroundColor);
seen.contrasts = [["body", "body"], ["p.faint", "body"], ["figcaption .faint", "figure"], ["td", "body"]].map(([front, back]) => {
  const [high, low] = [luminance(style(front).color), luminance(style(back).backgroundColor)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
});
document.title = JSON.stringify(seen);
"""


def walk(page: str, folder: Path, *options: str, width: int = 1280) -> Any:
    """What the walk saw of a page in Chromium; narrow pages lie in a frame, since no window is narrower than 500 pixels."""
    inner = page.replace("</body>", f"<script>{WALK}</script></body>")
    if width < 500:
        inner = inner.replace("document.title =", "parent.postMessage(seen, '*'); document.title =")
        frame = escape(inner, quote=True)
        inner = (
            "<title></title><script>addEventListener('message', (e) => { document.title = JSON.stringify(e.data); });</script>"
            f'<iframe srcdoc="{frame}" style="width:{width}px;height:900px"></iframe>'
        )
    path = folder / "a.html"
    path.write_text(inner)
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'user'}"]
    command += [
        f"--window-size={max(width, 500)},900",
        "--virtual-time-budget=2000",
        *options,
        "--dump-dom",
        path.as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    title = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert title is not None
    return json.loads(unescape(title[1]))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [1280, 500, 360])
def test_in_chromium(tmp_path: Path, width: int) -> None:
    work = decode_work([2 * 128, 4 * 128], 2, 128)
    seen = walk(page_of(work, 3, ("data_parallel", "stream_k")), tmp_path, width=width)
    timelines = compare(work, 3, ("data_parallel", "stream_k"))
    first, second = timelines["stream_k"].workers[0][:2]
    assert (first.tile, second.tile) == (0, 1)
    assert seen["hidden"]
    assert (
        seen["first"]
        == f"worker 0\ntile 0 (request 0, KV head 0)\nall 2 iterations\n3 blocks of 128 keys, from 0 to {first.end:g}"
    )
    assert seen["second"].startswith(
        "worker 0\ntile 1 (request 0, KV head 1)\niterations 0 to 0 of 2, one of 2 parts\n"
    )
    assert seen["below"].startswith("worker 1\n")
    assert seen["said"] == seen["below"]
    assert seen["marked"].startswith("M0 1H")
    assert seen["escaped"]
    assert seen["pointed"] == seen["first"]
    assert seen["tile"] == "tile 3 (request 1, KV head 1)\n4 iterations"
    assert seen["width"] == pytest.approx(1.01 * timelines["data_parallel"].makespan)
    assert seen["own"] == pytest.approx(1.01 * timelines["stream_k"].makespan, abs=1e-3)
    assert seen["boxes"] == [sum(map(len, timeline.workers)) for timeline in timelines.values()]
    assert seen["fits"]
    assert seen["shortest"] == [pytest.approx(1.01 * timelines["stream_k"].makespan, abs=1e-3)] * 2
    assert seen["beyond"] == [True, False]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("dark", [False, True])
def test_text_is_readable_in_light_and_dark(tmp_path: Path, dark: bool) -> None:
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    seen = walk(page_of(WORKS[0], 3, ("data_parallel", "stream_k")), tmp_path, scheme)
    assert (seen["back"] < 0.1) == dark
    assert min(seen["contrasts"]) >= 4.5  # WCAG 2, AA

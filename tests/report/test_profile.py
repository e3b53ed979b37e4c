"""`evenshare.profile`: from the kernels' times to segments, timelines, numbers, a picture; what the kernels write; its command."""

from __future__ import annotations

import json
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import typer
from typer.testing import CliRunner

import evenshare
from evenshare.attention import plan_attention
from evenshare.attention.problem import Problem
from evenshare.attention.tiles import TileConfig
from evenshare.device import clock
from evenshare.report import profile_command
from evenshare.report.profile import Profile, costs_of, make_profile, record
from evenshare.schedule import Costs, Plan, RaggedSpace, make_plan
from tests.attention.helpers import Place, int32, move, random_batch, to_pages

pytest.importorskip("matplotlib")

START, KEYS, MERGE, END, SM = (getattr(clock, name).value for name in ("START", "KEYS", "MERGE", "END", "SM"))


def two_workers() -> tuple[Plan, torch.Tensor]:
    """A plan of a tile of 8 iterations and one of 2 in even shares, and times of it: [first, second][consumer][column]."""
    plan = make_plan(RaggedSpace(torch.tensor([8, 2], dtype=torch.int32)), "stream_k", 2)
    assert plan.segments[:3, :3].tolist() == [[0, 0, 5], [0, 5, 8], [1, 0, 2]]
    times = torch.zeros(plan.max_segments, 2, 5, dtype=torch.int64)
    times[0, 0] = torch.tensor([10_000, 10_320, 0, 15_008, 7])
    times[1, 0] = torch.tensor([10_064, 10_160, 14_048, 16_000, 3])
    times[2, 0] = torch.tensor([16_000, 16_064, 0, 18_016, 3])
    return plan, times


@pytest.fixture
def recorded() -> Profile:
    return make_profile(*two_workers(), Costs(1.0, 0.5, 0.5), "two workers", partial_bytes=1000)


def test_segments(recorded: Profile) -> None:
    assert [tuple(segment) for segment in recorded.segments] == [
        (0, 7, 0, 0, 5, True, 0, 320, None, 5008),
        (1, 3, 0, 5, 8, True, 64, 160, 4048, 6000),
        (1, 3, 1, 0, 2, False, 6000, 6064, None, 8016),
    ]


def test_the_timelines_share_their_end_and_their_workers(recorded: Profile) -> None:
    measured, predicted = recorded.timeline(), recorded.predicted()
    assert [[tuple(event) for event in events] for events in measured.workers] == [
        [(0, 0, 5008, "partial")],
        [(0, 64, 4048, "partial"), (0, 4048, 6000, "merge"), (1, 6000, 8016, "whole")],
    ]
    assert measured.makespan == 8016
    assert predicted.makespan == pytest.approx(8016)
    assert measured.utilisation == pytest.approx(predicted.utilisation)
    # 1 + 5 + 0.5; 1 + 3 + 0.5, then 1 + 2; the first worker is last at the tile, and merges two partials.
    assert recorded.simulated.makespan == 7.5
    assert [[event.kind for event in events] for events in predicted.workers] == [
        ["partial", "merge"],
        ["partial", "whole"],
    ]


def test_summary(recorded: Profile) -> None:
    numbers = recorded.summary
    assert numbers.makespan_ns == 8016
    assert numbers.idle == pytest.approx((64 + 8016 - 5008) / (2 * 8016))
    assert numbers.merging == pytest.approx(1952 / (2 * 8016))
    assert numbers.first_keys == pytest.approx((320 + 96 + 64) / (2 * 8016))
    assert (numbers.longest_worker, numbers.longest_worker_ns) == (1, 8016 - 64)
    assert numbers.resolution_ns == 16
    assert numbers.predicted_idle == 0.0
    assert numbers.predicted_merging == pytest.approx(1 / 15)
    assert numbers.predicted_iteration_ns == pytest.approx(8016 / 7.5)


def test_a_worker_of_two_consumers_is_with_a_tile_from_the_first_s_start_to_the_last_s_end() -> None:
    plan, times = two_workers()
    times[:, 1] = times[:, 0] + torch.tensor([160, 160, 160, 160, 0])
    times[0, 1, MERGE] = times[2, 1, MERGE] = 0
    times[1, :, MERGE] = torch.tensor([0, 14_080])  # the other half was merged elsewhere
    segments = make_profile(plan, times, Costs(), "").segments
    assert [(s.start_ns, s.keys_ns, s.merge_ns, s.end_ns) for s in segments] == [
        (0, 320, None, 5168),
        (64, 160, 4080, 6160),
        (6160, 6160, None, 8176),
    ]


def test_without_key_times(recorded: Profile) -> None:
    plan, times = two_workers()
    times[..., KEYS] = 0
    without = make_profile(plan, times, Costs(), "")
    assert without.summary.first_keys is None
    assert without.timeline().makespan == recorded.timeline().makespan


def test_segments_without_a_time_are_named() -> None:
    plan, times = two_workers()
    times[2, 0, END] = 0
    with pytest.raises(RuntimeError, match="the kernel left segments without a time"):
        make_profile(plan, times, Costs(), "")


def test_no_work(tmp_path: Path) -> None:
    plan = make_plan(RaggedSpace(torch.zeros(2, dtype=torch.int32)), "stream_k", 2)
    empty = make_profile(plan, torch.zeros(plan.max_segments, 2, 5, dtype=torch.int64), Costs(), "")
    assert empty.segments == ()
    assert (empty.summary.makespan_ns, empty.summary.idle, empty.summary.first_keys) == (0, 0, None)
    empty.draw(tmp_path / "empty.png")


def test_costs_are_the_tile_s() -> None:
    problem = Problem(8, 1, 128, 128, torch.bfloat16)
    tile = TileConfig(8, 128, 4, 3, 1, "hopper_decode", overhead=2, cut_cost=9)
    assert costs_of(problem, tile) == Costs(2, 4.5, 8 * (128 + 1) * 4 / (128 * 2 * 128 * 2))


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_picture(recorded: Profile, tmp_path: Path, name: str) -> None:
    recorded.draw(tmp_path / name)
    assert (tmp_path / name).stat().st_size > 5000


def test_json(recorded: Profile, tmp_path: Path) -> None:
    recorded.save(tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["title"] == "two workers"
    assert content["summary"]["makespan_ns"] == 8016
    assert content["segments"][1]["merge_ns"] == 4048
    assert Profile.load(tmp_path / "a.json") == recorded
    del content["partial_bytes"]  # as older files have none
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert Profile.load(tmp_path / "a.json").partial_bytes is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("costs"), "no 'costs'"),
        (lambda content: content.update(partial_bytes=0), "partial_bytes: got 0"),
        (lambda content: content.update(num_workers=1), "want ascending ones below 1"),
        (lambda content: content["segments"].reverse(), "got workers out of order"),
        (lambda content: content["segments"][0].update(end_ns=None), "end_ns: got None, want a whole number"),
        (lambda content: content["segments"][0].pop("tile"), "no 'tile'"),
        (lambda content: content["costs"].update(merge=-1), "merge: got -1, want 0 or more"),
        (lambda content: content.update(segments=3), "not iterable"),
    ],
)
def test_other_json_is_named(recorded: Profile, tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "a.json"
    recorded.save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"profile: got .*a.json.*, want a file that Profile.save wrote") as raised:
        Profile.load(path)
    assert message in str(raised.value)


def test_a_plan_for_the_cpu_is_refused() -> None:
    plan = plan_attention(
        kv_indptr=int32([0, 3]),
        num_qo_heads=2,
        num_kv_heads=1,
        head_dim=8,
        dtype=torch.float32,
        device="cpu",
        backend="cpu",
    )
    q, k = torch.randn(1, 2, 8), torch.randn(3, 1, 8)
    with pytest.raises(ValueError, match="plan: got one for the cpu, want one for a CUDA GPU"):
        evenshare.profile(plan, q, k, k)
    with pytest.raises(ValueError, match="warmup: got -1, want 0 or more runs"):
        evenshare.profile(plan, q, k, k, warmup=-1)


def check_profile(recorded: Profile, plan: Any) -> None:
    """Every segment of the plan, in its worker's order, one after the other."""
    schedule = plan._executor.schedule
    indptr = schedule.worker_indptr.tolist()
    assert [s[2:5] for s in recorded.segments] == [tuple(row[:3]) for row in schedule.segments[: indptr[-1]].tolist()]
    mergers: dict[int, int] = {}
    for worker, (begin, end) in enumerate(pairwise(indptr)):
        segments = recorded.segments[begin:end]
        assert all(s.worker == worker and s.sm == segments[0].sm for s in segments)
        for s in segments:
            assert 0 <= s.start_ns < s.end_ns
            assert s.keys_ns is None or s.start_ns <= s.keys_ns < s.end_ns
            if s.merge_ns is not None:
                assert s.split
                assert s.start_ns < s.merge_ns < s.end_ns
                mergers[s.tile] = mergers.get(s.tile, 0) + 1
        assert all(first.end_ns <= second.start_ns for first, second in pairwise(segments))
    assert set(mergers) == {s.tile for s in recorded.segments if s.split}
    assert recorded.predicted().makespan == pytest.approx(recorded.summary.makespan_ns)


@pytest.fixture
def _ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock for the interpreter, which knows no inline assembly."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is chosen at import, and this machine has a GPU")
    ticks = count(1000, 32)

    def ticking(**_: Any) -> Any:
        return triton.language.to_tensor(next(ticks))

    monkeypatch.setattr(clock, "globaltimer", ticking)
    monkeypatch.setattr(clock, "smid", lambda **_: triton.language.to_tensor(0))


@pytest.mark.usefixtures("_ticking")
def test_what_the_portable_kernel_records() -> None:
    batch = random_batch((1, 3, 1), (150, 20, 0), heads=(2, 1))
    metadata = {"qo_indptr": int32(batch.qo_indptr), "kv_indptr": int32(batch.kv_indptr)}
    plan = plan_attention(
        **metadata, num_qo_heads=2, num_kv_heads=1, head_dim=32, dtype=torch.float32, backend="triton"
    )  # type: ignore[arg-type]
    tensors = batch.q, batch.k, batch.v
    want = plan.run(*tensors)
    out = torch.full_like(want, float("nan"))
    recorded = record(*plan.timed(), *tensors, out=out)
    assert torch.equal(out, want)
    check_profile(recorded, plan)
    assert any(s.merge_ns is not None for s in recorded.segments)
    assert plan._executor.forward.times is None  # type: ignore[union-attr]


@pytest.fixture
def gpu() -> Place:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return Place(torch.device("cuda"), "triton", ())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "qo_lens", "kv_lens"),
    [
        (torch.float32, (1,) * 4, (9000, 40, 3000, 0)),
        (torch.bfloat16, (1,) * 4, (60_000, 40, 3000, 0)),
        (torch.bfloat16, (1300, 70, 500), (9000, 300, 500)),
    ],
    ids=["forward", "decode", "prefill"],
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_kernels(
    gpu: Place, dtype: torch.dtype, qo_lens: tuple[int, ...], kv_lens: tuple[int, ...], page_size: int
) -> None:
    batch = move(random_batch(qo_lens, kv_lens, heads=(8, 2), dim=128), gpu, dtype)
    pages = to_pages(batch, page_size)
    plan = plan_attention(
        **pages.table(device=gpu.device), qo_indptr=int32(batch.qo_indptr, gpu.device), max_q_rows=sum(qo_lens),  # type: ignore[arg-type]
        num_qo_heads=8, num_kv_heads=2, head_dim=128, page_size=page_size, dtype=dtype, policy="stream_k",
    )  # fmt: skip
    want = plan.run(batch.q, pages.k, pages.v)
    out = torch.full_like(want, float("nan"))
    recorded = evenshare.profile(plan, batch.q, pages.k, pages.v, out=out)
    assert torch.equal(out, want)
    check_profile(recorded, plan)
    assert any(s.merge_ns is not None for s in recorded.segments)
    num_sms = torch.cuda.get_device_properties(gpu.device).multi_processor_count
    assert {s.sm for s in recorded.segments} <= set(range(num_sms))
    assert 1000 < recorded.summary.makespan_ns < 1e7
    assert torch.equal(plan.run(batch.q, pages.k, pages.v), want)
    plan.check()


@pytest.mark.gpu
def test_addresses_that_hopper_cannot_copy(gpu: Place) -> None:
    """The portable kernel takes over, and records as well."""
    batch = move(random_batch((1, 1), (9000, 300), heads=(8, 2), dim=128), gpu, torch.bfloat16)
    q = torch.empty(batch.q.numel() + 1, dtype=batch.q.dtype, device=gpu.device)[1:].view_as(batch.q).copy_(batch.q)
    plan = plan_attention(kv_indptr=int32(batch.kv_indptr, gpu.device), num_qo_heads=8, num_kv_heads=2, head_dim=128)
    check_profile(evenshare.profile(plan, q, batch.k, batch.v), plan)


app = typer.Typer()
app.command()(profile_command.profile_command)


def run_command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})
    return result.exit_code, result.output


def test_command(recorded: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run_batch(*arguments: Any) -> Profile:
        asked.append(arguments)
        return recorded

    monkeypatch.setattr(profile_command, "run_batch", run_batch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    out, html, save = (tmp_path / f"a.{suffix}" for suffix in ("png", "html", "json"))
    files = ["--out", str(out), "--html", str(html), "--save", str(save)]
    code, output = run_command("--lens", "64,2x8", "--heads", "8,2", *files)
    assert code == 0
    assert asked == [([64, 8, 8], [1, 1, 1], (8, 2), 128, 16, torch.bfloat16, None)]
    assert "two workers" in output
    assert "Worker 1 has the most work: 8.0 us." in output
    assert out.exists()
    assert save.exists()
    assert "<strong>measured</strong>" in html.read_text()
    assert "<strong>batch invariant, 16</strong>" in html.read_text()


def test_command_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, output = run_command("--lens", "64")
    assert code == 1
    assert output.startswith("error: no CUDA GPU here")


@pytest.mark.gpu
@pytest.mark.parametrize("options", [[], ["--qo-lens", "40,3x1", "--page-size", "0"], ["--dtype", "float32"]])
def test_command_on_a_gpu(gpu: Place, tmp_path: Path, options: list[str]) -> None:
    out = tmp_path / "a.png"
    code, output = run_command("--lens", "6000,2x300,0", "--out", str(out), *options)
    assert code == 0
    assert "measured" in output
    assert out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lens", "3,,4"], "lens: got '3,,4', want whole numbers"),
        (["--lens", "3,4", "--qo-lens", "1,2,3"], "qo_lens: got 3 requests, want one number or the 2 of lens"),
        (["--lens", "3", "--heads", "8"], "heads: got '8', want query heads and KV heads by a comma"),
        (["--lens", "3", "--page-size", "-1"], "page_size: got -1, want 0 or more"),
        (["--lens", "3", "--dtype", "int4"], "dtype: got 'int4', want one of bfloat16"),
        (["--lens", "3", "--html", "a.gif"], "html: got 'a.gif', want a name that ends in .html"),
        (["--lens", "3", "--out", "a.gif"], "out: got 'a.gif', want a name that ends in .png"),
    ],
)
def test_wrong_input_is_named(arguments: list[str], message: str) -> None:
    code, output = run_command(*arguments)
    assert code == 2
    assert output.startswith("error: ")
    assert message in output

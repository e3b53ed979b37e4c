"""Hopper's kernels: every loader, mask, head dim and policy against the oracle, then graphs, streams and metadata gone wrong.

On a Hopper GPU, and on the CPU in `tests.emulator`, which also looks for what a run on the GPU does not show: reads before a
barrier, writes into buffers that are in use, roles that wait for ever. That takes half an hour; `test_emulated.py` is a minute's
choice of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from evenshare.attention import AttentionPlan, attention
from evenshare.schedule.plan import Status
from evenshare.schedule.policies import DEVICE_POLICIES, POLICIES
from tests.attention.cases import DECODE, PREFILL, Case, Outputs, check, embed, make_batch, make_plan, poison
from tests.attention.emulated import emulate_hopper
from tests.attention.helpers import Batch, Place, assert_matches, int32, move, to_pages

PAGED = replace(PREFILL, form="block_table")
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def hopper_gpu() -> Place:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    return Place(torch.device("cuda"), "triton", (FP16, BF16))


@pytest.fixture(
    params=[pytest.param("emulator", marks=pytest.mark.thorough), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param == "gpu":
        return request.getfixturevalue("hopper_gpu")
    if torch.cuda.is_available():
        pytest.skip("the portable kernels beside it want Triton's interpreter, and this machine has a GPU")
    return emulate_hopper(monkeypatch, request.node.name)


@pytest.fixture(params=[PREFILL, DECODE], ids=["prefill", "decode"])
def ragged(request: pytest.FixtureRequest) -> Case:
    """A batch for each kernel."""
    return request.param


@pytest.fixture
def paged(ragged: Case) -> Case:
    return replace(ragged, form="block_table")


def check_hopper(place: Place, case: Case, **changes: Any) -> None:
    plan = check(replace(case, **changes), place)
    assert plan is not None
    assert plan._executor.tile.kernel.startswith("hopper")


DIMS = [(64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128)]


@pytest.mark.parametrize("dims", DIMS, ids=lambda dims: "x".join(map(str, dims)))
def test_head_dims(hopper: Place, ragged: Case, paged: Case, dims: tuple[int, int]) -> None:
    """Keys by TMA, ragged and in pages; and gathered."""
    case = {"dim": dims[0], "dim_v": dims[1]}
    check_hopper(hopper, ragged, **case)
    check_hopper(hopper, paged, dtype=FP16, **case)
    check_hopper(hopper, paged, page_size=3, **case)


@pytest.mark.parametrize("heads", [(4, 4), (7, 1), (16, 2), (12, 1), (71, 1)])
def test_groups(hopper: Place, ragged: Case, heads: tuple[int, int]) -> None:
    """Row tiles that begin and end inside a token."""
    check_hopper(hopper, ragged, heads=heads)
    check_hopper(hopper, ragged, heads=heads, planner="device")


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("page_size", [1, 3, 16, 24, 64, 256])
def test_page_sizes(hopper: Place, paged: Case, page_size: int, dim: int) -> None:
    """A page is less than a block of keys, a block, more, or no power of two; in either layout and form of the table."""
    for form, kv_layout in (("indptr", "NHD"), ("indptr", "HND"), ("block_table", "HND"), ("block_table", "NHD")):
        check_hopper(hopper, paged, form=form, kv_layout=kv_layout, page_size=page_size, dim=dim)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cap", [None, 20.0])
def test_masks(hopper: Place, ragged: Case, causal: bool, cap: float | None) -> None:
    for window_left in (-1, 0, 1, 63, 64, 127, 128, 129, 299, 2**30):
        check_hopper(hopper, ragged, dim=128, causal=causal, window_left=window_left, logits_soft_cap=cap)


@pytest.mark.parametrize("page_size", [3, 64])
def test_windows_over_pages(hopper: Place, page_size: int) -> None:
    """The first block that a window leaves begins inside a page, and pages before it may be gone: nobody reads them."""
    for window_left in (0, 100, 2**30):
        check_hopper(hopper, PAGED, page_size=page_size, window_left=window_left)
    case = replace(PAGED, page_size=page_size, qo_lens=(100,), kv_lens=(900,), window_left=150)
    batch = make_batch(case, hopper)
    pages = to_pages(move(batch, hopper, case.dtype), page_size)
    unread = (900 - 100 - 150) // 128 * 128 // page_size  # pages before the first block that any row sees
    pages.block_table[0, :unread] = 2**31 - 1
    plan = make_plan(case, hopper, {"qo_indptr": int32([0, 100])} | pages.table("block_table"))
    outputs = Outputs(case, batch)
    plan.run(embed(batch.q.to(case.dtype), "packed", 3), pages.k, pages.v, **outputs.arguments())
    outputs.check(batch, case.base, **case.mask)
    plan.check()


@pytest.mark.parametrize("base", [2.0, 10.0, None])
def test_lse(hopper: Place, ragged: Case, paged: Case, base: float | None) -> None:
    for case in (ragged, paged):
        check_hopper(hopper, case, base=base)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lens", [(200, 333), (333, 200), (150, 0)])
def test_dense(hopper: Place, lens: tuple[int, int], causal: bool) -> None:
    check(Case((lens[0],) * 3, (lens[1],) * 3, form="dense", causal=causal), hopper)


def test_dense_heads_first(hopper: Place) -> None:
    """[B, H, S, D] tensors seen as [B, S, H, D]."""
    case = Case((200,) * 2, (333,) * 2)
    batch = make_batch(case, hopper)
    q, k, v = (
        x.to(case.dtype).unflatten(0, (2, -1)).transpose(1, 2).contiguous().transpose(1, 2)
        for x in (batch.q, batch.k, batch.v)
    )
    outputs = Outputs(case, batch, padding=0)
    attention(q, k, v, causal=True, backend=hopper.backend, **outputs.arguments(2))
    outputs.check(batch, case.base, **case.mask)


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("layout", ["strided", "odd", "shifted"])
def test_strides(hopper: Place, ragged: Case, paged: Case, layout: str, dim: int) -> None:
    """Rows of whole 16-byte pieces run on the Hopper kernel; the others on the portable one, over the same tiles."""
    dtype = BF16 if layout == "strided" else FP16  # the interpreter, beside the emulator, has no bf16
    check_hopper(hopper, ragged, dim=dim, layout=layout, dtype=dtype)
    check_hopper(hopper, paged, dim=dim, layout=layout, dtype=dtype, kv_layout="HND")
    check_hopper(hopper, paged, dim=dim, layout=layout, dtype=dtype, page_size=3)


@pytest.mark.parametrize("margin", [0, 1, 8])
def test_slices_of_a_fused_projection(hopper: Place, margin: int) -> None:
    """q, k, v as slices of [tokens, q | k | v], whose rows are a multiple of 16 bytes or not."""
    case = replace(PREFILL, kv_lens=PREFILL.qo_lens, dtype=FP16)
    batch = make_batch(case, hopper)
    fused = torch.cat([x.flatten(1) for x in (batch.q, batch.k, batch.v)], 1).to(case.dtype)
    fused = embed(fused.unsqueeze(1), "packed", 3).squeeze(1)
    fused = torch.nn.functional.pad(fused, (0, margin), value=math.nan)
    q, k, v = (x.unflatten(1, (-1, 64)) for x in fused[:, : 12 * 64].split([8 * 64, 2 * 64, 2 * 64], 1))
    indptr = int32(batch.qo_indptr)
    plan = make_plan(case, hopper, {"qo_indptr": indptr, "kv_indptr": indptr})
    outputs = Outputs(case, batch)
    plan.run(q, k, v, **outputs.arguments())
    outputs.check(batch, case.base, **case.mask)


def test_heads_that_are_one(hopper: Place) -> None:
    """Keys expanded over KV heads: a stride of 0, which TMA does not take."""
    case = replace(PREFILL, heads=(8, 2), dtype=FP16)
    batch = make_batch(case, hopper)
    batch = replace(batch, k=batch.k[:, :1].expand(-1, 2, -1))
    q, k, v = (x.to(case.dtype) for x in (batch.q, batch.k[:, :1], batch.v))
    metadata = {"qo_indptr": int32(batch.qo_indptr), "kv_indptr": int32(batch.kv_indptr)}
    outputs = Outputs(case, batch, padding=0)
    make_plan(case, hopper, metadata).run(q, k.expand(-1, 2, -1), v, **outputs.arguments())
    outputs.check(batch, case.base, **case.mask)


@pytest.mark.parametrize(
    ("planner", "policy"), [*(("host", name) for name in POLICIES), *(("device", name) for name in DEVICE_POLICIES)]
)
def test_policies(hopper: Place, paged: Case, planner: str, policy: str) -> None:
    """Whole tiles and split ones, with keys by TMA and gathered, with q in one buffer and in two."""
    for dim in (64, 256):
        check_hopper(hopper, paged, policy=policy, planner=planner, dim=dim)
        check_hopper(hopper, paged, policy=policy, planner=planner, dim=dim, page_size=3)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["level_fill", "data_parallel", "stream_k"])
@pytest.mark.parametrize("dim", [64, 256])
def test_many_tiles_for_each_worker(hopper_gpu: Place, dim: int, policy: str) -> None:
    """Some 600 tiles: q of the next tile is fetched while this one runs, and the producer runs ahead over tiles."""
    case = Case((500, 3, 900, 0, 1000), (700, 3, 0, 8, 1000), (32, 8), dim, policy=policy)
    check_hopper(hopper_gpu, case)
    check_hopper(hopper_gpu, case, causal=False, form="block_table")
    check_hopper(hopper_gpu, case, form="block_table", page_size=3)


def test_planners_agree(hopper: Place) -> None:
    """Bit for bit."""
    batch = make_batch(PAGED, hopper)
    typed = move(batch, hopper, PAGED.dtype)
    pages = to_pages(typed, 16)
    results = []
    for planner, where in (("host", "cpu"), ("device", hopper.device)):
        case = replace(PAGED, planner=planner)
        metadata = {"qo_indptr": int32(batch.qo_indptr, where)} | pages.table("block_table", where)
        plan = make_plan(case, hopper, metadata, max_q_rows=sum(case.qo_lens))
        results.append(plan.run(typed.q, pages.k, pages.v))
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("qo_lens", [(130, 1, 40), (1, 2, 4)])  # prefill, decode
def test_bits_do_not_change_between_runs(hopper_gpu: Place, qo_lens: tuple[int, ...]) -> None:
    """With every tile split, whoever arrives last."""
    case = Case(qo_lens, (3000, 5000, 2100), dim=128, policy="stream_k")
    batch = make_batch(case, hopper_gpu)
    typed = move(batch, hopper_gpu, case.dtype)
    plan = make_plan(case, hopper_gpu, {"qo_indptr": int32(batch.qo_indptr), "kv_indptr": int32(batch.kv_indptr)})
    first = plan.run(typed.q, typed.k, typed.v)
    for _ in range(200):
        assert torch.equal(plan.run(typed.q, typed.k, typed.v), first)


@pytest.mark.parametrize("qo_lens", [(), (0, 0), (0, 100)])
def test_nothing_to_do(hopper: Place, qo_lens: tuple[int, ...]) -> None:
    for case in (PREFILL, PAGED):
        for planner in ("host", "device"):
            check(replace(case, qo_lens=qo_lens, kv_lens=(0,) * len(qo_lens), planner=planner), hopper)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 24])
def test_offsets_past_32_bits(hopper_gpu: Place, page_size: int) -> None:
    """Pages 1,077,120 elements apart and page id 1994: a view of a larger buffer, whose other elements are NaN."""
    stride, last = 1_077_120, 1994
    case = replace(PAGED, qo_lens=(100, 40), kv_lens=(130, 300), page_size=page_size)
    batch = make_batch(case, hopper_gpu)
    typed = move(batch, hopper_gpu, case.dtype)
    pages = to_pages(typed, page_size, extra_pages=0, extra_columns=0)  # every page is in use, so also number 1994
    storage = torch.full((stride * last + page_size * 256,), math.nan, dtype=case.dtype, device=hopper_gpu.device)
    shape, strides = (last + 1, page_size, 2, 64), (stride, 256, 128, 1)
    for offset, cache in ((0, pages.k), (64, pages.v)):
        far = storage.as_strided(shape, strides, offset)
        far[last - torch.arange(cache.shape[0], device=hopper_gpu.device)] = cache
    k, v = (storage.as_strided(shape, strides, offset) for offset in (0, 64))
    metadata = {"block_table": last - pages.block_table, "kv_lens": pages.kv_lens, "qo_indptr": int32(batch.qo_indptr)}
    outputs = Outputs(case, batch, padding=0)
    make_plan(case, hopper_gpu, metadata).run(typed.q, k, v, **outputs.arguments())
    outputs.check(batch, case.base)


def capture(step: Callable[[], Any]) -> Callable[[], Any]:
    """Captured after a run on another stream, as torch wants it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


STEPS = [  # query tokens and keys of four requests: padded batches among them
    ((150, 150, 150, 150), (150, 150, 150, 150)),
    ((600, 0, 0, 0), (900, 0, 0, 0)),
    ((1, 1, 0, 0), (5, 800, 0, 0)),
    ((0, 0, 0, 0), (0, 0, 0, 0)),
    ((300, 200, 60, 40), (300, 100, 0, 700)),
    ((7, 0, 300, 1), (0, 9, 301, 2)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [0, 16, 24])  # ragged; pages by TMA; pages gathered
def test_a_graph_replays_other_lengths_and_pages(hopper_gpu: Place, page_size: int) -> None:
    case = replace(PAGED if page_size else PREFILL, planner="device", page_size=page_size)
    if page_size:
        width = 912 // page_size
        shapes: dict[str, tuple[int, ...]] = {"block_table": (4, width), "kv_lens": (4,)}
        rows: tuple[int, ...] = (4 * width, page_size)
    else:
        shapes, rows = {"kv_indptr": (5,)}, (1200,)
    metadata = {
        name: torch.zeros(shape, dtype=torch.int32, device=hopper_gpu.device)
        for name, shape in (shapes | {"qo_indptr": (5,)}).items()
    }
    q = torch.zeros(600, 8, 64, dtype=case.dtype, device=hopper_gpu.device)
    k, v = torch.zeros(2, *rows, 2, 64, dtype=case.dtype, device=hopper_gpu.device)
    out, lse = torch.zeros_like(q), torch.zeros(600, 8, device=hopper_gpu.device)
    plan = make_plan(case, hopper_gpu, metadata, max_q_rows=600)
    replay = capture(lambda: (plan.update(), plan.run(q, k, v, out=out, lse=lse)))
    for qo_lens, kv_lens in [*STEPS, *STEPS[::-1]]:
        batch = make_batch(replace(case, qo_lens=qo_lens, kv_lens=kv_lens), hopper_gpu)
        keys, values = batch.k, batch.v
        now = {"qo_indptr": int32(batch.qo_indptr)}
        if page_size:
            used = max(-(-n // page_size) for n in kv_lens)
            pages = to_pages(batch, page_size, extra_columns=width - used)
            keys, values = pages.k, pages.v
            now |= pages.table("block_table")
        else:
            now["kv_indptr"] = int32(batch.kv_indptr)
        for tensor in (q, k, v, out, lse):
            tensor.fill_(math.nan)
        poison(plan)
        for tensor, rows_now in ((q, batch.q), (k, keys), (v, values)):
            tensor[: rows_now.shape[0]] = rows_now
        for name, value in now.items():
            metadata[name].copy_(value)
        replay()
        end = batch.q.shape[0]
        assert_matches(out[:end], lse[:end], batch)
        assert torch.isnan(out[end:]).all()
        assert torch.isnan(lse[end:]).all()
    plan.check()


def alone(batch: Batch, r: int) -> tuple[slice, Batch]:
    """The rows of request r, and a batch that has it only."""
    rows = slice(batch.qo_indptr[r], batch.qo_indptr[r + 1])
    keys = slice(batch.kv_indptr[r], batch.kv_indptr[r + 1])
    return rows, Batch((batch.qo_lens[r],), (batch.kv_lens[r],), batch.q[rows], batch.k[keys], batch.v[keys])


def check_request(outputs: Outputs, batch: Batch, r: int) -> None:
    rows, request = alone(batch, r)
    assert_matches(outputs.out[rows], outputs.lse[rows], request)


def device_plan(case: Case, place: Place, batch: Batch, **options: Any) -> tuple[AttentionPlan, dict[str, Any], Any]:
    """A plan from metadata on the device, that metadata, and the batch's pages."""
    pages = to_pages(move(batch, place, case.dtype), case.page_size)
    metadata = {"qo_indptr": int32(batch.qo_indptr, place.device)} | pages.table("block_table", place.device)
    return make_plan(case, place, metadata, max_q_rows=sum(case.qo_lens), **options), metadata, pages


@pytest.mark.gpu  # on a CPU such metadata is the host's, and an error
@pytest.mark.parametrize("page_size", [16, 24])
def test_more_query_rows_than_the_plan_holds(hopper_gpu: Place, page_size: int) -> None:
    case = replace(PAGED, qo_lens=(100, 200), kv_lens=(300, 90), page_size=page_size, planner="device")
    batch = make_batch(case, hopper_gpu)
    plan, metadata, pages = device_plan(case, hopper_gpu, batch)
    q = batch.q.to(case.dtype)
    metadata["qo_indptr"].copy_(int32([0, 100, 100_000]))
    plan.update()
    outputs = Outputs(case, batch, padding=0)
    plan.run(q, pages.k, pages.v, **outputs.arguments())
    assert int(plan.status) == Status.TILES_OVERFLOW
    check_request(outputs, batch, 0)
    assert torch.isnan(outputs.wide[[0, -1]]).all()
    assert torch.isnan(outputs.wide_lse[:, [0, -1]]).all()
    metadata["qo_indptr"].copy_(int32(batch.qo_indptr))
    plan.update()
    plan.run(q, pages.k, pages.v, **outputs.arguments())
    outputs.check(batch, case.base)
    plan.check()


def test_more_segments_than_the_plan_holds(hopper: Place) -> None:
    """Nothing is computed, nothing is written."""
    case = replace(PAGED, qo_lens=(200, 200), kv_lens=(9000, 9000), planner="device", policy="batch_invariant")
    batch = make_batch(case, hopper)
    plan, _, pages = device_plan(case, hopper, batch, max_kv_len=64)
    outputs = Outputs(case, batch, padding=0)
    plan.run(batch.q.to(case.dtype), pages.k, pages.v, **outputs.arguments())
    assert int(plan.status) == Status.SEGMENTS_OVERFLOW
    assert torch.isnan(outputs.wide).all()
    assert torch.isnan(outputs.wide_lse).all()


@pytest.mark.parametrize("policy", ["data_parallel", "stream_k"])
@pytest.mark.parametrize("page_size", [16, 24])
def test_pages_outside_the_cache(hopper: Place, page_size: int, policy: str) -> None:
    """Their rows are zero and the status tells; nothing is read there, and the other requests are right."""
    case = replace(PAGED, qo_lens=(100, 60, 200), kv_lens=(250, 90, 300), planner="device")
    case = replace(case, page_size=page_size, policy=policy)
    batch = make_batch(case, hopper)
    plan, metadata, pages = device_plan(case, hopper, batch)
    q = batch.q.to(case.dtype)
    last = (300 - 1) // page_size  # page of the last keys
    needs = 360 - (300 - last * page_size)  # the first row that sees it
    table = metadata["block_table"]
    num_pages, good = pages.k.shape[0], table.clone()
    for first_id, last_id in ((num_pages, -1), (2**31 - 1, num_pages), (-(2**31), 2**31 - 1)):
        table[0, 0], table[2, last] = first_id, last_id
        outputs = Outputs(case, batch, padding=0)
        poison(plan)
        plan.update()
        plan.run(q, pages.k, pages.v, **outputs.arguments())
        assert int(plan.status) == Status.BAD_INDEX
        out, lse = outputs.out, outputs.lse
        assert not torch.isnan(out).any()
        for rows in (slice(0, 100), slice(needs, 360)):
            assert (out[rows] == 0).all()
            assert torch.isneginf(lse[rows]).all()
        check_request(outputs, batch, 1)
        assert torch.isfinite(lse[160:192]).all(), "rows of a tile that ends before it"
        with pytest.raises(RuntimeError, match="outside the cache"):
            plan.check()
        table.copy_(good)
    plan.update()
    outputs = Outputs(case, batch, padding=0)
    plan.run(q, pages.k, pages.v, **outputs.arguments())
    outputs.check(batch, case.base)
    plan.check()


@pytest.mark.gpu  # on a CPU such metadata is the host's, and an error
@pytest.mark.parametrize("qo_lens", [(100, 60), (1, 2)])  # prefill, decode
def test_keys_that_the_tensors_do_not_hold(hopper_gpu: Place, qo_lens: tuple[int, int]) -> None:
    """Ragged lengths on the device that pass the end of k and v: zeros, a status, and nothing is read there."""
    case = replace(PREFILL, qo_lens=qo_lens, kv_lens=(250, 90), planner="device")
    batch = make_batch(case, hopper_gpu)
    metadata = {name: int32(getattr(batch, name), hopper_gpu.device) for name in ("qo_indptr", "kv_indptr")}
    plan = make_plan(case, hopper_gpu, metadata, max_q_rows=sum(qo_lens))
    metadata["kv_indptr"][2] = 2000
    plan.update()
    outputs = Outputs(case, batch, padding=0)
    plan.run(*(x.to(case.dtype) for x in (batch.q, batch.k, batch.v)), **outputs.arguments())
    check_request(outputs, batch, 0)
    assert (outputs.out[qo_lens[0] :] == 0).all()
    assert torch.isneginf(outputs.lse[qo_lens[0] :]).all()
    assert int(plan.status) == Status.BAD_INDEX


@pytest.mark.gpu
def test_two_plans_on_two_streams(hopper_gpu: Place) -> None:
    """At the same time; each with splits that it merges."""
    work = []
    case = replace(PAGED, policy="stream_k")
    for lens in ({}, {"qo_lens": (300, 40), "kv_lens": (900, 2000)}):
        case = replace(case, **lens)
        batch = make_batch(case, hopper_gpu)
        pages = to_pages(move(batch, hopper_gpu, case.dtype), 16)
        plan = make_plan(case, hopper_gpu, {"qo_indptr": int32(batch.qo_indptr)} | pages.table("block_table"))
        outputs = Outputs(case, batch)
        q = embed(batch.q.to(case.dtype), "packed", 3)
        work.append((plan, q, pages, outputs, batch, plan.run(q, pages.k, pages.v), torch.cuda.Stream()))
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(40):
        for results, (plan, q, pages, outputs, _batch, _first, stream) in zip(got, work, strict=True):
            with torch.cuda.stream(stream):
                results.append(plan.run(q, pages.k, pages.v))
                plan.run(q, pages.k, pages.v, **outputs.arguments())
    torch.cuda.synchronize()
    for results, (_plan, _q, _pages, outputs, batch, first, _stream) in zip(got, work, strict=True):
        outputs.check(batch, math.e)
        end = batch.q.shape[0]
        assert all(torch.equal(out[:end], first[:end]) for out in results)

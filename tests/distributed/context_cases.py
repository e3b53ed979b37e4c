"""Attention over keys that are spread over ranks, against the float64 oracle over all keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenshare.distributed import RoundRobin, deal_pages, plan_context_attention, share_heads
from evenshare.distributed.placement import Placement
from evenshare.distributed.ranks import Ranks
from tests.attention.helpers import Batch, int32, low_precision, oracle, random_batch
from tests.distributed.spawn import Case, Place

PAGE = 4
DECODE = [1, 1, 1, 1, 1, 1], [37, 1, 4, 64, 0, 9]  # new tokens and keys; one request has no key at all
APPEND = [3, 1, 0, 7, 5, 2, 4], [37, 1, 4, 64, 5, 9, 2]  # the last one has more tokens than keys: two rows without any
SHORT = [1, 1], [2, 3]  # all keys of a request in one page: most ranks have none
PLACEMENTS: dict[str, Callable[[torch.Tensor, int], Placement]] = {
    "round robin": lambda lens, size: RoundRobin(PAGE, size),
    "round robin, shifted": lambda lens, size: RoundRobin(PAGE, size, torch.arange(len(lens)) % size),
    "level fill": lambda lens, size: deal_pages(lens, PAGE, size),
    "even shares": lambda lens, size: deal_pages(lens, PAGE, size, policy="stream_k"),
    "whole requests": lambda lens, size: deal_pages(lens, PAGE, size, policy="data_parallel"),
}


def to_local_pages(
    batch: Batch, placement: Placement, place: Place, dtype: torch.dtype, kv_layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(K pages, V pages, block table) of a rank, in random order and side by side in one storage; what is no key is NaN."""
    lens = torch.tensor(batch.kv_lens, dtype=torch.int64)
    request = torch.arange(len(lens)).repeat_interleave(lens)
    position = torch.cat([torch.arange(n) for n in (*batch.kv_lens, 0)])
    owner, local = placement.locate(position, request)
    counts = placement.count(lens, place.rank)
    own = owner == place.rank
    assert torch.equal(torch.bincount(request[own], minlength=len(lens)), counts)
    columns = (-(-counts // PAGE)).tolist()
    ids = torch.randperm(sum(columns)).split(columns) if columns else ()
    table = torch.full((len(lens), max(columns, default=0)), 2**31 - 1)
    for r, pages in enumerate(ids):
        table[r, : len(pages)] = pages
    page = table[request[own], local[own] // PAGE]
    storage = torch.full((sum(columns), 2, PAGE, *batch.k.shape[1:]), float("nan"), dtype=dtype)
    for side, keys in enumerate((batch.k, batch.v)):
        storage[page, side, local[own] % PAGE] = keys[own].to(dtype)
    if kv_layout == "HND":
        storage = storage.transpose(2, 3).contiguous()
    storage = storage.to(place.device)
    return storage[:, 0], storage[:, 1], table.int().to(place.device)


def assert_close(
    out: torch.Tensor, lse: torch.Tensor, batch: Batch, dtype: torch.dtype, heads: slice, rows: slice, **options: Any
) -> None:
    """float32: 64 roundings of the largest value. 16 bits: twice the error of torch's own low-precision result, and a rounding of
    the largest value for each of the two times that a partial result is rounded before the last merge, and one of the result."""
    want, want_lse = (x[rows, heads] for x in oracle(batch, **options))
    got, got_lse = out.cpu().double(), lse.cpu().double()
    assert got.shape == want.shape, (got.shape, want.shape)
    if not got.numel():
        return
    empty = want_lse == -torch.inf
    assert torch.equal(got_lse == -torch.inf, empty)
    assert (got[empty] == 0).all()
    eps, largest = torch.finfo(dtype).eps, float(batch.v.abs().max()) if batch.v.numel() else 0.0
    budget = 64 * eps * largest
    if dtype != torch.float32:
        own = (low_precision(batch, dtype, **options)[rows, heads].double() - want).abs()
        budget = 2 * float(own.max()) + 1.5 * eps * largest
    assert (got - want).abs().max() <= budget
    bound = 64 * torch.finfo(torch.float32).eps * max(1.0, float(want_lse[~empty].abs().max()))
    assert (got_lse - want_lse)[~empty].abs().max() <= bound


def check(
    place: Place,
    lengths: tuple[list[int], list[int]] = DECODE,
    placement: str = "round robin",
    output: str = "all",
    kv_layout: str = "NHD",
    heads: tuple[int, int] = (8, 2),
    window_left: int = -1,
    on_device: bool = False,
    grown: int = 0,
    dtypes: tuple[torch.dtype, ...] = (),
    **options: Any,
) -> None:
    """One batch in every dtype. grown: keys by which requests grow after the plan is made, which is then updated."""
    for dtype in dtypes or place.dtypes:
        qo_lens, kv_lens = lengths
        torch.manual_seed(0)  # the same batch on every rank
        batch = random_batch(qo_lens, [n + grown if n else 0 for n in kv_lens], heads, 32)
        where = place.device if on_device else torch.device("cpu")
        dealt = PLACEMENTS[placement](torch.tensor(kv_lens, dtype=torch.int64), place.size)
        k, v, table = to_local_pages(batch, dealt, place, dtype, kv_layout)
        lens = torch.tensor(kv_lens, dtype=torch.int32, device=where)
        decode = set(qo_lens) <= {1}
        plan = plan_context_attention(
            placement=dealt,
            block_table=table.to(where),
            kv_lens=lens,
            qo_indptr=None if decode else int32(batch.qo_indptr, where),
            num_qo_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=32,
            dtype=dtype,
            window_left=window_left,
            output=output,
            kv_layout=kv_layout,
            max_q_len=max(qo_lens, default=1),
            max_q_rows=sum(qo_lens),
            device=place.device,
            **options,
        )
        q = batch.q.to(place.device, dtype)
        if grown:
            plan.run(q, k, v)
            lens += (lens > 0) * grown
            plan.update()
        out, lse = plan.run(q, k, v, return_lse=True)
        again, lse_again = plan.run(q, k, v, return_lse=True)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)
        if output == "all":
            for other in Ranks(dist.group.WORLD, place.rank, place.size).gather(out[None], "results"):
                assert torch.equal(other, out)
        cut, rows = slice(None), slice(None)
        if output == "heads":
            share = heads[0] // place.size
            cut = slice(place.rank * share, (place.rank + 1) * share)
        elif output == "tokens":
            share = -(-sum(qo_lens) // place.size)
            rows = slice(place.rank * share, (place.rank + 1) * share)
            kept = len(range(sum(qo_lens))[rows])
            out, lse = out[:kept], lse[:kept]
        if out.numel():
            mask = {
                "window_left": window_left,
                **({"logits_soft_cap": c} if (c := options.get("logits_soft_cap")) else {}),
            }
            assert_close(out, lse, batch, dtype, cut, rows, **mask)


def check_graph(place: Place, lengths: tuple[list[int], list[int]], window_left: int = -1) -> None:
    """Planning and running never wait for the GPU, and a graph that captures both serves requests that grow."""
    dtype, grown = torch.bfloat16, 5
    torch.manual_seed(0)
    batch = random_batch(lengths[0], [n + grown for n in lengths[1]], (8, 2), 64)
    dealt = RoundRobin(PAGE, place.size)
    k, v, table = to_local_pages(batch, dealt, place, dtype, "NHD")
    lens = int32(lengths[1], place.device)
    plan = plan_context_attention(
        placement=dealt,
        block_table=table,
        kv_lens=lens,
        qo_indptr=int32(batch.qo_indptr, place.device),
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim=64,
        dtype=dtype,
        window_left=window_left,
        max_q_len=max(lengths[0]),
        max_q_rows=sum(lengths[0]),
    )
    q = batch.q.to(place.device, dtype)
    plan.run(q, k, v)
    torch.cuda.set_sync_debug_mode("error")
    plan.update()
    plan.run(q, k, v)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update()
        out, lse = plan.run(q, k, v, return_lse=True)
    lens += grown
    graph.replay()
    assert_close(out, lse, batch, dtype, slice(None), slice(None), window_left=window_left)


def check_fp8(place: Place) -> None:
    """Codes of keys and values with their scales."""
    torch.manual_seed(0)
    qo_lens, kv_lens = APPEND
    batch = random_batch(qo_lens, kv_lens, (8, 2), 32)
    batch = replace(batch, **{name: getattr(batch, name).to(torch.float8_e4m3fn).float() for name in "kv"})
    dealt = RoundRobin(PAGE, place.size)
    k, v, table = to_local_pages(batch, dealt, place, torch.float32, "NHD")
    plan = plan_context_attention(
        placement=dealt,
        block_table=table.cpu(),
        kv_lens=int32(kv_lens),
        qo_indptr=int32(batch.qo_indptr),
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim=32,
        dtype=torch.bfloat16,
        kv_dtype=torch.float8_e4m3fn,
        device=place.device,
    )
    q = batch.q.to(place.device, torch.bfloat16)
    codes = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    out, lse = plan.run(q, *codes, k_scale=0.5, v_scale=0.25, return_lse=True)
    scaled = replace(batch, k=batch.k * 0.5, v=batch.v * 0.25)
    assert_close(out, lse, scaled, torch.bfloat16, slice(None), slice(None))


def check_mesh(place: Place) -> None:
    """Heads over one dimension of a device mesh, keys over the other."""
    mesh = init_device_mesh(place.device.type, (place.size // 2, 2), mesh_dim_names=("heads", "keys"))
    part = Place(mesh["keys"].get_local_rank(), 2, place.device)
    dtype = place.dtypes[0]
    torch.manual_seed(0)
    batch = random_batch(*APPEND, (8, 4), 32)
    share = share_heads(8, 4, mesh["heads"].get_local_rank(), place.size // 2)
    heads = slice(share.qo.start, share.qo.stop)
    own = replace(batch, k=batch.k[:, share.kv.start : share.kv.stop], v=batch.v[:, share.kv.start : share.kv.stop])
    k, v, table = to_local_pages(own, RoundRobin(PAGE, 2), part, dtype, "NHD")
    plan = plan_context_attention(
        placement=RoundRobin(PAGE, 2),
        block_table=table.cpu(),
        kv_lens=int32(batch.kv_lens),
        qo_indptr=int32(batch.qo_indptr),
        num_qo_heads=len(share.qo),
        num_kv_heads=len(share.kv),
        head_dim=32,
        dtype=dtype,
        group=mesh["keys"],
        device=place.device,
    )
    out, lse = plan.run(batch.q[:, heads].to(place.device, dtype), k, v, return_lse=True)
    assert_close(out, lse, batch, dtype, heads, slice(None))


def check_two_steps(place: Place) -> None:
    """Results so large that shares are exchanged and gathered."""
    from evenshare.distributed import states

    states.ONE_STEP_BYTES, kept = 0, states.ONE_STEP_BYTES
    try:
        check(place, heads=(6, 2))
    finally:
        states.ONE_STEP_BYTES = kept


CASES: dict[str, Case] = {
    **{f"decode, {name}": partial(check, placement=name) for name in PLACEMENTS},
    **{f"append, {name}": partial(check, lengths=APPEND, placement=name) for name in PLACEMENTS},
    **{
        f"window of {window}, {name}": partial(check, lengths=APPEND, placement=name, window_left=window)
        for window in (0, 3, 17, 64)
        for name in ("round robin", "level fill")
    },
    **{f"decode into {output}": partial(check, output=output) for output in ("heads", "tokens")},
    **{f"append into {output}": partial(check, lengths=APPEND, output=output) for output in ("heads", "tokens")},
    "ranks without a page": partial(check, lengths=SHORT),
    "heads before keys": partial(check, lengths=APPEND, kv_layout="HND"),
    "heads before keys, window": partial(check, lengths=APPEND, kv_layout="HND", window_left=9),
    "heads in groups of 3, soft cap": partial(check, heads=(12, 4), lengths=APPEND, logits_soft_cap=5.0),
    "requests grow": partial(check, grown=3),
    "requests grow, append": partial(check, grown=3, lengths=APPEND),
    "requests grow, window": partial(check, grown=3, lengths=APPEND, window_left=5),
    "fp8 keys": check_fp8,
    "heads and keys on a mesh": check_mesh,
    "exchange, then gather": check_two_steps,
    "no tokens": partial(check, lengths=([0, 0], [5, 0])),
    "no requests": partial(check, lengths=([], [])),
    **{
        f"portable kernels, {name}": partial(check, backend="triton", dtypes=(torch.float32,), heads=(4, 2), **case)
        for name, case in {
            "decode": {"lengths": ([1, 1, 1], [13, 0, 2]), "planner": "device"},
            "append": {"lengths": ([3, 1], [13, 1])},
            "window": {"lengths": ([3, 1], [13, 1]), "window_left": 5, "planner": "device"},
        }.items()
    },
    "metadata on the device": partial(check, lengths=APPEND, on_device=True),
    "metadata on the device, window": partial(check, lengths=APPEND, on_device=True, window_left=5),
}

# What only a GPU does.
GPU_CASES: dict[str, Case] = {
    "graph, decode": partial(check_graph, lengths=([1, 1, 1], [200, 1, 37])),
    "graph, append": partial(check_graph, lengths=([3, 1, 5], [200, 1, 37])),
    "graph, window": partial(check_graph, lengths=([3, 1, 5], [200, 1, 37]), window_left=20),
}

"""Who gets which keys, tokens, heads, rows and columns: everything once, and level."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenshare.distributed import HeadShare, RoundRobin, deal_pages, even_share, share_heads, take_inputs, take_outputs
from evenshare.distributed.layout import lay_out
from evenshare.distributed.placement import Placement
from evenshare.distributed.ranks import Ranks
from evenshare.distributed.ring import _plan_steps
from tests.quant.helpers import random_permutation, random_weight

LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    LENGTHS,
    st.integers(1, 5),
    st.sampled_from([1, 4, 7]),
    st.sampled_from(["turns", "shifted", "level_fill", "stream_k"]),
)
def test_every_key_has_one_place(lengths: list[int], num_ranks: int, page_size: int, kind: str) -> None:
    lens = torch.tensor(lengths)
    placement: Placement
    if kind in ("turns", "shifted"):
        placement = RoundRobin(page_size, num_ranks, torch.arange(len(lens)) % num_ranks if kind == "shifted" else None)
    else:
        placement = deal_pages(lens, page_size, num_ranks, policy=kind)
    grown = lens + 11  # what requests grow by has a place too
    request = torch.arange(len(lens)).repeat_interleave(grown)
    position = torch.cat([torch.arange(n) for n in grown.tolist()])
    owner, local = placement.locate(position, request)
    for rank in range(num_ranks):
        own = owner == rank
        for r in range(len(lens)):
            assert local[own & (request == r)].tolist() == list(range(int((own & (request == r)).sum())))
            seen = own & (request == r)
            ends = torch.arange(int(grown[r]) + 1)
            counts = placement.count(ends, rank, torch.full_like(ends, r))
            assert counts.tolist() == [0, *seen[request == r].int().cumsum(0).tolist()]
            widest = max((int(counts[e] - counts[e - w]) for w in (9,) for e in range(w, len(ends))), default=0)
            assert widest <= placement.max_count(9)
        assert torch.equal(placement.count(grown, rank), torch.bincount(request[own], minlength=len(lens)))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 5))
def test_dealt_pages_are_level(lengths: list[int], num_ranks: int) -> None:
    lens = torch.tensor(lengths)
    for policy, slack in (("stream_k", 1), ("level_fill", 2)):  # pages; a cut costs level fill one
        dealt = deal_pages(lens, 4, num_ranks, policy=policy)
        pages = torch.stack([-(-dealt.count(lens, rank) // 4) for rank in range(num_ranks)]).sum(1)
        assert int(pages.max()) <= math.ceil(int(pages.sum()) / num_ranks) + slack + int((lens == 0).sum())


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.booleans(), st.sampled_from([1, 16]))
def test_every_token_is_computed_once(lengths: list[int], num_ranks: int, zigzag: bool, min_chunk: int) -> None:
    indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    layout = lay_out(indptr, num_ranks, zigzag=zigzag, row_cost=1000, min_chunk=min_chunk)
    tokens = [layout.tokens(rank) for rank in range(num_ranks)]
    assert torch.cat(tokens).sort().values.tolist() == list(range(sum(lengths)))
    for rank, own in enumerate(tokens):
        assert layout.count(rank) == len(own)
        assert (own.diff() > 0).all()  # in logical order, so that own keys want a plain causal mask


def test_ranks_of_a_zigzag_layout_finish_level() -> None:
    lengths = torch.tensor([4096, 33000, 129, 100, 2500, 80, 700])
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    layout = lay_out(indptr, 4, zigzag=True, row_cost=1 << 30, min_chunk=128)
    pairs = torch.stack([(layout.positions(rank) + 1).sum() for rank in range(4)]).double()
    assert pairs.max() / pairs.mean() < 1.01
    straight = lay_out(indptr, 4, zigzag=False, row_cost=1 << 30, min_chunk=128)
    uneven = torch.stack([(straight.positions(rank) + 1).sum() for rank in range(4)]).double()
    assert uneven.max() / uneven.mean() > 1.5


def test_ring_steps_share_plans() -> None:
    """Workspaces are some 20 MB, so uneven lengths must not make a plan for each of many steps."""
    layout = lay_out(torch.tensor([0, 40001, 40003, 73210]), 16, zigzag=True, row_cost=1 << 30, min_chunk=128)
    for rank in range(16):
        steps = _plan_steps(layout, Ranks(None, rank, 16), True, lambda **lens: object())  # type: ignore[arg-type, return-value]
        assert len(steps) == 16
        assert len(set(map(id, steps))) <= 4


@pytest.mark.parametrize(("size", "num_ranks", "unit"), [(10, 4, 1), (512, 3, 128), (2, 4, 1), (0, 2, 8)])
def test_even_shares(size: int, num_ranks: int, unit: int) -> None:
    shares = [even_share(size, rank, num_ranks, unit) for rank in range(num_ranks)]
    assert [i for share in shares for i in share] == list(range(size))
    assert max(map(len, shares)) - min(map(len, shares)) <= unit


@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads", "num_ranks"), [(32, 8, 4), (32, 8, 8), (28, 4, 8), (12, 4, 3), (8, 1, 8)]
)
def test_head_shares(num_qo_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    shares = [share_heads(num_qo_heads, num_kv_heads, rank, num_ranks) for rank in range(num_ranks)]
    assert [head for share in shares for head in share.qo] == list(range(num_qo_heads))
    group = num_qo_heads // num_kv_heads
    for share in shares:
        assert share.qo
        assert len(share.qo) % len(share.kv) == 0
        assert {head // group for head in share.qo} == set(share.kv)


def test_rows_of_heads() -> None:
    share = HeadShare(range(4, 8), range(1, 2))
    assert (share.rows(64, of="qo"), share.rows(64, of="kv")) == (range(256, 512), range(64, 128))


@pytest.mark.parametrize("form", ["symmetric", "zeros", "offsets", "nf4"])
@pytest.mark.parametrize("group_size", [16, 32, -1])
@pytest.mark.parametrize("order", ["none", "act-order", "padded"])
@pytest.mark.parametrize("columns", [range(0, 64), range(32, 96), range(5, 6), range(3, 77), range(0, 96)])
def test_inputs_of_a_quantised_weight(form: str, group_size: int, order: str, columns: range) -> None:
    permutation = {"none": None, "act-order": random_permutation(96), "padded": random_permutation(96, 32)}[order]
    for bits in (4,) if form == "nf4" else (4, 8):
        weight = random_weight(6, 96, group_size, form, bits, permutation=permutation)
        part = take_inputs(weight, columns)
        assert part.shape == (6, len(columns))
        assert torch.equal(part.dequantize(), weight.dequantize()[:, columns.start : columns.stop])
        if order == "none" and columns.start % 32 == columns.stop % 32 == 0:
            assert part.permutation is None  # whole groups keep their form
            assert part.group_size in (weight.group_size, len(columns))


def test_outputs() -> None:
    weight = random_weight(6, 96, 32, "zeros")
    rows = [range(1, 3), range(4, 6)]
    assert torch.equal(take_outputs(weight, rows).dequantize(), weight.dequantize()[[1, 2, 4, 5]])
    dense = torch.randn(6, 4)
    part = take_outputs(dense, rows[:1])
    assert torch.equal(part, dense[1:3])
    assert part.untyped_storage().nbytes() == 2 * 4 * 4  # the whole weight can go


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: even_share(10, 0, 2, unit=4), "unit: got 4 for a size of 10"),
        (lambda: even_share(10, 2, 2), "rank: got 2 of 2"),
        (lambda: share_heads(30, 8, 0, 2), "num_qo_heads, num_kv_heads: got 30 and 8"),
        (lambda: share_heads(32, 4, 0, 6), "num_ranks: got 6 for 32 query heads and 4 KV heads"),
        (lambda: share_heads(4, 4, 0, 8), "num_ranks: got 8"),
        (lambda: RoundRobin(0, 2), "page_size, num_ranks: got 0 and 2"),
        (lambda: deal_pages(torch.tensor([3]), 4, 2, policy="cost_sorted"), "policy: got 'cost_sorted'"),
        (lambda: deal_pages(torch.zeros(2, 2), 4, 2), r"kv_lens: got shape \(2, 2\)"),
        (lambda: take_inputs(random_weight(4, 32, 16), range(16, 40)), "columns: got range"),
        (lambda: take_inputs(random_weight(4, 32, 16), range(8, 8)), "columns: got range"),
    ],
)
def test_errors(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()

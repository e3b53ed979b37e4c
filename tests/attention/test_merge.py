"""Merging states: any split of the keys gives the same result, and empty states carry nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from evenshare.attention import merge_state, merge_states
from tests.attention.helpers import Batch, Place, oracle, random_batch

INF = math.inf


def states(batch: Batch, cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """One request's keys cut at `cuts`: float64 states (o [n, L, H, D], lse [n, L, H])."""
    parts = []
    for begin, end in zip([0, *cuts], [*cuts, batch.kv_lens[0]], strict=True):
        parts.append(
            oracle(Batch(batch.qo_lens, (end - begin,), batch.q, batch.k[begin:end], batch.v[begin:end]), causal=False)
        )
    return torch.stack([o for o, _ in parts], 1), torch.stack([lse for _, lse in parts], 1)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 32 * torch.finfo(dtype).eps, "rtol": 0}


@pytest.mark.parametrize("dim", [1, 56, 128, 300])
@pytest.mark.parametrize("base", [math.e, 2.0, 10.0])
def test_merged_states_are_the_union(place: Place, base: float, dim: int) -> None:
    batch = random_batch((3,), (20,), heads=(5, 1), dim=dim)
    o, lse = states(batch, [1, 1, 9, 20])  # two of them without keys
    want, want_lse = oracle(batch, causal=False)
    for dtype in place.dtypes:
        o_in, lse_in = o.to(place.device, dtype), (lse / math.log(base)).float().to(place.device)
        got, got_lse = merge_states(o_in, lse_in, base, backend=place.backend)
        assert (got.dtype, got_lse.dtype) == (dtype, torch.float32)
        torch.testing.assert_close(got.cpu().double(), want, **tolerance(dtype))
        torch.testing.assert_close(got_lse.cpu().double(), want_lse / math.log(base), **tolerance(torch.float32))


@pytest.mark.parametrize("base", [math.e, 2.0])
def test_merge_of_two_is_merge_of_many(place: Place, base: float) -> None:
    batch = random_batch((2,), (11,), heads=(4, 2), dim=72)
    o, lse = (x.float().to(place.device) for x in states(batch, [4]))
    got, got_lse = merge_state(o[:, 0], lse[:, 0], o[:, 1], lse[:, 1], base, backend=place.backend)
    want, want_lse = merge_states(o, lse, base, backend=place.backend)
    torch.testing.assert_close(got, want, **tolerance(torch.float32))
    torch.testing.assert_close(got_lse, want_lse, **tolerance(torch.float32))


def test_two_empty_states(place: Place) -> None:
    o, lse = torch.zeros(2, 3, 64, device=place.device), torch.full((2, 3), -INF, device=place.device)
    for got, got_lse in (
        merge_state(o, lse, o, lse, backend=place.backend),
        merge_states(torch.stack((o, o), 1), torch.stack((lse, lse), 1), 2.0, backend=place.backend),
    ):
        assert (got == 0).all()
        assert torch.isneginf(got_lse).all()


def test_no_states_at_all(place: Place) -> None:
    o, lse = torch.empty(2, 0, 3, 64, device=place.device), torch.empty(2, 0, 3, device=place.device)
    got, got_lse = merge_states(o, lse, backend=place.backend)
    assert (got.shape, got_lse.shape) == ((2, 3, 64), (2, 3))
    assert (got == 0).all()
    assert torch.isneginf(got_lse).all()


@pytest.mark.parametrize("side", [0, 1])
def test_nan_of_an_empty_state_is_not_seen(place: Place, side: int) -> None:
    o, lse = torch.randn(4, 2, 2, 40, device=place.device), torch.randn(4, 2, 2, device=place.device)
    o[1:, side], lse[1:, side] = math.nan, -INF
    o[3], lse[3] = math.nan, -INF
    many = merge_states(o, lse, backend=place.backend)
    two = merge_state(o[:, 0], lse[:, 0], o[:, 1], lse[:, 1], backend=place.backend)
    for got, got_lse in (many, two):
        torch.testing.assert_close(got[1:3], o[1:3, 1 - side], rtol=1e-6, atol=0)
        torch.testing.assert_close(got_lse[1:3], lse[1:3, 1 - side], rtol=0, atol=1e-6)
        assert (got[3] == 0).all()
        assert torch.isneginf(got_lse[3]).all()


def test_a_true_nan_is_kept(place: Place) -> None:
    o, lse = torch.randn(1, 2, 1, 8, device=place.device), torch.tensor([[[math.nan], [-INF]]], device=place.device)
    got, got_lse = merge_states(o, lse, backend=place.backend)
    assert torch.isnan(got).all()
    assert torch.isnan(got_lse).all()
    got, got_lse = merge_state(o[:, 1], lse[:, 1], o[:, 0], lse[:, 0], backend=place.backend)
    assert torch.isnan(got).all()
    assert torch.isnan(got_lse).all()


def test_large_logarithms_do_not_overflow(place: Place) -> None:
    lse = torch.tensor([[[3e4], [3e4]]], device=place.device)
    got, got_lse = merge_states(
        torch.tensor([[[[1.0]], [[3.0]]]], device=place.device), lse, 2.0, backend=place.backend
    )
    assert got.item() == 2.0
    assert got_lse.item() == 30001.0


def test_any_strides(place: Place) -> None:
    o, lse = torch.randn(3, 4, 2, 10, device=place.device), torch.randn(3, 4, 2, device=place.device)
    want, want_lse = merge_states(o, lse, backend=place.backend)
    strided = o.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    out = torch.full((10, 2, 6), math.nan, device=place.device).permute(2, 1, 0)[::2]
    lse_out = torch.full((2, 3), math.nan, device=place.device).t()
    merge_states(
        strided, lse.transpose(0, 2).contiguous().transpose(0, 2), out=out, lse_out=lse_out, backend=place.backend
    )
    assert torch.equal(out, want)
    assert torch.equal(lse_out, want_lse)


def test_in_place_on_the_first_state(place: Place) -> None:
    o, lse = torch.randn(3, 2, 2, 300, device=place.device), torch.randn(3, 2, 2, device=place.device)
    a, b = (o[:, i].clone() for i in (0, 1))
    lse_a, lse_b = (lse[:, i].clone() for i in (0, 1))
    want, want_lse = merge_state(a, lse_a, b, lse_b, backend=place.backend)
    got, got_lse = merge_state(a, lse_a, b, lse_b, out=a, lse_out=lse_a, backend=place.backend)
    assert got.data_ptr() == a.data_ptr()
    assert torch.equal(a, want)
    assert torch.equal(got_lse, want_lse)


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 2, 0, 8)])
def test_empty_batches(place: Place, shape: tuple[int, ...]) -> None:
    got, got_lse = merge_states(
        torch.empty(shape, device=place.device), torch.empty(shape[:-1], device=place.device), backend=place.backend
    )
    assert got.shape == (shape[0], shape[2], 8)
    assert got_lse.shape == (shape[0], shape[2])


def wrong(**changes: Any) -> dict[str, Any]:
    good = {"o": torch.zeros(2, 3, 2, 8), "lse": torch.zeros(2, 3, 2)}
    return good | changes


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (wrong(o=torch.zeros(2, 3, 8)), ValueError, r"o: got shape \(2, 3, 8\), want 4 dimensions"),
        (wrong(o=torch.zeros(2, 3, 2, 8, dtype=torch.float64)), TypeError, "o: got dtype torch.float64"),
        (wrong(lse=torch.zeros(2, 2, 2)), ValueError, r"lse: got shape \(2, 2, 2\), want \(2, 3, 2\)"),
        (wrong(lse=torch.zeros(2, 3, 2).half()), TypeError, "lse: got dtype torch.float16, want torch.float32"),
        (wrong(base=1.0), ValueError, "base: got 1.0"),
        (wrong(out=torch.zeros(2, 2, 7)), ValueError, r"out: got shape \(2, 2, 7\), want \(2, 2, 8\)"),
        (wrong(lse_out=torch.zeros(2, 2).half()), TypeError, "lse_out: got dtype torch.float16"),
        (wrong(backend="cuda"), ValueError, "backend: got 'cuda'"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        merge_states(**arguments)


def test_errors_of_two_states_name_the_state() -> None:
    o, lse = torch.zeros(2, 2, 8), torch.zeros(2, 2)
    with pytest.raises(ValueError, match="o_b: got shape"):
        merge_state(o, lse, o[:1], lse)
    with pytest.raises(ValueError, match="lse_b: got shape"):
        merge_state(o, lse, o, lse[:1])
    with pytest.raises(TypeError, match=r"o_b: got dtype torch.float16, want torch.float32, as o_a"):
        merge_state(o, lse, o.half(), lse)

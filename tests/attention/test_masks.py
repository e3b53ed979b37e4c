"""Causal, sliding window, soft cap, scale and lse, exact at their edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from evenshare.attention import attention
from tests.attention.helpers import (
    Place,
    check_paged,
    check_ragged,
    int32,
    move,
    oracle,
    random_batch,
    run_paged,
    run_ragged,
)

TILE = 16  # keys of one iteration in the interpreter


def test_no_keys_beside_nine(place: Place) -> None:
    check_paged(random_batch((1, 1), (0, 9)), place, page_size=4)
    check_ragged(random_batch((1, 1), (0, 9)), place)


@pytest.mark.parametrize("heads", [(2, 2), (6, 1)])
def test_more_causal_queries_than_keys(place: Place, heads: tuple[int, int]) -> None:
    """Rows 0, 1, 2 of 5 see none of 2 keys: 0 and -inf; rows of one packed tile differ in that."""
    batch = random_batch((5,), (2,), heads=heads)
    out, lse = run_ragged(batch, place)
    assert lse is not None
    assert (out[:3] == 0).all()
    assert torch.isneginf(lse[:3]).all()
    assert torch.isfinite(lse[3:]).all()
    check_ragged(batch, place)
    check_paged(batch, place, page_size=1)


@pytest.mark.parametrize("window_left", [0, 1, TILE - 1, TILE, TILE + 1, 36, 37, 38, 1000])
def test_window_edges(place: Place, window_left: int) -> None:
    batch = random_batch((3, 1), (38, 17), heads=(4, 2), dim=16)
    check_ragged(batch, place, window_left=window_left)
    check_paged(batch, place, page_size=3, window_left=window_left)


@pytest.mark.parametrize("lens", [((3, 1), (38, 17)), ((20,), (9,))])
def test_the_widest_window(kernel_place: Place, lens: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """2^31 - 1 keys, as one says for all of them: no sum or difference with it wraps."""
    check_ragged(random_batch(*lens, dim=16), kernel_place, window_left=2**31 - 1)


@pytest.mark.parametrize("window_left", [0, 2, 40])
def test_window_without_causal(place: Place, window_left: int) -> None:
    """Every key to the right stays visible: queries 5 of 3 keys have rows left of the first key."""
    check_ragged(
        random_batch((4, 5, 1), (38, 3, 17), heads=(2, 1), dim=16), place, causal=False, window_left=window_left
    )


def test_one_key_per_row_when_the_window_is_zero(place: Place) -> None:
    batch = random_batch((4,), (20,), dim=16)
    out, lse = run_ragged(batch, place, window_left=0)
    torch.testing.assert_close(out.cpu(), batch.v[16:20].expand(4, 2, 16), atol=1e-6, rtol=0)
    assert lse is not None
    scores = (batch.q * batch.k[16:20]).sum(-1) * 16**-0.5
    torch.testing.assert_close(lse.cpu(), scores, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window_left", [-1, 7])
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_cap(place: Place, cap: float, window_left: int) -> None:
    options: dict[str, Any] = {"logits_soft_cap": cap, "sm_scale": 1.0, "window_left": window_left}
    batch = random_batch((1, 4), (21, 6), heads=(4, 2))
    check_ragged(batch, place, **options)
    check_paged(batch, place, page_size=5, **options)
    plain, _ = oracle(batch, sm_scale=1.0, window_left=window_left)
    capped, _ = oracle(batch, **options)
    assert (plain - capped).abs().max() > 1e-3


@pytest.mark.parametrize("sm_scale", [0.0, 1.0, -0.3])
def test_scale(place: Place, sm_scale: float) -> None:
    check_ragged(random_batch((2, 1), (18, 5)), place, sm_scale=sm_scale)


def test_large_scores_do_not_overflow(place: Place) -> None:
    batch = random_batch((2,), (20,))
    out, lse = run_ragged(batch, place, sm_scale=300.0)
    want, want_lse = oracle(batch, sm_scale=300.0)
    torch.testing.assert_close(
        out.cpu().double(), want, atol=2e-3, rtol=0
    )  # scores near 3000 carry errors near 3000 eps
    assert lse is not None
    torch.testing.assert_close(lse.cpu().double(), want_lse, atol=0, rtol=4e-6)


@pytest.mark.parametrize("base", [math.e, 2.0, 10.0])
def test_lse_is_logsumexp(place: Place, base: float) -> None:
    batch = random_batch((3,), (20,), heads=(4, 2), dim=16)
    moved = move(batch, place)
    out, lse = attention(
        moved.q, moved.k, moved.v, qo_indptr=int32([0, 3], place.device), kv_indptr=int32([0, 20], place.device),
        return_lse=True, base=base, backend=place.backend,
    )  # fmt: skip
    scores = torch.einsum("ihd,jhd->ihj", batch.q.double(), batch.k.double().repeat_interleave(2, 1)) / 4
    want = torch.logsumexp(scores, -1) / math.log(base)
    torch.testing.assert_close(lse.cpu().double(), want, atol=1e-5, rtol=0)
    assert out.shape == (3, 4, 16)


def test_lse_base_of_paged_attention(place: Place) -> None:
    batch = random_batch((1, 2), (18, 0), heads=(4, 2), dim=16)
    check_paged(batch, place, base=2.0)
    _, natural = run_paged(batch, place)
    _, binary = run_paged(batch, place, base=2.0)
    assert natural is not None
    assert binary is not None
    torch.testing.assert_close(binary * math.log(2), natural, atol=1e-6, rtol=1e-6)

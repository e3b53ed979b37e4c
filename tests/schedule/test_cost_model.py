"""The selector of shares, against the worked examples of the Stream-K paper and brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenshare.schedule.cost_model import CostModel, choose_num_shares

A100 = CostModel(a=0.0, b=9.0, c=1.0, d=8.0)  # tile 128 x 128 x 32, fp16


@pytest.mark.parametrize(
    ("m", "n", "k", "shares"), [(256, 3584, 8192, 108), (1024, 1024, 1024, 64), (128, 128, 16384, 8)]
)
def test_worked_examples(m: int, n: int, k: int, shares: int) -> None:
    assert choose_num_shares(A100, m // 128 * (n // 128), k // 32, 108) == shares


def test_time_by_hand() -> None:
    model = CostModel(a=100.0, b=10.0, c=2.0, d=3.0)
    assert model.time(4, 4, 8) == 100 + 2 * 8  # a tile each
    assert model.time(8, 4, 8) == 100 + 10 + 2 * 4 + 3 * 1  # halves
    assert model.time(3, 1, 8) == 100 + 10 + 2 * 3 + 3 * 2  # 3, 3 and 2 iterations


@given(
    b=st.integers(0, 50),
    c=st.integers(1, 20),
    d=st.integers(0, 50),
    num_tiles=st.integers(1, 200),
    iters_per_tile=st.integers(1, 500),
    max_shares=st.integers(1, 150),
)
def test_least_time_then_fewest_shares(
    b: int, c: int, d: int, num_tiles: int, iters_per_tile: int, max_shares: int
) -> None:
    model = CostModel(0.0, float(b), float(c), float(d))
    times = [(model.time(g, num_tiles, iters_per_tile), g) for g in range(1, max_shares + 1)]
    assert choose_num_shares(model, num_tiles, iters_per_tile, max_shares) == min(times)[1]


def test_free_merging_uses_every_worker() -> None:
    assert choose_num_shares(CostModel(0.0, 0.0, 1.0, 0.0), 1, 1000, 100) == 100


def test_dear_merging_never_splits() -> None:
    assert choose_num_shares(CostModel(0.0, 1e9, 1.0, 1e9), 5, 1000, 100) == 5


@pytest.mark.parametrize(("num_tiles", "iters_per_tile"), [(0, 8), (8, 0)])
def test_empty_space(num_tiles: int, iters_per_tile: int) -> None:
    assert choose_num_shares(A100, num_tiles, iters_per_tile, 108) == 1


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="max_shares: got 0, want 1 or more"):
        choose_num_shares(A100, 1, 1, 0)
    with pytest.raises(ValueError, match="num_tiles, iters_per_tile: got -1 and 1"):
        choose_num_shares(A100, -1, 1, 1)
    with pytest.raises(ValueError, match=r"d: got -1.0, want 0 or more"):
        CostModel(0.0, 0.0, 1.0, -1.0)

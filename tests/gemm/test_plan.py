"""Plans of products: tile sizes by problem, shares by the cost model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenshare.gemm.costs import TileCosts
from evenshare.gemm.plan import (
    FLOAT32_TILES,
    HALF_TILES,
    INTERPRETER_TILE,
    UNALIGNED_BLOCK_K,
    choose_shares,
    choose_tile,
    plan_matmul,
)

H200_SMS = 132
SIZES = st.one_of(st.integers(1, 300), st.integers(1, 20000))


@given(
    SIZES,
    SIZES,
    st.one_of(st.just(0), SIZES),
    st.sampled_from((2, 4)),
    st.integers(1, 200),
    st.booleans(),
    st.booleans(),
)
def test_invariants(m: int, n: int, k: int, itemsize: int, num_sms: int, aligned: bool, interpreted: bool) -> None:
    plan = plan_matmul(m, n, k, itemsize, num_sms, aligned, interpreted)
    tile, shares = plan.tile, plan.shares
    assert shares.num_tiles == -(-m // tile.block_m) * -(-n // tile.block_n)
    assert shares.iters_per_tile == -(-k // tile.block_k)
    assert 1 <= shares.num_workers <= num_sms * tile.workers_per_sm
    assert 0 <= shares.num_whole <= shares.num_tiles
    tail = (shares.num_tiles - shares.num_whole) * shares.iters_per_tile
    # No worker starts for nothing: each has a whole tile or a share of the tail that is not empty.
    assert shares.num_workers <= max(shares.num_whole, tail)
    if shares.num_whole < shares.num_tiles:
        assert tail >= shares.num_workers
        assert plan.partial_elements == 2 * shares.num_workers * tile.block_m * tile.block_n
    else:
        assert plan.partial_elements == 0
    if k == 0:
        assert shares.num_whole == shares.num_tiles


def test_tiles_by_rows_and_dtype() -> None:
    assert choose_tile(1, 4096, 2, H200_SMS) == HALF_TILES[0]
    assert choose_tile(16, 4096, 2, H200_SMS) == HALF_TILES[0]
    assert choose_tile(17, 4096, 2, H200_SMS) == HALF_TILES[1]
    assert choose_tile(8192, 8192, 2, H200_SMS) == HALF_TILES[2]
    assert choose_tile(16, 4096, 4, H200_SMS) == FLOAT32_TILES[0]
    assert choose_tile(8192, 8192, 4, H200_SMS) == FLOAT32_TILES[1]


def test_the_large_tile_needs_a_tile_for_every_sm_and_enough_rows() -> None:
    assert choose_tile(1024, 1024, 2, H200_SMS) == HALF_TILES[1]  # 64 tiles of 128 x 128
    assert choose_tile(64, 1 << 20, 2, H200_SMS) == HALF_TILES[1]
    assert choose_tile(65, 1 << 20, 2, H200_SMS) == HALF_TILES[2]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("m", [1, 64, 8192])
def test_unaligned_operands_take_short_steps(m: int, itemsize: int) -> None:
    aligned, unaligned = (choose_tile(m, 8192, itemsize, H200_SMS, aligned=flag) for flag in (True, False))
    assert unaligned.block_k == min(aligned.block_k, UNALIGNED_BLOCK_K)
    assert (unaligned.block_m, unaligned.block_n) == (aligned.block_m, aligned.block_n)


def test_few_tiles_with_a_long_k_are_split() -> None:
    shares = plan_matmul(128, 128, 16384, 2, H200_SMS).shares
    assert shares.num_workers > shares.num_tiles
    assert shares.num_whole == 0


def test_few_tiles_with_a_short_k_are_not() -> None:
    shares = plan_matmul(136, 136, 64, 2, H200_SMS).shares
    assert shares.num_workers == shares.num_tiles == shares.num_whole


def test_whole_waves_and_a_tail_of_one_to_two_tiles_a_worker() -> None:
    shares = plan_matmul(8192, 8192, 8192, 2, H200_SMS).shares
    assert shares.num_workers == H200_SMS
    assert shares.num_whole % H200_SMS == 0
    assert H200_SMS < shares.num_tiles - shares.num_whole < 2 * H200_SMS


@pytest.mark.parametrize(("cost", "split"), [(10.0, True), (40.0, False)])
def test_the_tail_is_split_where_it_pays(cost: float, split: bool) -> None:
    """6 tiles of 100 iterations on 4 workers: 150 iterations and one partial each, or 200 and none."""
    shares = choose_shares(TileCosts(a=0, b=cost, c=1, d=cost, whole_c=1), 6, 100, 4)
    assert (shares.num_whole < shares.num_tiles) == split


def test_the_interpreters_tiles_are_small() -> None:
    plan = plan_matmul(20, 20, 100, 4, 4, True, True)
    assert plan.tile == INTERPRETER_TILE
    assert plan.shares.num_workers == 4

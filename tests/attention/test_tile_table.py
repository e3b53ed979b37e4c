"""The tile table made on the device is the host's, and what it does with values that no host has looked at."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from evenshare.attention import launch
from evenshare.attention.metadata import Batch, make_batch, move
from evenshare.attention.problem import Problem
from evenshare.attention.tiles import TileConfig, tile_table
from evenshare.schedule.plan import Status
from tests.attention.helpers import indptr, int32

TILE = TileConfig(16, 16, 4, 1, 1)
HEAD_MAJOR = replace(TILE, head_major=True)
PROBLEM = Problem(12, 2, 16, 16, torch.float32, 0, True, -1, 0.0, 1.0)  # groups of 6: a row tile ends inside a token
UNTOUCHED = -9
# (query tokens, keys) of every request.
BATCHES: list[tuple[list[int], list[int]]] = [
    ([], []),
    ([0], [7]),
    ([1], [33]),
    ([9], [50]),
    ([0, 0, 5, 0, 1, 12, 0], [3, 0, 0, 9, 40, 13, 0]),
    ([i % 3 for i in range(40)], [5 * i % 37 for i in range(40)]),  # more than one block of the interpreter
    ([0] * 20 + [7] + [0] * 20, [1] * 41),  # nothing in a whole block
]


def ragged(qo_lens: list[int], kv_lens: list[int], **changed: list[int]) -> Batch:
    metadata: dict[str, Any] = {"qo_indptr": int32(indptr(qo_lens)), "kv_indptr": int32(indptr(kv_lens))}
    metadata |= {name: int32(values) for name, values in changed.items()}
    names = ("kv_indices", "last_page_len", "block_table", "kv_lens")
    return make_batch(**(dict.fromkeys(names) | metadata))


class Table:
    """Arrays of a table of `max_tiles` row tiles, with some more behind it that must stay as they are."""

    def __init__(self, max_tiles: int, device: torch.device, tile: TileConfig = TILE) -> None:
        self.max_tiles, self.tile = max_tiles, tile
        self.tiles, self.iterations, self.numbers = (
            torch.full(shape, UNTOUCHED, dtype=torch.int32, device=device)
            for shape in ((max_tiles + 40, 8), (max_tiles + 40,), (2,))
        )

    def make(self, batch: Batch, problem: Problem = PROBLEM) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """(tiles, iterations, number of tiles, status)"""
        device, end = self.tiles.device, self.max_tiles
        arrays = (self.tiles[:end], self.iterations[:end], self.numbers[:1], self.numbers[1:])
        launch.launch_tile_table(problem, self.tile, move(batch, device), *arrays)
        assert (self.tiles[end:] == UNTOUCHED).all()
        assert (self.iterations[end:] == UNTOUCHED).all()
        count, status = self.numbers.tolist()
        return self.tiles[:count].cpu(), self.iterations[:end].cpu(), count, status


def assert_same(table: Table, batch: Batch, problem: Problem = PROBLEM) -> None:
    tiles, iterations, count, status = table.make(batch, problem)
    want_tiles, want_iterations = tile_table(problem, table.tile, batch, table.max_tiles)
    assert torch.equal(iterations, want_iterations)
    assert count == int((want_iterations > 0).sum())
    assert torch.equal(tiles, want_tiles[:count])
    assert status == 0


@pytest.mark.parametrize("tile", [TILE, HEAD_MAJOR], ids=["row major", "head major"])
@pytest.mark.parametrize(("causal", "window_left"), [(True, -1), (False, -1), (True, 5)])
def test_same_as_host(device: torch.device, causal: bool, window_left: int, tile: TileConfig) -> None:
    table = Table(120, device, tile)
    problem = replace(PROBLEM, causal=causal, window_left=window_left)
    for qo_lens, kv_lens in BATCHES:  # the same arrays, again and again
        assert_same(table, ragged(qo_lens, kv_lens), problem)


@pytest.mark.parametrize("size", [1, 17])
def test_one_query_token_each_head_by_head(device: torch.device, size: int) -> None:
    batch = replace(ragged([1] * size, [5 * i % 37 for i in range(size)]), qo_indptr=None)
    assert_same(Table(2 * size + 3, device, HEAD_MAJOR), batch)
    wide = replace(PROBLEM, num_qo_heads=60, num_kv_heads=3)  # 20 rows a token and KV head: two tiles
    assert_same(Table(6 * size, device, HEAD_MAJOR), batch, wide)


@pytest.mark.parametrize("size", [0, 1, 17, 40])
def test_one_query_token_each(device: torch.device, size: int) -> None:
    lens = [5 * i % 37 for i in range(size)]
    table = Table(size + 3, device)
    assert_same(table, replace(ragged([1] * size, lens), qo_indptr=None))
    wide = replace(PROBLEM, num_qo_heads=40)  # 20 rows a token: two tiles
    assert_same(Table(2 * size, device), replace(ragged([1] * size, lens), qo_indptr=None), wide)
    if size > 2:
        falling = replace(ragged([1] * size, lens, kv_indptr=[*range(size, -1, -1)]), qo_indptr=None)
        tiles, iterations, count, status = table.make(falling)
        assert (count, status) == (size, Status.BAD_LENGTHS)
        assert (tiles[:, 4] == 0).all(), "a bad request has no keys, but its rows are written"
        assert (iterations[:size] == 1).all()


def test_no_room_at_all(device: torch.device) -> None:
    table = Table(0, device)
    assert table.make(ragged([], []))[2:] == (0, 0)
    assert table.make(ragged([0, 0], [3, 4]))[2:] == (0, 0)
    assert table.make(ragged([0, 1], [3, 4]))[2:] == (0, Status.TILES_OVERFLOW)


@pytest.mark.parametrize("tile", [TILE, HEAD_MAJOR], ids=["row major", "head major"])
@pytest.mark.parametrize("qo_lens", [[40] * 3, [2, 2**30, 3], [2**29, 2**29, 2**29]])
def test_more_tiles_than_the_table_has(device: torch.device, qo_lens: list[int], tile: TileConfig) -> None:
    table = Table(11, device, tile)
    tiles, _, count, status = table.make(ragged(qo_lens, [20] * 3))
    assert (count, status) == (11, Status.TILES_OVERFLOW)
    assert set(tiles[:, 6].tolist()) <= {0, 1, 2}
    assert_same(table, ragged([2, 3], [9, 50]))  # the next batch fits again


def test_bad_lengths_are_empty_requests(device: torch.device) -> None:
    table = Table(30, device)
    tiles, iterations, count, status = table.make(ragged([3, 0, 4], [9, 9, 9], qo_indptr=[0, 3, 1, 5]))
    assert status == Status.BAD_LENGTHS
    assert set(tiles[:, 6].tolist()) == {0, 2}
    assert not iterations[count:].any()
    tiles, _, _, status = table.make(ragged([3, 1, 4], [9, 9, 9], kv_indptr=[0, 9, 4, 13]))
    assert status == Status.BAD_LENGTHS
    assert {int(row[4]) for row in tiles if row[6] == 1} == {0}
    assert_same(table, ragged([3, 0, 4], [9, 9, 9]))


@pytest.mark.gpu
def test_more_requests_than_one_block() -> None:
    generator = torch.Generator().manual_seed(2)
    for size, one_each in product((1000, 1024, 1500, 5000), (True, False)):
        lens = torch.randint(0, 40, (size,), generator=generator).tolist()
        qo_lens = torch.randint(0, 5, (size,), generator=generator).tolist()
        batch = replace(ragged([1] * size, lens), qo_indptr=None) if one_each else ragged(qo_lens, lens)
        for tile in (TILE, HEAD_MAJOR):
            assert_same(Table(4 * size + 10, torch.device("cuda"), tile), batch)

"""Which kernel and tiles a problem gets, what a launch asks of its tensors, and the table of head-major row tiles."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenshare import Variant
from evenshare.attention import launch
from evenshare.attention.metadata import Batch, make_batch
from evenshare.attention.problem import Problem
from evenshare.attention.tiles import (
    FIRST_BLOCK,
    HEAD,
    KV_LEN,
    KV_START,
    Q_START,
    QO_LEN,
    REQUEST,
    ROW_BEGIN,
    TileConfig,
    box_rows,
    choose_tile,
    max_row_tiles,
    portable_twin,
    runs_on_hopper,
    tile_table,
)
from tests.attention.cases import DECODE, PREFILL, Case
from tests.attention.helpers import indptr, int32

HOPPER, OTHERS = (9, 0), [(0, 0), (8, 0), (8, 9), (10, 0)]
BF16 = Problem(32, 8, 128, 128, torch.bfloat16)
HEAD_MAJOR = TileConfig(16, 16, 4, 1, 1, head_major=True)


@pytest.mark.parametrize(("case", "kernel"), [(PREFILL, "hopper_prefill"), (DECODE, "hopper_decode")])
def test_kernels_of_the_test_batches(case: Case, kernel: str) -> None:
    for dims in ((64, 64), (128, 128), (256, 256), (192, 128)):
        problem = Problem(*case.heads, *dims, case.dtype)
        assert choose_tile(problem, sum(case.qo_lens) / len(case.qo_lens), HOPPER).kernel == kernel


@pytest.mark.parametrize("mean_qo_len", [1, 9, 1000])
def test_hopper_kernels_run_on_hopper(mean_qo_len: float) -> None:
    """And only there, for 16-bit rows of whole 16-byte pieces and scales above 0."""
    assert choose_tile(BF16, mean_qo_len, HOPPER).kernel.startswith("hopper")
    for capability in OTHERS:
        assert choose_tile(BF16, mean_qo_len, capability).kernel == "forward"
    assert choose_tile(BF16, mean_qo_len, HOPPER, interpreted=True).kernel == "forward"
    changes: list[dict[str, Any]] = [
        {"dtype": torch.float32}, {"head_dim": 68}, {"head_dim_v": 20}, {"sm_scale": 0.0}, {"sm_scale": -1.0},
        {"variant": Variant()},
    ]  # fmt: skip
    for change in changes:
        problem = replace(BF16, **change)
        assert not runs_on_hopper(problem, HOPPER)
        assert choose_tile(problem, mean_qo_len, HOPPER).kernel == "forward"


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (256, 256), (192, 128), (64, 256)])
def test_prefill_tiles_fit_shared_memory(dims: tuple[int, int]) -> None:
    """Heads in order, 128 rows, and no more than 227 KB of q, K and V, with dims padded to 64, 128 or 256."""
    problem = replace(BF16, head_dim=dims[0], head_dim_v=dims[1])
    tile = choose_tile(problem, 1000, HOPPER)
    assert (tile.kernel, tile.block_m, tile.head_major) == ("hopper_prefill", 128, True)
    padded = [next(size for size in (64, 128, 256) if dim <= size) for dim in dims]
    size = tile.q_buffers * tile.block_m * max(padded) + tile.num_stages * tile.block_n * sum(padded)
    assert 2 * size <= (227 << 10) - 1024


@pytest.mark.parametrize("mean_qo_len", [1, 1000])
def test_the_twin_walks_the_same_tiles(mean_qo_len: float) -> None:
    tile = choose_tile(BF16, mean_qo_len, HOPPER)
    twin = portable_twin(tile)
    assert twin.kernel == "forward"
    same = ("block_m", "block_n", "head_major", "workers_per_sm")
    assert all(getattr(twin, name) == getattr(tile, name) for name in same)


def test_heads_per_row() -> None:
    assert HEAD_MAJOR.heads_per_row(BF16) == 1
    assert replace(HEAD_MAJOR, head_major=False).heads_per_row(BF16) == 8


@pytest.mark.parametrize(
    ("page_size", "block_n", "want"),
    [
        (0, 64, 64),
        (1, 128, 0),
        (8, 64, 0),
        (16, 128, 16),
        (24, 128, 0),
        (48, 64, 0),
        (64, 128, 64),
        (128, 64, 64),
        (256, 128, 128),
    ],
)
def test_rows_of_a_box(page_size: int, block_n: int, want: int) -> None:
    """Boxes divide the page and the block; small pages and those that are no power of two are gathered."""
    assert box_rows(replace(BF16, page_size=page_size), block_n) == want


def test_whole_pieces() -> None:
    """Rows of 8 elements of 16 bits, or 4 of 32, one after the other; and nothing repeated, which TMA does not take."""
    x = torch.zeros(6, 4, 40, dtype=torch.float16)
    whole = [x, x[::2], x[:, 1::2], x[..., :24], x[..., 3:19], x[:1].expand(1, 4, 40), x.transpose(0, 1)]
    broken = [x[..., :36].contiguous(), torch.zeros(6, 4, 41, dtype=torch.float16)[..., :40], x[:1].expand(6, 4, 40)]
    assert [launch.has_whole_pieces(t) for t in whole] == [True] * len(whole)
    assert [launch.has_whole_pieces(t) for t in broken] == [False] * len(broken)
    assert launch.has_whole_pieces(torch.zeros(6, 4, 36))


def test_rows_that_hopper_cannot_copy_run_on_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides decide when a layout is bound, the address at every call."""
    ran: list[str] = []
    for name in ("portable", "hopper"):
        monkeypatch.setattr(
            launch.ForwardLauncher, f"_bind_{name}", lambda *_, name=name: lambda *_: ran.append(name)
        )  # fmt: skip
    tile = choose_tile(BF16, 1000, HOPPER)
    plan: Any = SimpleNamespace(num_workers=1)
    nothing: Any = None
    forward = launch.ForwardLauncher(BF16, tile, plan, torch.zeros(1, 8), nothing, nothing)
    wide = torch.zeros(9, 8, 144, dtype=torch.bfloat16)
    odd = torch.zeros(9, 8, 129, dtype=torch.bfloat16)[..., :128]
    good, shifted = wide[..., 8:136], wide[..., 7:135]
    out = torch.zeros(9, 8, 128)
    for place in range(3):
        tensors = [good, good, good]
        start = forward.bind(*tensors, out, None, (), 0, 1.0)
        for x, kernel in ((good, "hopper"), (shifted, "portable"), (good.clone(), "hopper")):
            tensors[place] = x
            start(*tensors, out)
            assert ran.pop() == kernel
        tensors[place] = odd
        forward.bind(*tensors, out, None, (), 0, 1.0)(*tensors, out)
        assert ran.pop() == "portable"
    assert not ran


def ragged(qo_lens: list[int], kv_lens: list[int]) -> Batch:
    names = ("kv_indices", "last_page_len", "block_table", "kv_lens")
    return make_batch(
        qo_indptr=int32(indptr(qo_lens)), kv_indptr=int32(indptr(kv_lens)), **dict.fromkeys(names)
    )  # fmt: skip


requests = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), max_size=6)
tile_configs = st.builds(
    TileConfig, st.sampled_from([16, 64]), st.sampled_from([16, 32]), st.just(4), st.just(1), st.just(1),
    head_major=st.booleans(),
)  # fmt: skip


@settings(deadline=None)
@given(requests, tile_configs, st.integers(1, 4), st.integers(1, 7), st.booleans(), st.sampled_from([-1, 0, 5, 1000]))
def test_tiles_cover_rows_and_keys_exactly(
    lens: list[tuple[int, int]], tile: TileConfig, num_kv_heads: int, group: int, causal: bool, window_left: int
) -> None:
    """Each packed row of each KV head in one tile; each tile's blocks from the first to the last key that one of its rows sees."""
    qo_lens, kv_lens = [n for n, _ in lens], [m for _, m in lens]
    problem = Problem(
        group * num_kv_heads, num_kv_heads, 64, 64, torch.float16, 0, causal, window_left
    )  # fmt: skip
    capacity = max_row_tiles(problem, tile, len(lens), sum(qo_lens))
    tiles, iterations = (t.tolist() for t in tile_table(problem, tile, ragged(qo_lens, kv_lens), capacity))
    rows: Counter[tuple[int, int, int]] = Counter()
    for row, num_blocks in zip(tiles, iterations, strict=True):
        if num_blocks == 0:
            assert not any(row), "unused rows are zero"
            continue
        r, n, m = row[REQUEST], row[QO_LEN], row[KV_LEN]
        assert (n, m) == lens[r]
        assert (row[Q_START], row[KV_START]) == (sum(qo_lens[:r]), sum(kv_lens[:r]))
        packed = range(row[ROW_BEGIN], min(row[ROW_BEGIN] + tile.block_m, n * group))
        for head in range(row[HEAD], row[HEAD] + tile.heads_per_row(problem)):
            rows.update((r, head, p) for p in packed)
        seen = set()
        for token in {p // group for p in packed}:
            last = m - n + token
            first = max(last - window_left, 0) if window_left >= 0 else 0
            seen.update(key // tile.block_n for key in range(first, min(last + 1, m) if causal else m))
        blocks = range(row[FIRST_BLOCK], row[FIRST_BLOCK] + num_blocks)
        if seen:
            assert blocks == range(min(seen), max(seen) + 1)
        else:
            assert num_blocks == 1, "somebody writes the zeros"
    want = {(r, head, p) for r, n in enumerate(qo_lens) for head in range(num_kv_heads) for p in range(n * group)}
    assert set(rows) == want
    assert set(rows.values()) <= {1}


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(1, 4), st.integers(1, 71), st.booleans())
def test_the_bound_on_row_tiles_holds(qo_lens: list[int], num_kv_heads: int, group: int, head_major: bool) -> None:
    problem = replace(BF16, num_qo_heads=num_kv_heads * group, num_kv_heads=num_kv_heads)
    tile = replace(HEAD_MAJOR, head_major=head_major)
    rows = sum(-(-n * group // tile.block_m) for n in qo_lens)
    used = rows * num_kv_heads // tile.heads_per_row(problem)
    assert used <= max_row_tiles(problem, tile, len(qo_lens), sum(qo_lens))


def test_every_other_head_backwards() -> None:
    """The tiles of a causal request grow; one worker after the other then gets long and short ones."""
    problem = replace(BF16, num_qo_heads=12, num_kv_heads=3, causal=True)
    tiles, iterations = tile_table(problem, HEAD_MAJOR, ragged([9, 2], [64, 40]), 12)
    assert tiles[:, HEAD].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [0, 1, 2]
    assert tiles[:, ROW_BEGIN].tolist() == [0, 16, 32, 32, 16, 0, 0, 16, 32, 0, 0, 0]
    assert iterations.tolist() == [4, 4, 4] * 3 + [3] * 3


def test_a_table_too_small_is_refused() -> None:
    problem = replace(BF16, num_qo_heads=12, num_kv_heads=3)
    with pytest.raises(ValueError, match="got 12 row tiles, want at most the plan's capacity of 11"):
        tile_table(problem, HEAD_MAJOR, ragged([9, 2], [64, 40]), 11)

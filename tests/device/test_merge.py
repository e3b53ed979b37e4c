"""The last-arriver protocol and the merge of a split tile."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from evenshare.device.merge import arrive, merge_split_tile
from evenshare.device.segments import share_begin


@triton.jit
def arrive_all(counter_ptr, last_ptr, num_contributors):  # type: ignore[no-untyped-def]
    is_last = arrive(counter_ptr, num_contributors)
    tl.store(last_ptr + tl.program_id(0), is_last.to(tl.int32))


@triton.jit
def sum_shares(values_ptr, out_ptr, partials_ptr, counters_ptr, iters_per_tile, total, num_workers,
               BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip
    """out[tile] = sum of the rows of values that are the tile's iterations; iterations are dealt in even shares."""
    worker = tl.program_id(0)
    inner = tl.arange(0, BLOCK)
    position = share_begin(worker, total, num_workers)
    share_end = share_begin(worker + 1, total, num_workers)
    while position < share_end:
        tile = position // iters_per_tile
        end = tl.minimum(share_end, (tile + 1) * iters_per_tile)
        complete = end - position == iters_per_tile
        acc = tl.zeros([BLOCK], tl.float32)
        for i in range(position, end):
            acc += tl.load(values_ptr + i * BLOCK + inner)
        if not complete:
            acc, complete = merge_split_tile(acc, partials_ptr, counters_ptr, inner, worker, tile, iters_per_tile,
                                             total, num_workers, BLOCK)  # fmt: skip
        if complete:
            tl.store(out_ptr + tile * BLOCK + inner, acc)
        position = end


@pytest.mark.parametrize("num_contributors", [1, 2, 9])
def test_one_last_arriver_and_the_counter_is_zero_again(num_contributors: int, device: torch.device) -> None:
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    for _ in range(3):
        last = torch.full((num_contributors,), -1, dtype=torch.int32, device=device)
        arrive_all[(num_contributors,)](counter, last, num_contributors)
        assert sorted(last.tolist()) == [0] * (num_contributors - 1) + [1]
        assert counter.item() == 0


@pytest.mark.parametrize(
    ("num_tiles", "iters", "num_workers"), [(1, 12, 5), (3, 4, 7), (5, 3, 4), (4, 3, 2), (1, 6, 6)]
)
def test_sum_of_a_split_tile(num_tiles: int, iters: int, num_workers: int, device: torch.device) -> None:
    total, block = num_tiles * iters, 16
    values = torch.randint(-99, 99, (total, block), device=device).float()  # integers: sums are exact
    partials = torch.full((2 * num_workers, block), float("nan"), device=device)
    counters = torch.zeros(num_tiles, dtype=torch.int32, device=device)
    out = torch.full((num_tiles, block), float("nan"), device=device)
    sum_shares[(num_workers,)](values, out, partials, counters, iters, total, num_workers, BLOCK=block)
    assert torch.equal(out, values.view(num_tiles, iters, block).sum(1))
    assert not counters.any()


def test_partials_are_added_in_tile_order(device: torch.device) -> None:
    """In float32, (1e8 + 1) - 1e8 + 1 = 1; with the last arriver's own partial first, or backwards, it is 0."""
    values = torch.tensor([1e8, 1.0, -1e8, 1.0], device=device)[:, None].repeat(1, 16)
    partials = torch.empty(8, 16, device=device)
    counters = torch.zeros(1, dtype=torch.int32, device=device)
    out = torch.empty(1, 16, device=device)
    sum_shares[(4,)](values, out, partials, counters, 4, 4, 4, BLOCK=16)
    assert (out == 1.0).all()

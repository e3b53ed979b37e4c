"""The closed form of an even share against a walk over all iterations."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl

from evenshare.device.segments import first_contributor, partial_slot, share_begin


@triton.jit
def describe(out_ptr, num_tiles, iters_per_tile, num_workers):  # type: ignore[no-untyped-def]
    """Begin of this worker's share; then per tile its first and last contributor and this worker's slot in it."""
    worker = tl.program_id(0)
    total = num_tiles * iters_per_tile
    row = out_ptr + worker * (1 + 3 * num_tiles)
    tl.store(row, share_begin(worker, total, num_workers))
    tile = 0
    while tile < num_tiles:
        begin = tile * iters_per_tile
        tl.store(row + 1 + 3 * tile, first_contributor(begin, total, num_workers))
        tl.store(row + 2 + 3 * tile, first_contributor(begin + iters_per_tile - 1, total, num_workers))
        tl.store(row + 3 + 3 * tile, partial_slot(worker, begin, total, num_workers))
        tile += 1


def described(num_tiles: int, iters: int, num_workers: int, device: torch.device) -> tuple[list[int], torch.Tensor]:
    out = torch.full((num_workers, 1 + 3 * num_tiles), -1, dtype=torch.int32, device=device)
    describe[(num_workers,)](out, num_tiles, iters, num_workers)
    out = out.cpu()
    return [*out[:, 0].tolist(), num_tiles * iters], out[:, 1:].reshape(num_workers, num_tiles, 3)


@pytest.mark.parametrize(
    ("num_tiles", "iters", "num_workers"),
    [(1, 1, 1), (1, 13, 5), (3, 4, 7), (5, 3, 4), (2, 7, 14), (4, 5, 3), (7, 1, 7)],
)
def test_against_a_walk(num_tiles: int, iters: int, num_workers: int, device: torch.device) -> None:
    begins, table = described(num_tiles, iters, num_workers, device)
    sizes = [end - begin for begin, end in itertools.pairwise(begins)]
    assert begins[0] == 0
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    owner = [worker for worker, size in enumerate(sizes) for _ in range(size)]
    slots_of_partials = []
    for tile in range(num_tiles):
        contributors = sorted(set(owner[tile * iters : (tile + 1) * iters]))
        assert (table[:, tile, 0] == contributors[0]).all()
        assert (table[:, tile, 1] == contributors[-1]).all()
        if len(contributors) > 1:
            slots_of_partials += [table[worker, tile, 2].item() for worker in contributors]
    # No two partials share a slot, and a worker has two.
    assert len(slots_of_partials) == len(set(slots_of_partials))
    assert all(0 <= slot < 2 * num_workers for slot in slots_of_partials)


def test_products_past_31_bits(device: torch.device) -> None:
    """worker * total = 6.4e9."""
    num_tiles, iters, num_workers = 2, 40_000_000, 90
    begins, table = described(num_tiles, iters, num_workers, device)
    assert begins == [worker * num_tiles * iters // num_workers for worker in range(num_workers + 1)]
    assert table[0, 1, 0] == 45
    assert table[0, 1, 1] == 89

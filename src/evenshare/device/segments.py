"""Closed form of an even share over equal tiles, for kernels that need no plan arrays (`schedule.UniformPlan`).

Tiles [0, num_whole) are dealt whole: worker w takes w, w + P, w + 2P, ... The remaining tiles form one range of
T = (num_tiles - num_whole) * iters iterations, of which worker w takes [w*T//P, (w+1)*T//P). 64-bit products: w*T passes 2^31.
"""

import triton
import triton.language as tl


@triton.jit
def share_begin(worker, total, num_workers):
    """First iteration of `worker`'s share of `total` iterations."""
    return (worker.to(tl.int64) * total // num_workers).to(tl.int32)


@triton.jit
def first_contributor(tile_begin, total, num_workers):
    """The worker whose share holds iteration `tile_begin`."""
    return ((tile_begin.to(tl.int64) + 1) * num_workers - 1) // total


@triton.jit
def partial_slot(worker, tile_begin, total, num_workers):
    """Slot of `worker`'s partial of the tile that begins at `tile_begin`: a share has at most two partial segments, its first
    (slot 0, begins at or after the tile's begin) and its last (slot 1)."""
    return worker * 2 + (share_begin(worker, total, num_workers) < tile_begin).to(tl.int32)


@triton.jit
def slot_of_contributor(contributor, first, first_slot):
    """`partial_slot` of a tile's contributor, by that of the first one: the shares of all others begin inside the tile."""
    return tl.where(contributor == first, first_slot, contributor * 2)


@triton.jit
def next_segment(tile, position, share_end, iters_per_tile, num_whole, num_workers):
    """The next segment of a worker that has whole tiles left from `tile` on and the tail's iterations [position, share_end).

    (the segment's tile, its iterations begin and end, its tile's number in the tail, 0 if whole; tile and position after it). One
    loop over both kinds, so that the loop over iterations inside is compiled once.
    """
    begin = 0
    end = iters_per_tile
    split_tile = 0
    if tile < num_whole:
        current = tile
        tile += num_workers
    else:
        split_tile = position // iters_per_tile
        begin = position - split_tile * iters_per_tile
        end = tl.minimum(iters_per_tile, begin + share_end - position)
        current = num_whole + split_tile
        position += end - begin
    return current, begin, end, split_tile, tile, position

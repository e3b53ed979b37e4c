"""Products of groups of rows, each with a matrix of its own: an expert and its tokens, a LoRA adapter and its requests.

Rows lie sorted by group and `offsets`, on the device, says where each group's begin. All tiles have the same k-steps, so what
depends on the offsets is only how many tiles there are and whose they are: every program counts them for itself, and the share of
the even deal (`device.segments`) follows in closed form. The host knows none of it.
"""

import triton
import triton.language as tl


@triton.jit
def row_offset(offsets_ptr, index, m):
    """offsets[index], within the m rows whatever it says."""
    return tl.minimum(tl.maximum(tl.load(offsets_ptr + index), 0), m)


@triton.jit
def tile_ends(offsets_ptr, num_groups, m, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """int32 [GROUPS]: row tiles of each group and all before it. GROUPS: a power of two, num_groups at least."""
    group = tl.arange(0, GROUPS)
    inside = tl.minimum(group, num_groups - 1)
    rows = row_offset(offsets_ptr, inside + 1, m) - row_offset(offsets_ptr, inside, m)
    return tl.cumsum(tl.where(group < num_groups, tl.cdiv(tl.maximum(rows, 0), BLOCK_M), 0), 0)


@triton.jit
def deal(num_tiles, iters_per_tile, min_steps, max_workers):
    """(workers that get something, tiles dealt whole) of the even deal of `schedule.uniform`; a share has min_steps at least."""
    most = tl.maximum(num_tiles, (num_tiles.to(tl.int64) * iters_per_tile // min_steps).to(tl.int32))
    num_workers = tl.maximum(tl.minimum(most, max_workers), 1)
    num_whole = tl.maximum(num_tiles // num_workers - 1, 0) * num_workers
    return num_workers, tl.where(num_tiles % num_workers == 0, num_tiles, num_whole)


@triton.jit
def find_tile(tile, ends, offsets_ptr, m, tiles_n, BLOCK_M: tl.constexpr):
    """(group, first row of the tile, end of the group's rows, column tile) of a tile.

    Tiles of a group are neighbours, and so are those that read the same columns of its matrix."""
    row_tile = tile // tiles_n
    group = tl.sum((ends <= row_tile).to(tl.int32), 0)
    first_tile = tl.max(tl.where(ends <= row_tile, ends, 0), 0)
    row_begin = row_offset(offsets_ptr, group, m)
    row_end = row_offset(offsets_ptr, group + 1, m)
    tiles_m = tl.cdiv(row_end - row_begin, BLOCK_M)
    local = tile - first_tile * tiles_n
    tile_n = local // tiles_m
    return group, row_begin + (local - tile_n * tiles_m) * BLOCK_M, row_end, tile_n


@triton.jit
def store_zeros(
    out_ptr, offsets_ptr, num_groups, m, n, stride_out_m, stride_out_n, worker, num_workers, BLOCK_N: tl.constexpr
):
    """Rows of out that are no group's: before the first one's and behind the last one's, dealt to workers."""
    first = row_offset(offsets_ptr, 0, m)
    last = row_offset(offsets_ptr, num_groups, m)
    columns = tl.arange(0, BLOCK_N)
    for i in range(worker, first + m - last, num_workers):
        row = tl.where(i < first, i, i - first + last).to(tl.int64)
        for begin in range(0, n, BLOCK_N):
            at = begin + columns
            zeros = tl.zeros([BLOCK_N], out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * stride_out_m + at.to(tl.int64) * stride_out_n, zeros, mask=at < n)

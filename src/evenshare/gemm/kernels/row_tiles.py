"""The row tiles of all groups, written down once, for a kernel whose roles would each have to count them."""

import triton
import triton.language as tl

from evenshare.device.groups import row_offset, store_zeros, tile_ends


@triton.jit(do_not_specialize=["m", "num_groups", "first_group", "num_here"])
def row_tiles(offsets_ptr, table_ptr, out_ptr, m, n, stride_out_m, stride_out_n, num_groups, first_group, num_here,
              BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """table int32 [tiles, 4]: group (0 is first_group), first row, end of the group's rows; and in [0, 3] how many tiles there are.

    TILES entries a program; rows of out that are no group's become 0, dealt to all programs."""
    program = tl.program_id(0)
    store_zeros(out_ptr, offsets_ptr, num_groups, m, n, stride_out_m, stride_out_n, program, tl.num_programs(0), 1024)
    offsets_ptr += first_group
    ends = tile_ends(offsets_ptr, num_here, m, BLOCK_M, GROUPS)
    count = tl.max(ends, 0)
    if program == 0:
        tl.store(table_ptr + 3, count)
    tiles = program * TILES + tl.arange(0, TILES)
    before = ends[None, :] <= tiles[:, None]
    group = tl.minimum(tl.sum(before.to(tl.int32), 1), num_here - 1)
    first_tile = tl.max(tl.where(before, ends[None, :], 0), 1)
    row_begin = row_offset(offsets_ptr, group, m) + (tiles - first_tile) * BLOCK_M
    entries = table_ptr + tiles * 4
    tl.store(entries, group, mask=tiles < count)
    tl.store(entries + 1, row_begin, mask=tiles < count)
    tl.store(entries + 2, row_offset(offsets_ptr, group + 1, m), mask=tiles < count)

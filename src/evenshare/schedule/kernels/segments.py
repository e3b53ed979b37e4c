"""What the planning kernels share: a segment's row, and status bits as kernels see them (schedule.plan)."""

import triton
import triton.language as tl

SEGMENT_COLUMNS = tl.constexpr(8)
SEGMENTS_OVERFLOW = tl.constexpr(1)
BAD_LENGTHS = tl.constexpr(4)


@triton.jit
def store_segment(segments_ptr, position, mask, tile, begin, end, slot, slot_begin, num_slots, counter):
    row = segments_ptr + position.to(tl.int64) * SEGMENT_COLUMNS
    tl.store(row, tile, mask=mask)
    tl.store(row + 1, begin, mask=mask)
    tl.store(row + 2, end, mask=mask)
    tl.store(row + 3, slot, mask=mask)
    tl.store(row + 4, slot_begin, mask=mask)
    tl.store(row + 5, num_slots, mask=mask)
    tl.store(row + 6, counter, mask=mask)
    tl.store(row + 7, tl.zeros_like(tile), mask=mask)


@triton.jit
def clear_segments(segments_ptr, first, max_segments, program, num_programs, BLOCK: tl.constexpr):
    """Zero the rows [first, max_segments), dealt to programs in blocks: tables compare equal, whatever was planned before."""
    for start in range(first + program * BLOCK, max_segments, num_programs * BLOCK):
        row = start + tl.arange(0, BLOCK)
        values = row.to(tl.int64)[:, None] * SEGMENT_COLUMNS + tl.arange(0, SEGMENT_COLUMNS)[None, :]
        tl.store(segments_ptr + values, tl.zeros_like(values).to(tl.int32), mask=(row < max_segments)[:, None])

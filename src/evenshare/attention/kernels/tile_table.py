"""The tile table on the device: which rows and keys each row tile has. One launch, no sync; same values as attention.tiles."""

import triton
import triton.language as tl

from evenshare.device.search import count_at_most

BAD_LENGTHS = tl.constexpr(4)
TILES_OVERFLOW = tl.constexpr(2)


@triton.jit
def request_bounds(qo_indptr_ptr, kv_indptr_ptr, kv_lens_ptr, r, mask, table_stride, table_width, num_indices,
                   HAS_QO: tl.constexpr, FORM: tl.constexpr, PAGE_SIZE: tl.constexpr):  # fmt: skip
    """(q_start, qo_len, kv_start, kv_len, bad) of requests r. FORM: 0 ragged, 1 page table by indptr, 2 block table, 3 dense.

    A request with an impossible length is bad and becomes empty: its rows are still written (o = 0)."""
    if HAS_QO:
        q_start = tl.load(qo_indptr_ptr + r, mask=mask, other=0)
        qo_len = tl.load(qo_indptr_ptr + r + 1, mask=mask, other=0) - q_start
    else:
        q_start = r
        qo_len = mask.to(tl.int32)
    if FORM == 2:
        kv_start = r * table_stride
        kv_len = tl.load(kv_lens_ptr + r, mask=mask, other=0)
        bad = kv_len > table_width.to(tl.int64) * PAGE_SIZE
    elif FORM == 3:
        kv_start = r
        kv_len = tl.load(kv_lens_ptr + r, mask=mask, other=0)
        bad = kv_len > table_width
    else:
        kv_start = tl.load(kv_indptr_ptr + r, mask=mask, other=0)
        entries = tl.load(kv_indptr_ptr + r + 1, mask=mask, other=0) - kv_start
        bad = (entries < 0) | (kv_start < 0)
        if FORM == 1:
            last = tl.load(kv_lens_ptr + r, mask=mask, other=0)
            kv_len = tl.where(entries > 0, (entries - 1) * PAGE_SIZE + last, 0)
            bad |= (entries > 0) & ((last < 1) | (last > PAGE_SIZE))
            bad |= kv_start + entries > num_indices
        else:
            kv_len = entries
    bad |= kv_len < 0
    bad_q = (qo_len < 0) | (q_start < 0)
    if FORM == 3:
        q_start = r
    kv_len = tl.where(bad | bad_q, 0, kv_len)
    qo_len = tl.where(bad_q, 0, qo_len)
    q_start = tl.where(bad_q, 0, q_start)
    kv_start = tl.where(bad, 0, kv_start)
    return q_start, qo_len, kv_start, kv_len, (bad | bad_q) & mask


# Sizes of the batch are not specialised on: no compilation for a batch of one, or of a multiple of 16.
@triton.jit(do_not_specialize=["batch", "max_tiles", "table_stride", "table_width", "num_indices", "window_left"])
def tile_table(qo_indptr_ptr, kv_indptr_ptr, kv_lens_ptr, tiles_ptr, iterations_ptr, num_tiles_ptr, status_ptr, batch, max_tiles,
               table_stride, table_width, num_indices, window_left,
               HAS_QO: tl.constexpr, FORM: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
               HAS_WINDOW: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
               REQUEST_BLOCK: tl.constexpr):  # fmt: skip
    """Grid over blocks of tiles: fills tiles [max_tiles, 8] and iterations [max_tiles]; tiles past the last have 0 iterations.
    HEADS: rows of the table for one row tile, of as many KV heads or groups of them.

    Every program sums up all requests' tiles for itself; the first one sets the number of tiles and the plan's status."""
    program = tl.program_id(0)
    t = program * BLOCK + tl.arange(0, BLOCK)
    in_table = t < max_tiles
    bad = tl.zeros([REQUEST_BLOCK], tl.int32)
    # The request r with first_tile[r] <= t < first_tile[r + 1].
    if HAS_QO:
        total = tl.zeros([], tl.int32)
        r = tl.zeros([BLOCK], tl.int32)
        first_tile = tl.zeros([BLOCK], tl.int32)
        for start in range(0, batch, REQUEST_BLOCK):
            request = start + tl.arange(0, REQUEST_BLOCK)
            there = request < batch
            _, qo_len, _, _, is_bad = request_bounds(qo_indptr_ptr, kv_indptr_ptr, kv_lens_ptr, request, there,
                                                     table_stride, table_width, num_indices, HAS_QO, FORM, PAGE_SIZE)  # fmt: skip
            bad |= is_bad.to(tl.int32)
            count = (qo_len.to(tl.int64) * GROUP + BLOCK_M - 1) // BLOCK_M * HEADS
            count = tl.where(there, tl.minimum(count, max_tiles + 1), 0).to(tl.int32)  # more need not be told apart
            ends = total + tl.cumsum(count, 0)
            position = count_at_most(ends, t, REQUEST_BLOCK)
            here = t >= total  # and if it lies behind these requests as well, a later step overwrites it
            r = tl.where(here, start + position, r)
            first_tile = tl.where(here, tl.gather(ends - count, position, 0), first_tile)
            total += tl.sum(count, 0)
    else:
        TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M * HEADS
        total = batch * TILES
        r = t // TILES
        first_tile = r * TILES
        if program == 0:
            for start in range(0, batch, REQUEST_BLOCK):
                request = start + tl.arange(0, REQUEST_BLOCK)
                _, _, _, _, is_bad = request_bounds(qo_indptr_ptr, kv_indptr_ptr, kv_lens_ptr, request, request < batch,
                                                    table_stride, table_width, num_indices, HAS_QO, FORM, PAGE_SIZE)  # fmt: skip
                bad |= is_bad.to(tl.int32)
    if program == 0:
        tl.store(num_tiles_ptr, tl.minimum(total, max_tiles))
        tl.store(status_ptr, tl.max(bad, 0) * BAD_LENGTHS | (total > max_tiles).to(tl.int32) * TILES_OVERFLOW)
    mask = in_table & (t < total)
    q_start, qo_len, kv_start, kv_len, _ = request_bounds(qo_indptr_ptr, kv_indptr_ptr, kv_lens_ptr, r, mask,
                                                          table_stride, table_width, num_indices, HAS_QO, FORM, PAGE_SIZE)  # fmt: skip
    # Every other head backwards: see attention.tiles.
    row_tiles = tl.maximum((qo_len * GROUP + BLOCK_M - 1) // BLOCK_M, 1)
    head = (t - first_tile) // row_tiles
    row_tile = t - first_tile - head * row_tiles
    row_begin = tl.where(head % 2 == 1, row_tiles - 1 - row_tile, row_tile) * BLOCK_M
    first_q = row_begin // GROUP
    last_q = tl.minimum((row_begin + BLOCK_M - 1) // GROUP, qo_len - 1)
    begin = tl.zeros([BLOCK], tl.int32)
    end = kv_len
    if CAUSAL:
        end = tl.maximum(tl.minimum(end, kv_len - qo_len + last_q + 1), 0)
    if HAS_WINDOW:
        begin = tl.minimum(tl.maximum(kv_len - qo_len + first_q - window_left, 0), end)
    first_block = begin // BLOCK_N
    blocks = (end + BLOCK_N - 1) // BLOCK_N - first_block
    # A tile without keys still gets one iteration: somebody has to write its zeros.
    tl.store(iterations_ptr + t, tl.where(mask, tl.maximum(blocks, 1), 0), mask=in_table)
    row = tiles_ptr + t.to(tl.int64) * 8
    tl.store(row, q_start, mask=mask)
    tl.store(row + 1, qo_len, mask=mask)
    tl.store(row + 2, row_begin, mask=mask)
    tl.store(row + 3, kv_start, mask=mask)
    tl.store(row + 4, kv_len, mask=mask)
    tl.store(row + 5, first_block, mask=mask)
    tl.store(row + 6, r, mask=mask)
    tl.store(row + 7, head, mask=mask)

"""The tile table on the device: which rows and keys each row tile has. Two launches, no sync; same values as attention.tiles."""

import triton
import triton.language as tl

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
@triton.jit(do_not_specialize=["batch", "max_tiles", "table_stride", "table_width", "num_indices"])
def tile_offsets(qo_indptr_ptr, kv_indptr_ptr, kv_lens_ptr, offsets_ptr, status_ptr, batch, max_tiles,
                 table_stride, table_width, num_indices, HAS_QO: tl.constexpr, FORM: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program: offsets [batch + 1] = exclusive prefix sum of the requests' numbers of row tiles. Sets the plan's status."""
    index = tl.arange(0, BLOCK)
    total = tl.zeros([], tl.int32)
    status = tl.zeros([], tl.int32)
    tl.store(offsets_ptr, 0)
    for start in range(0, batch, BLOCK):
        r = start + index
        mask = r < batch
        _, qo_len, _, _, bad = request_bounds(qo_indptr_ptr, kv_indptr_ptr, kv_lens_ptr, r, mask,
                                              table_stride, table_width, num_indices, HAS_QO, FORM, PAGE_SIZE)  # fmt: skip
        tiles = tl.where(mask, (qo_len * GROUP + BLOCK_M - 1) // BLOCK_M, 0)
        inclusive = tl.cumsum(tiles, 0)
        tl.store(offsets_ptr + 1 + r, total + inclusive, mask=mask)
        total += tl.sum(tiles, 0)
        status |= tl.max(bad.to(tl.int32), 0) * BAD_LENGTHS
    status |= (total > max_tiles).to(tl.int32) * TILES_OVERFLOW
    tl.store(status_ptr, status)


@triton.jit(do_not_specialize=["batch", "max_tiles", "table_stride", "table_width", "num_indices", "window_left"])
def tile_table(qo_indptr_ptr, kv_indptr_ptr, kv_lens_ptr, offsets_ptr, tiles_ptr, iterations_ptr, batch, max_tiles, table_stride,
               table_width, num_indices, window_left,
               HAS_QO: tl.constexpr, FORM: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
               HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Grid over blocks of tiles: fills tiles [max_tiles, 8] and iterations [max_tiles]; tiles past the last have 0 iterations."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_table = t < max_tiles
    num_tiles = tl.load(offsets_ptr + batch)
    mask = in_table & (t < num_tiles)
    # Binary search for the request r with offsets[r] <= t < offsets[r + 1].
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + batch
    span = batch
    while span > 0:
        middle = (low + high) // 2
        right = tl.load(offsets_ptr + 1 + middle, mask=mask & (middle < batch), other=0) <= t
        open_ = low < high
        low = tl.where(open_ & right, middle + 1, low)
        high = tl.where(open_ & (right == 0), middle, high)
        span = span // 2
    r = tl.minimum(low, batch - 1)
    q_start, qo_len, kv_start, kv_len, _ = request_bounds(qo_indptr_ptr, kv_indptr_ptr, kv_lens_ptr, r, mask,
                                                          table_stride, table_width, num_indices, HAS_QO, FORM, PAGE_SIZE)  # fmt: skip
    row_begin = (t - tl.load(offsets_ptr + r, mask=mask, other=0)) * BLOCK_M
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
    tl.store(row + 7, 0, mask=mask)

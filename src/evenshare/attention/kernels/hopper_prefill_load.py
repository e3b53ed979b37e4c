"""The producer of `hopper_prefill`: it brings K and V blocks and, ahead of them, the next tile's q rows and numbers.

By TMA in boxes; by cp.async row by row (gathering); or, of fp8 codes, by cp.async to a buffer of one block, from which they are widened.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from evenshare.attention.kernels.hopper_common import (
    PANEL,
    SEGMENT_COLUMNS,
    TILE_COLUMNS,
    key_rows,
    load_tile,
    load_tile_id,
    pieces,
    readable_len,
    row_index,
    valid_rows,
)
from evenshare.device.gluon import barrier, next_stage

ROWS = gl.constexpr(64)  # of one consumer: the M of wgmma
FLAGS = gl.constexpr(8)  # segments that the producer may be ahead, and more
# What the consumers are told of a segment: its row of the plan, then its tile's row of the table, but the KV head of q for the last.
NUMBERS = gl.constexpr(16)


@gluon.jit
def _announce(queries, segments_ptr, tiles_ptr, number, segment, tile, heads_per_row, kv_head, q_start, qo_len, row_begin,
              GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, DENSE: gl.constexpr,
              Q_BOX: gl.constexpr, Q_BUFFERS: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Tell the consumers of the worker's segment `number` and bring its q, as soon as the buffer is free."""
    (q, q_panels, q_bufs, q_full, q_empty, numbers, num_q_starts, num_q_tokens,
     stride_start, stride_token, stride_head) = queries  # fmt: skip
    columns: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    column = gl.arange(0, NUMBERS, layout=columns)
    row = gl.load(
        segments_ptr + segment.to(gl.int64) * SEGMENT_COLUMNS + column, mask=column < SEGMENT_COLUMNS, other=0
    )
    info = tiles_ptr + (tile // heads_per_row).to(gl.int64) * TILE_COLUMNS
    info = gl.load(info + (column - SEGMENT_COLUMNS), mask=column >= SEGMENT_COLUMNS, other=0)
    row = gl.where(column < SEGMENT_COLUMNS, row, gl.where(column == NUMBERS - 1, kv_head, info))
    parity = number % Q_BUFFERS
    mbarrier.wait(q_empty.index(parity), (number // Q_BUFFERS & 1) ^ 1)
    numbers.index(number % FLAGS).store(row)
    STEP: gl.constexpr = q_bufs.shape[0] // (2 * Q_BUFFERS)  # buffers are as wide as the wider of q and out
    if Q_BOX > 0:
        barrier()
        PANELS: gl.constexpr = q_panels.shape[0] // (2 * Q_BUFFERS)
        mbarrier.expect(q_full.index(parity), 2 * ROWS * BLOCK_D * (q.dtype.primitive_bitwidth // 8))
        for half in gl.static_range(2):
            token = (row_begin + half * ROWS) // GROUP
            for c in gl.static_range(BLOCK_D // PANEL):
                panel = q_panels.index((2 * parity + half) * PANELS + c)
                if DENSE:
                    tma.async_copy_global_to_shared(
                        q, [q_start, token, kv_head, 0, c * PANEL], q_full.index(parity), panel
                    )
                else:
                    tma.async_copy_global_to_shared(
                        q, [q_start + token, kv_head, 0, c * PANEL], q_full.index(parity), panel
                    )
    else:
        CHUNK: gl.constexpr = 16
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [WARPS, 1], [1, 0])
        d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
        head_ptr = (
            q + q_start.to(gl.int64) * pieces(stride_start) + kv_head.to(gl.int64) * (GROUP * pieces(stride_head))
        )
        for half in range(2):
            half_buf = q_bufs.index((2 * parity + half) * STEP)
            for chunk in gl.static_range(ROWS // CHUNK):
                rows = half * ROWS + chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))
                token, head = row_index(row_begin, rows, GROUP)
                valid = valid_rows(token, q_start, qo_len, num_q_starts, num_q_tokens, DENSE)
                offsets = token.to(gl.int64) * pieces(stride_token) + head.to(gl.int64) * pieces(stride_head)
                pointers = head_ptr + offsets.expand_dims(1) + d.expand_dims(0)
                mask = valid.expand_dims(1) & (d < HEAD_DIM).expand_dims(0)
                buffer = half_buf.slice(chunk * CHUNK, CHUNK, 0)
                if q.dtype.element_ty == q_bufs.dtype:
                    async_copy.async_copy_global_to_shared(buffer, pointers, mask=mask)
                else:
                    buffer.store(gl.load(pointers, mask=mask, other=0.0).to(q_bufs.dtype))
        if q.dtype.element_ty == q_bufs.dtype:
            async_copy.mbarrier_arrive(q_full.index(parity), increment_count=False)
        else:  # plain stores, which an arrival by cp.async does not wait for
            fence_async_shared()
            barrier()
            mbarrier.arrive(q_full.index(parity), count=32 * WARPS)


@gluon.jit
def _produce_tma(queries, k_desc, v_desc, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr, heads_per_row, num_pages, num_indices,
                 k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, flags,
                 GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, DENSE: gl.constexpr,
                 BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BOX: gl.constexpr, PANELS: gl.constexpr, PANELS_V: gl.constexpr,
                 STAGES: gl.constexpr, Q_BOX: gl.constexpr, Q_BUFFERS: gl.constexpr):  # fmt: skip
    """One warp: a K and a V block per iteration, BLOCK_N // BOX boxes a panel of 64 dims."""
    element_bytes: gl.constexpr = k_desc.dtype.primitive_bitwidth // 8
    worker = gl.program_id(0)
    stage = 0
    phase = 1
    segment_begin = gl.load(worker_indptr_ptr + worker)
    segment_end = gl.load(worker_indptr_ptr + worker + 1)
    tile = load_tile_id(segments_ptr, segment_begin, segment_end)
    if Q_BUFFERS == 2:
        if segment_begin < segment_end:
            kv_head, q_start, qo_len, row_begin, _s, _n, _e, _b = load_tile(
                segments_ptr, tiles_ptr, segment_begin, tile, heads_per_row
            )
            _announce(queries, segments_ptr, tiles_ptr, 0, segment_begin, tile, heads_per_row, kv_head, q_start, qo_len, row_begin,
                      GROUP, HEAD_DIM, BLOCK_D, DENSE, Q_BOX, Q_BUFFERS, 1)  # fmt: skip
    for segment in range(segment_begin, segment_end):
        kv_head, q_start, qo_len, row_begin, kv_start, kv_len, end, num_blocks = load_tile(
            segments_ptr, tiles_ptr, segment, tile, heads_per_row
        )
        this_tile = tile
        tile = load_tile_id(segments_ptr, segment + 1, segment_end)
        readable = readable_len(kv_start, kv_len, num_pages, num_indices, PAGE_SIZE, DENSE)
        bad = (readable < kv_len).to(gl.int32)
        for i in range(num_blocks):
            key = (end - 1 - i) * BLOCK_N
            # The page ids of the block, before the wait for a free buffer.
            if PAGE_SIZE > 0:
                ids = ()
                for b in gl.static_range(BLOCK_N // BOX):
                    n = key + b * BOX
                    page = gl.load(kv_indices_ptr + kv_start + n // PAGE_SIZE, mask=n < readable, other=0)
                    bad |= ((page < 0) | (page >= num_pages)).to(gl.int32)
                    ids = ids + (page,)
            mbarrier.wait(k_empty.index(stage), phase)
            if i == num_blocks - 1:
                layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
                flags.index((segment - segment_begin) % FLAGS).store(gl.full([1], bad, gl.int32, layout))
            mbarrier.expect(k_full.index(stage), BLOCK_N * PANELS * PANEL * element_bytes)
            for b in gl.static_range(BLOCK_N // BOX):
                if PAGE_SIZE > 0:
                    page = ids[b]
                    token = (key + b * BOX) % PAGE_SIZE
                elif DENSE:
                    page = kv_start
                    token = key + b * BOX
                else:
                    page = 0
                    token = kv_start + key + b * BOX
                for c in gl.static_range(PANELS):
                    box = k_bufs.index(stage * PANELS + c).slice(b * BOX, BOX, 0)
                    tma.async_copy_global_to_shared(k_desc, [page, kv_head, token, c * PANEL], k_full.index(stage), box)
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), BLOCK_N * PANELS_V * PANEL * element_bytes)
            for b in gl.static_range(BLOCK_N // BOX):
                if PAGE_SIZE > 0:
                    page = ids[b]
                    token = (key + b * BOX) % PAGE_SIZE
                elif DENSE:
                    page = kv_start
                    token = key + b * BOX
                else:
                    page = 0
                    token = kv_start + key + b * BOX
                for c in gl.static_range(PANELS_V):
                    box = v_bufs.index(stage * PANELS_V + c).slice(b * BOX, BOX, 0)
                    tma.async_copy_global_to_shared(v_desc, [page, kv_head, token, c * PANEL], v_full.index(stage), box)
            number = segment - segment_begin
            if Q_BUFFERS == 1:
                if i == 0:
                    _announce(queries, segments_ptr, tiles_ptr, number, segment, this_tile, heads_per_row, kv_head, q_start, qo_len,
                              row_begin, GROUP, HEAD_DIM, BLOCK_D, DENSE, Q_BOX, Q_BUFFERS, 1)  # fmt: skip
            else:
                # Two blocks of this segment are on their way; the buffer is free when the segment before is written.
                if (i == gl.minimum(1, num_blocks - 1)) & (segment + 1 < segment_end):
                    next_head, next_start, next_len, next_row, _s, _n, _e, _b = load_tile(
                        segments_ptr, tiles_ptr, segment + 1, tile, heads_per_row
                    )
                    _announce(queries, segments_ptr, tiles_ptr, number + 1, segment + 1, tile, heads_per_row, next_head, next_start,
                              next_len, next_row, GROUP, HEAD_DIM, BLOCK_D, DENSE, Q_BOX, Q_BUFFERS, 1)  # fmt: skip
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _report(bad, flag):
    """Whether a key is bad, to the consumers: what each warp knows, since putting it together would take barriers."""
    flag.store(gl.max(gl.reshape(bad, [bad.shape[0] // 32, 32]), 1))


@gluon.jit
def _page_ids(kv_indices_ptr, n, kv_start, readable, num_pages, PAGE_SIZE: gl.constexpr):
    """The pages of keys n of a request, -1 for what may not be read."""
    page = gl.load(kv_indices_ptr + kv_start + n // PAGE_SIZE, mask=n < readable, other=-1)
    return gl.where(page < num_pages, gl.maximum(page, -1), -1)


@gluon.jit
def _chunk_pages(pages, chunk: gl.constexpr, n, PAGE_SIZE: gl.constexpr):
    """The pages of the keys n, chunk number `chunk` of a block whose pages are in shared memory; without pages n."""
    CHUNK: gl.constexpr = n.shape[0]
    page = n
    if PAGE_SIZE > 0:
        page = pages.slice(chunk * CHUNK, CHUNK, 0).load(n.type.layout)
    return page


@gluon.jit
def _gather_rows(bufs, stage, bar, ptr, rows, valid, DIM: gl.constexpr, BLOCK_D: gl.constexpr, CHUNK: gl.constexpr, chunk: gl.constexpr,
                 layout: gl.constexpr):  # fmt: skip
    """CHUNK rows of a block by cp.async, 16 bytes a copy; rows that are not valid and dims past DIM become zero."""
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
    pointers = ptr + rows.expand_dims(1) + d.expand_dims(0)
    mask = valid.expand_dims(1) & (d < DIM).expand_dims(0)
    async_copy.async_copy_global_to_shared(bufs.index(stage).slice(chunk * CHUNK, CHUNK, 0), pointers, mask=mask)


@gluon.jit
def _produce_gather(queries, k_ptr, v_ptr, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr, heads_per_row, num_pages, num_indices,
                    stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
                    pages, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, flags,
                    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, PAGE_SIZE: gl.constexpr, DENSE: gl.constexpr,
                    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
                    STAGES: gl.constexpr, Q_BOX: gl.constexpr, Q_BUFFERS: gl.constexpr):  # fmt: skip
    """Four warps: the rows of each block one by one, wherever their pages are.

    Page ids are on their way while the block before is copied, one a thread, and get to the threads that copy through `pages`."""
    CHUNK: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    layout_v: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_DV, BLOCK_DV // 8], [4, 1], [1, 0])
    index: gl.constexpr = gl.SliceLayout(1, layout)
    index_v: gl.constexpr = gl.SliceLayout(1, layout_v)
    by_key: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = gl.arange(0, BLOCK_N, layout=by_key)
    worker = gl.program_id(0)
    stage = 0
    phase = 1
    segment_begin = gl.load(worker_indptr_ptr + worker)
    segment_end = gl.load(worker_indptr_ptr + worker + 1)
    tile = load_tile_id(segments_ptr, segment_begin, segment_end)
    if Q_BUFFERS == 2:
        if segment_begin < segment_end:
            kv_head, q_start, qo_len, row_begin, _s, _n, _e, _b = load_tile(
                segments_ptr, tiles_ptr, segment_begin, tile, heads_per_row
            )
            _announce(queries, segments_ptr, tiles_ptr, 0, segment_begin, tile, heads_per_row, kv_head, q_start, qo_len, row_begin,
                      GROUP, HEAD_DIM, BLOCK_D, DENSE, Q_BOX, Q_BUFFERS, 4)  # fmt: skip
    for segment in range(segment_begin, segment_end):
        kv_head, q_start, qo_len, row_begin, kv_start, kv_len, end, num_blocks = load_tile(
            segments_ptr, tiles_ptr, segment, tile, heads_per_row
        )
        this_tile = tile
        tile = load_tile_id(segments_ptr, segment + 1, segment_end)
        readable = readable_len(kv_start, kv_len, num_pages, num_indices, PAGE_SIZE, DENSE)
        k_head = kv_head.to(gl.int64) * pieces(stride_k_head)
        v_head = kv_head.to(gl.int64) * pieces(stride_v_head)
        bad = gl.full([BLOCK_N], 0, gl.int32, by_key) | (readable < kv_len).to(gl.int32)
        if PAGE_SIZE > 0:
            ids = _page_ids(kv_indices_ptr, (end - 1) * BLOCK_N + place, kv_start, readable, num_pages, PAGE_SIZE)
        for i in range(num_blocks):
            key = (end - 1 - i) * BLOCK_N
            block_pages = pages.index(i % 2)
            if PAGE_SIZE > 0:
                bad |= ((key + place < kv_len) & (ids < 0)).to(gl.int32)
                block_pages.store(ids)
                if i + 1 < num_blocks:
                    ids = _page_ids(kv_indices_ptr, key - BLOCK_N + place, kv_start, readable, num_pages, PAGE_SIZE)
            mbarrier.wait(k_empty.index(stage), phase)
            for chunk in gl.static_range(BLOCK_N // CHUNK):
                n = key + chunk * CHUNK + gl.arange(0, CHUNK, layout=index)
                page = _chunk_pages(block_pages, chunk, n, PAGE_SIZE)
                rows, valid = key_rows(page, n, kv_start, readable, pieces(stride_k_page), pieces(stride_k_token),
                                        PAGE_SIZE, DENSE)  # fmt: skip
                _gather_rows(
                    k_bufs, stage, k_full, k_ptr + k_head, rows, valid, HEAD_DIM, BLOCK_D, CHUNK, chunk, layout
                )
            if i == num_blocks - 1:
                _report(bad, flags.index((segment - segment_begin) % FLAGS))
            async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
            mbarrier.wait(v_empty.index(stage), phase)
            for chunk in gl.static_range(BLOCK_N // CHUNK):
                n = key + chunk * CHUNK + gl.arange(0, CHUNK, layout=index_v)
                page = _chunk_pages(block_pages, chunk, n, PAGE_SIZE)
                rows, valid = key_rows(page, n, kv_start, readable, pieces(stride_v_page), pieces(stride_v_token),
                                        PAGE_SIZE, DENSE)  # fmt: skip
                _gather_rows(
                    v_bufs, stage, v_full, v_ptr + v_head, rows, valid, HEAD_DIM_V, BLOCK_DV, CHUNK, chunk, layout_v
                )
            async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
            number = segment - segment_begin
            if Q_BUFFERS == 1:
                if i == 0:
                    _announce(queries, segments_ptr, tiles_ptr, number, segment, this_tile, heads_per_row, kv_head, q_start, qo_len,
                              row_begin, GROUP, HEAD_DIM, BLOCK_D, DENSE, Q_BOX, Q_BUFFERS, 4)  # fmt: skip
            else:
                # Two blocks of this segment are on their way; the buffer is free when the segment before is written.
                if (i == gl.minimum(1, num_blocks - 1)) & (segment + 1 < segment_end):
                    next_head, next_start, next_len, next_row, _s, _n, _e, _b = load_tile(
                        segments_ptr, tiles_ptr, segment + 1, tile, heads_per_row
                    )
                    _announce(queries, segments_ptr, tiles_ptr, number + 1, segment + 1, tile, heads_per_row, next_head, next_start,
                              next_len, next_row, GROUP, HEAD_DIM, BLOCK_D, DENSE, Q_BOX, Q_BUFFERS, 4)  # fmt: skip
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _copy_codes(raw, ptr, pages, key, kv_start, readable, stride_page, stride_token, DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
                DENSE: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """A block of fp8 by cp.async: each thread copies what it will widen."""
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
    CHUNK: gl.constexpr = 2048 // raw.shape[1]
    d = gl.arange(0, raw.shape[1], layout=gl.SliceLayout(0, layout))
    for chunk in gl.static_range(raw.shape[0] // CHUNK):
        n = key + chunk * CHUNK + gl.arange(0, CHUNK, layout=rows_layout)
        page = _chunk_pages(pages, chunk, n, PAGE_SIZE)
        rows, valid = key_rows(page, n, kv_start, readable, pieces(stride_page, 16), pieces(stride_token, 16),
                                PAGE_SIZE, DENSE)  # fmt: skip
        mask = valid.expand_dims(1) & (d < DIM).expand_dims(0)
        pointers = ptr + rows.expand_dims(1) + d.expand_dims(0)
        async_copy.async_copy_global_to_shared(raw.slice(chunk * CHUNK, CHUNK, 0), pointers, mask=mask)


@gluon.jit
def _widen_codes(raw, buf, bar, layout: gl.constexpr):
    CHUNK: gl.constexpr = 2048 // raw.shape[1]
    for chunk in gl.static_range(raw.shape[0] // CHUNK):
        codes = raw.slice(chunk * CHUNK, CHUNK, 0).load(layout)
        buf.slice(chunk * CHUNK, CHUNK, 0).store(codes.to(buf.dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _produce_fp8(queries, k_ptr, v_ptr, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr, heads_per_row, num_pages, num_indices,
                 stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
                 pages, k_raw, v_raw, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, flags,
                 GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, PAGE_SIZE: gl.constexpr, DENSE: gl.constexpr,
                 BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
                    STAGES: gl.constexpr, Q_BOX: gl.constexpr, Q_BUFFERS: gl.constexpr):  # fmt: skip
    """Four warps: the rows of each block one by one, wherever they are; the next block of K comes while one of V is widened."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    layout_v: gl.constexpr = gl.BlockedLayout([1, 16], [512 // BLOCK_DV, BLOCK_DV // 16], [4, 1], [1, 0])
    by_key: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = gl.arange(0, BLOCK_N, layout=by_key)
    worker = gl.program_id(0)
    stage = 0
    phase = 1
    segment_begin = gl.load(worker_indptr_ptr + worker)
    segment_end = gl.load(worker_indptr_ptr + worker + 1)
    tile = load_tile_id(segments_ptr, segment_begin, segment_end)
    if Q_BUFFERS == 2:
        if segment_begin < segment_end:
            kv_head, q_start, qo_len, row_begin, _s, _n, _e, _b = load_tile(
                segments_ptr, tiles_ptr, segment_begin, tile, heads_per_row
            )
            _announce(queries, segments_ptr, tiles_ptr, 0, segment_begin, tile, heads_per_row, kv_head, q_start, qo_len, row_begin,
                      GROUP, HEAD_DIM, BLOCK_D, DENSE, Q_BOX, Q_BUFFERS, 4)  # fmt: skip
    for segment in range(segment_begin, segment_end):
        kv_head, q_start, qo_len, row_begin, kv_start, kv_len, end, num_blocks = load_tile(
            segments_ptr, tiles_ptr, segment, tile, heads_per_row
        )
        this_tile = tile
        tile = load_tile_id(segments_ptr, segment + 1, segment_end)
        readable = readable_len(kv_start, kv_len, num_pages, num_indices, PAGE_SIZE, DENSE)
        k_head = k_ptr + kv_head.to(gl.int64) * pieces(stride_k_head, 16)
        v_head = v_ptr + kv_head.to(gl.int64) * pieces(stride_v_head, 16)
        key = (end - 1) * BLOCK_N
        bad = gl.full([BLOCK_N], 0, gl.int32, by_key) | (readable < kv_len).to(gl.int32)
        if PAGE_SIZE > 0:
            ids = _page_ids(kv_indices_ptr, key + place, kv_start, readable, num_pages, PAGE_SIZE)
            bad |= ((key + place < kv_len) & (ids < 0)).to(gl.int32)
            pages.index(0).store(ids)
            if num_blocks > 1:
                ids = _page_ids(kv_indices_ptr, key - BLOCK_N + place, kv_start, readable, num_pages, PAGE_SIZE)
        _copy_codes(k_raw, k_head, pages.index(0), key, kv_start, readable, stride_k_page, stride_k_token,
                    HEAD_DIM, PAGE_SIZE, DENSE, layout)  # fmt: skip
        async_copy.commit_group()
        _copy_codes(v_raw, v_head, pages.index(0), key, kv_start, readable, stride_v_page, stride_v_token,
                    HEAD_DIM_V, PAGE_SIZE, DENSE, layout_v)  # fmt: skip
        async_copy.commit_group()
        for i in range(num_blocks):
            key -= BLOCK_N
            next_pages = pages.index((i + 1) % 2)
            async_copy.wait_group(1)
            mbarrier.wait(k_empty.index(stage), phase)
            if i == num_blocks - 1:
                _report(bad, flags.index((segment - segment_begin) % FLAGS))
            _widen_codes(k_raw, k_bufs.index(stage), k_full.index(stage), layout)
            if i + 1 < num_blocks:
                if PAGE_SIZE > 0:
                    bad |= ((key + place < kv_len) & (ids < 0)).to(gl.int32)
                    next_pages.store(ids)
                    if i + 2 < num_blocks:
                        ids = _page_ids(kv_indices_ptr, key - BLOCK_N + place, kv_start, readable, num_pages, PAGE_SIZE)
                _copy_codes(k_raw, k_head, next_pages, key, kv_start, readable, stride_k_page, stride_k_token,
                            HEAD_DIM, PAGE_SIZE, DENSE, layout)  # fmt: skip
            async_copy.commit_group()
            async_copy.wait_group(1)
            mbarrier.wait(v_empty.index(stage), phase)
            _widen_codes(v_raw, v_bufs.index(stage), v_full.index(stage), layout_v)
            if i + 1 < num_blocks:
                _copy_codes(v_raw, v_head, next_pages, key, kv_start, readable, stride_v_page, stride_v_token,
                            HEAD_DIM_V, PAGE_SIZE, DENSE, layout_v)  # fmt: skip
            async_copy.commit_group()
            number = segment - segment_begin
            if Q_BUFFERS == 1:
                if i == 0:
                    _announce(queries, segments_ptr, tiles_ptr, number, segment, this_tile, heads_per_row, kv_head, q_start, qo_len,
                              row_begin, GROUP, HEAD_DIM, BLOCK_D, DENSE, Q_BOX, Q_BUFFERS, 4)  # fmt: skip
            else:
                # Two blocks of this segment are on their way; the buffer is free when the segment before is written.
                if (i == gl.minimum(1, num_blocks - 1)) & (segment + 1 < segment_end):
                    next_head, next_start, next_len, next_row, _s, _n, _e, _b = load_tile(
                        segments_ptr, tiles_ptr, segment + 1, tile, heads_per_row
                    )
                    _announce(queries, segments_ptr, tiles_ptr, number + 1, segment + 1, tile, heads_per_row, next_head, next_start,
                              next_len, next_row, GROUP, HEAD_DIM, BLOCK_D, DENSE, Q_BOX, Q_BUFFERS, 4)  # fmt: skip
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def produce(q, k, v, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
             heads_per_row, num_q_starts, num_q_tokens, num_pages, num_indices, stride_q_start, stride_q_token, stride_q_head,
             stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
             q_panels, q_bufs, q_full, q_empty, numbers,
             pages, k_raw, v_raw, k_panels, v_panels, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, flags,
             GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, PAGE_SIZE: gl.constexpr, DENSE: gl.constexpr,
             GATHER: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BOX: gl.constexpr,
             STAGES: gl.constexpr, Q_BOX: gl.constexpr, Q_BUFFERS: gl.constexpr):  # fmt: skip
    queries = (q, q_panels, q_bufs, q_full, q_empty, numbers, num_q_starts, num_q_tokens,
               stride_q_start, stride_q_token, stride_q_head)  # fmt: skip
    if k_raw.dtype != k_bufs.dtype:
        _produce_fp8(queries, k, v, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr, heads_per_row, num_pages,
                     num_indices, stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
                     pages, k_raw, v_raw, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, flags,
                     GROUP, HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, DENSE, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, Q_BOX, Q_BUFFERS)  # fmt: skip
    elif GATHER:
        _produce_gather(queries, k, v, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr, heads_per_row, num_pages,
                        num_indices, stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
                        pages, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, flags,
                        GROUP, HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, DENSE, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, Q_BOX, Q_BUFFERS)  # fmt: skip
    else:
        _produce_tma(queries, k, v, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr, heads_per_row, num_pages,
                     num_indices, k_panels, v_panels, k_full, k_empty, v_full, v_empty, flags,
                     GROUP, HEAD_DIM, PAGE_SIZE, DENSE, BLOCK_N, BLOCK_D, BOX, BLOCK_D // PANEL, BLOCK_DV // PANEL,
                     STAGES, Q_BOX, Q_BUFFERS)  # fmt: skip

"""Attention forward for Hopper (sm_90) with few query rows a request: one persistent worker a SM reads keys as fast as memory gives.

Keys and queries change places: S^T = K Q^T and O^T = V^T P^T. Then the keys are the M of wgmma, the query rows its N, which may be as
small as 8, and K and V go from shared memory to the tensor cores without a register in between. A producer streams K and V blocks into
a ring of STAGES buffers, over the borders of segments; four warps consume. They are busy for a third of the time that memory takes to
deliver a block, so what they do in between, q, merges and output, hides behind the ring.

K and V arrive as in `hopper_prefill`. Page ids are loaded 32 pages (TMA) or two blocks (GATHER) ahead of their use.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from evenshare.attention.kernels.hopper_common import (
    BAD_INDEX,
    LOG2E,
    NEG_INF,
    PANEL,
    POS_INF,
    SEGMENT_COLUMNS,
    key_rows,
    load_tile,
    load_tile_id,
    pieces,
    readable_len,
    row_index,
    valid_rows,
)
from evenshare.device.clock import END, KEYS, MERGE, START, record
from evenshare.device.gluon import barrier, next_stage

FLAGS = gl.constexpr(16)  # segments that the producer may be ahead, and more
WINDOW = gl.constexpr(32)  # page ids that the producer's warp holds, one a lane


@gluon.jit
def _load_window(kv_indices_ptr, kv_start, page, page_end, num_pages, layout: gl.constexpr):
    """32 page ids of a request from `page` on -> (ids, which are bad). From page_end on they are -1: of a box outside the tensor TMA
    makes zeros, without a read."""
    index = page + gl.arange(0, WINDOW, layout=layout)
    ids = gl.load(kv_indices_ptr + kv_start + index, mask=index < page_end, other=-1)
    return ids, ((index < page_end) & ((ids < 0) | (ids >= num_pages))).to(gl.int32)


@gluon.jit
def _produce_tma(k_desc, v_desc, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr, heads_per_row, num_pages, num_indices,
                 k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, warm, flags,
                 PAGE_SIZE: gl.constexpr, DENSE: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr,
                 PANELS: gl.constexpr, PANELS_V: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """One warp: a K and a V block per iteration, BLOCK_N // BOX boxes a panel of 128 bytes.

    A box outside either tensor is asked for at once: TMA fetches the descriptors while the way to the first keys is looked up."""
    PANEL: gl.constexpr = k_bufs.shape[2]
    element_bytes: gl.constexpr = k_desc.dtype.primitive_bitwidth // 8
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, WINDOW, layout=layout)
    worker = gl.program_id(0)
    stage = 0
    phase = 1
    mbarrier.expect(warm, 2 * BOX * PANEL * element_bytes)
    tma.async_copy_global_to_shared(k_desc, [-1, 0, 0, 0], warm, k_bufs.index(0).slice(0, BOX, 0))
    tma.async_copy_global_to_shared(v_desc, [-1, 0, 0, 0], warm, v_bufs.index(0).slice(0, BOX, 0))
    segment_begin = gl.load(worker_indptr_ptr + worker)
    segment_end = gl.load(worker_indptr_ptr + worker + 1)
    tile = load_tile_id(segments_ptr, segment_begin, segment_end)
    mbarrier.wait(warm, 0)
    for segment in range(segment_begin, segment_end):
        kv_head, _q, _l, _r, kv_start, kv_len, end, num_blocks = load_tile(
            segments_ptr, tiles_ptr, segment, tile, heads_per_row
        )
        tile = load_tile_id(segments_ptr, segment + 1, segment_end)
        readable = readable_len(kv_start, kv_len, num_pages, num_indices, PAGE_SIZE, DENSE)
        key = (end - num_blocks) * BLOCK_N
        if PAGE_SIZE > 0:
            base = key // PAGE_SIZE
            page_end = (gl.minimum(readable, end * BLOCK_N) + PAGE_SIZE - 1) // PAGE_SIZE
            ids, bad = _load_window(kv_indices_ptr, kv_start, base, page_end, num_pages, layout)
            next_ids, next_bad = _load_window(kv_indices_ptr, kv_start, base + WINDOW, page_end, num_pages, layout)
        else:
            bad = gl.full([WINDOW], 0, gl.int32, layout)
        bad |= (readable < kv_len).to(gl.int32)
        for i in range(num_blocks):
            pages = ()
            for b in gl.static_range(BLOCK_N // BOX):
                if PAGE_SIZE > 0:
                    index = (key + b * BOX) // PAGE_SIZE - base
                    page = gl.sum(gl.where(lane == index, ids, 0), 0)
                elif DENSE:
                    page = kv_start
                else:
                    page = 0
                pages = pages + (page,)
            mbarrier.wait(k_empty.index(stage), phase)
            if i == num_blocks - 1:
                flags.index((segment - segment_begin) % FLAGS).store(gl.full([1], 0, gl.int32, layout) | gl.max(bad, 0))
            mbarrier.expect(k_full.index(stage), BLOCK_N * PANELS * PANEL * element_bytes)
            for b in gl.static_range(BLOCK_N // BOX):
                if PAGE_SIZE > 0:
                    token = (key + b * BOX) % PAGE_SIZE
                elif DENSE:
                    token = key + b * BOX
                else:
                    token = kv_start + key + b * BOX
                for c in gl.static_range(PANELS):
                    box = k_bufs.index(stage * PANELS + c).slice(b * BOX, BOX, 0)
                    tma.async_copy_global_to_shared(
                        k_desc, [pages[b], kv_head, token, c * PANEL], k_full.index(stage), box
                    )
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), BLOCK_N * PANELS_V * PANEL * element_bytes)
            for b in gl.static_range(BLOCK_N // BOX):
                if PAGE_SIZE > 0:
                    token = (key + b * BOX) % PAGE_SIZE
                elif DENSE:
                    token = key + b * BOX
                else:
                    token = kv_start + key + b * BOX
                for c in gl.static_range(PANELS_V):
                    box = v_bufs.index(stage * PANELS_V + c).slice(b * BOX, BOX, 0)
                    tma.async_copy_global_to_shared(
                        v_desc, [pages[b], kv_head, token, c * PANEL], v_full.index(stage), box
                    )
            stage, phase = next_stage(stage, phase, STAGES)
            key += BLOCK_N
            if PAGE_SIZE > 0:
                # A block's pages lie in one window: their number divides 32, and the first window begins with a block.
                if key // PAGE_SIZE - base >= WINDOW:
                    base += WINDOW
                    ids = next_ids
                    bad |= next_bad
                    next_ids, next_bad = _load_window(
                        kv_indices_ptr, kv_start, base + WINDOW, page_end, num_pages, layout
                    )


@gluon.jit
def _load_pages(kv_indices_ptr, n, kv_start, readable, PAGE_SIZE: gl.constexpr):
    return gl.load(kv_indices_ptr + kv_start + n // PAGE_SIZE, mask=n < readable, other=-1)


@gluon.jit
def _page_rows(page, n, kv_len, num_pages, stride_page, stride_token, PAGE_SIZE: gl.constexpr):
    """Keys n on pages -> (element offsets of their rows, which may be read, which should have been readable)."""
    valid = (page >= 0) & (page < num_pages)
    wrong = ((n < kv_len) & (valid == 0)).to(gl.int32)
    return page.to(gl.int64) * stride_page + (n % PAGE_SIZE).to(gl.int64) * stride_token, valid, wrong


@gluon.jit
def _copy_rows(buf, bar, ptr, rows, valid, DIM: gl.constexpr, BLOCK_D: gl.constexpr, layout: gl.constexpr):
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
    mask = valid.expand_dims(1) & (d < DIM).expand_dims(0)
    async_copy.async_copy_global_to_shared(buf, ptr + rows.expand_dims(1) + d.expand_dims(0), mask=mask)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _produce_gather(k_ptr, v_ptr, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr, heads_per_row, num_pages, num_indices,
                    stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
                    k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, flags,
                    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, PAGE_SIZE: gl.constexpr, DENSE: gl.constexpr,
                    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Four warps: the rows of each block one by one, wherever their pages are."""
    PIECE: gl.constexpr = 128 // k_ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([1, PIECE], [32 * PIECE // BLOCK_D, BLOCK_D // PIECE], [4, 1], [1, 0])
    layout_v: gl.constexpr = gl.BlockedLayout([1, PIECE], [32 * PIECE // BLOCK_DV, BLOCK_DV // PIECE], [4, 1], [1, 0])
    index: gl.constexpr = gl.SliceLayout(1, layout)
    index_v: gl.constexpr = gl.SliceLayout(1, layout_v)
    row = gl.arange(0, BLOCK_N, layout=index)
    worker = gl.program_id(0)
    stage = 0
    phase = 1
    segment_begin = gl.load(worker_indptr_ptr + worker)
    segment_end = gl.load(worker_indptr_ptr + worker + 1)
    tile = load_tile_id(segments_ptr, segment_begin, segment_end)
    for segment in range(segment_begin, segment_end):
        kv_head, _q, _l, _r, kv_start, kv_len, end, num_blocks = load_tile(
            segments_ptr, tiles_ptr, segment, tile, heads_per_row
        )
        tile = load_tile_id(segments_ptr, segment + 1, segment_end)
        readable = readable_len(kv_start, kv_len, num_pages, num_indices, PAGE_SIZE, DENSE)
        k_head = k_ptr + kv_head.to(gl.int64) * pieces(stride_k_head, PIECE)
        v_head = v_ptr + kv_head.to(gl.int64) * pieces(stride_v_head, PIECE)
        bad = gl.full([BLOCK_N], 0, gl.int32, index) | (readable < kv_len).to(gl.int32)
        key = (end - num_blocks) * BLOCK_N
        if PAGE_SIZE > 0:
            ids = _load_pages(kv_indices_ptr, key + row, kv_start, readable, PAGE_SIZE)
            next_ids = _load_pages(kv_indices_ptr, key + BLOCK_N + row, kv_start, readable, PAGE_SIZE)
        for i in range(num_blocks):
            n = key + row
            if PAGE_SIZE > 0:
                page = ids
                ids = next_ids
                next_ids = _load_pages(kv_indices_ptr, n + 2 * BLOCK_N, kv_start, readable, PAGE_SIZE)
                rows, valid, wrong = _page_rows(
                    page, n, kv_len, num_pages, pieces(stride_k_page, PIECE), pieces(stride_k_token, PIECE), PAGE_SIZE
                )
                rows_v, _v, _w = _page_rows(
                    page, n, kv_len, num_pages, pieces(stride_v_page, PIECE), pieces(stride_v_token, PIECE), PAGE_SIZE
                )
                bad |= wrong
            else:
                rows, valid = key_rows(n, n, kv_start, readable, pieces(stride_k_page, PIECE), pieces(stride_k_token, PIECE),
                                       PAGE_SIZE, DENSE)  # fmt: skip
                rows_v, _v = key_rows(n, n, kv_start, readable, pieces(stride_v_page, PIECE), pieces(stride_v_token, PIECE),
                                      PAGE_SIZE, DENSE)  # fmt: skip
            mbarrier.wait(k_empty.index(stage), phase)
            if i == num_blocks - 1:
                one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
                flags.index((segment - segment_begin) % FLAGS).store(gl.full([1], 0, gl.int32, one) | gl.max(bad, 0))
            _copy_rows(k_bufs.index(stage), k_full.index(stage), k_head, rows, valid, HEAD_DIM, BLOCK_D, layout)
            mbarrier.wait(v_empty.index(stage), phase)
            rows_v = gl.convert_layout(rows_v, index_v)
            valid = gl.convert_layout(valid, index_v)
            _copy_rows(v_bufs.index(stage), v_full.index(stage), v_head, rows_v, valid, HEAD_DIM_V, BLOCK_DV, layout_v)
            stage, phase = next_stage(stage, phase, STAGES)
            key += BLOCK_N


@gluon.jit
def produce(k, v, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
             heads_per_row, num_pages, num_indices, stride_k_page, stride_k_token, stride_k_head,
             stride_v_page, stride_v_token, stride_v_head,
             k_panels, v_panels, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, warm, flags,
             HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, PAGE_SIZE: gl.constexpr, DENSE: gl.constexpr, GATHER: gl.constexpr,
             BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    if GATHER:
        _produce_gather(k, v, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr, heads_per_row, num_pages,
                        num_indices, stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
                        k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, flags,
                        HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, DENSE, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES)  # fmt: skip
    else:
        _produce_tma(k, v, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr, heads_per_row, num_pages,
                     num_indices, k_panels, v_panels, k_full, k_empty, v_full, v_empty, warm, flags,
                     PAGE_SIZE, DENSE, BLOCK_N, BOX, BLOCK_D // k_panels.shape[2], BLOCK_DV // k_panels.shape[2], STAGES)  # fmt: skip


@gluon.jit
def _fetch_q(q_ptr, q_buf, kv_head, q_start, qo_len, row_begin, num_q_starts, num_q_tokens,
             stride_start, stride_token, stride_head,
             GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, DENSE: gl.constexpr):  # fmt: skip
    """Start copying the packed rows of a tile of q; rows past the request become zero."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
    token, head = row_index(row_begin, rows, GROUP)
    valid = valid_rows(token, q_start, qo_len, num_q_starts, num_q_tokens, DENSE)
    offsets = q_start.to(gl.int64) * pieces(stride_start) + kv_head.to(gl.int64) * (GROUP * pieces(stride_head))
    offsets += token.to(gl.int64) * pieces(stride_token) + head.to(gl.int64) * pieces(stride_head)
    mask = valid.expand_dims(1) & (d < HEAD_DIM).expand_dims(0)
    async_copy.async_copy_global_to_shared(q_buf, q_ptr + offsets.expand_dims(1) + d.expand_dims(0), mask=mask)
    async_copy.commit_group()


@gluon.jit
def _softmax(s, peak, sums, key, last, first_seen, score_scale, cap_log2e,
             HAS_WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr, BLOCK_N: gl.constexpr, scores: gl.constexpr):  # fmt: skip
    """Scores [keys, rows] of one block -> (probabilities, peak, sums key by key, factor of what was summed before), in base 2."""
    n = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, scores)).expand_dims(1)
    if HAS_SOFT_CAP:
        # cap * tanh(x): what counts is the absolute error, some 1e-7 of the cap.
        s = cap_log2e - (2.0 * cap_log2e) / (1.0 + gl.exp2(s * score_scale))
    else:
        s = s * score_scale
    keep = n <= last.expand_dims(0)
    if HAS_WINDOW:
        keep = keep & (n >= first_seen.expand_dims(0))
    s = gl.where(keep, s, NEG_INF)
    new_peak = gl.maximum(peak, gl.max(s, 0))
    base = gl.where(new_peak == NEG_INF, 0.0, new_peak)
    p = gl.exp2(s - base.expand_dims(0))
    factor = gl.exp2(peak - base)
    return p, new_peak, sums * factor.expand_dims(0) + p, factor


@gluon.jit
def _clear_rows(v_buf, rows_left, BLOCK_N: gl.constexpr, BLOCK_DV: gl.constexpr):
    """Zero the rows of a V block past the request's last key: TMA brought what lies there, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_DV, BLOCK_DV // 8], [4, 1], [1, 0])
    n = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
    for part in gl.static_range(BLOCK_N // 16):
        if part * 16 + 16 > rows_left:
            rows = v_buf.slice(part * 16, 16, 0)
            value = rows.load(layout)
            keep = (part * 16 + n < rows_left).expand_dims(1)
            rows.store(gl.where(keep, value, gl.zeros_like(value)))


@gluon.jit
def _merge(partial_o_ptr, partial_lse_ptr, slot_begin, num_slots, rows, dims, BLOCK_M: gl.constexpr, BLOCK_DV: gl.constexpr,
           output: gl.constexpr):  # fmt: skip
    """Combine the partials of a tile in tile order -> (acc [dims, rows], lse2 [rows]); +inf marks a bad page, NaN stays NaN."""
    by_row: gl.constexpr = gl.SliceLayout(0, output)
    SLOTS: gl.constexpr = max(64 // BLOCK_M, 1)  # whose loads are under way together
    peak = gl.full([BLOCK_M], NEG_INF, gl.float32, by_row)
    total = gl.full([BLOCK_M], 0.0, gl.float32, by_row)
    acc = gl.zeros([BLOCK_DV, BLOCK_M], gl.float32, output)
    offsets = rows.to(gl.int64).expand_dims(0) * BLOCK_DV + dims.expand_dims(1)
    for begin in range(0, num_slots, SLOTS):
        lses = ()
        values = ()
        new_peak = peak
        for i in gl.static_range(SLOTS):
            there = begin + i < num_slots
            slot = (slot_begin + begin + i).to(gl.int64)
            lse = gl.load(partial_lse_ptr + slot * BLOCK_M + rows, mask=there, other=NEG_INF)
            value = gl.load(partial_o_ptr + slot * (BLOCK_M * BLOCK_DV) + offsets, mask=there, other=0.0)
            lses = lses + (lse,)
            values = values + (value,)
            new_peak = gl.maximum(new_peak, lse)
        base = gl.where((new_peak > NEG_INF) & (new_peak < POS_INF), new_peak, 0.0)
        factor = gl.exp2(peak - base)
        acc = acc * factor.expand_dims(0)
        total = total * factor
        for i in gl.static_range(SLOTS):
            weight = gl.exp2(lses[i] - base)
            acc += values[i] * weight.expand_dims(0)
            total += weight
        peak = new_peak
    usable = (peak > NEG_INF) & (peak < POS_INF)
    safe = gl.where(total > 0.0, total, 1.0)
    empty = gl.where((peak == NEG_INF) | (peak == POS_INF), NEG_INF, peak)
    lse2 = gl.where(usable, peak + gl.log2(safe), empty)
    acc = gl.where(usable.expand_dims(0), acc / safe.expand_dims(0), 0.0)
    return gl.where((peak != peak).expand_dims(0), peak.expand_dims(0), acc), lse2


@gluon.jit
def _consume(q_ptr, out_ptr, lse_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
             partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr, times_ptr,
             sm_scale, logits_soft_cap, lse_scale, window_left, heads_per_row, num_q_starts, num_q_tokens,
             stride_q_start, stride_q_token, stride_q_head, stride_o_start, stride_o_token, stride_o_head,
             stride_lse_start, stride_lse_token, stride_lse_head,
             q_bufs, p_buf, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, flags,
             GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, DENSE: gl.constexpr,
             GATHER: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr, HAS_LSE: gl.constexpr,
             BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    scores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16]
    )
    output: gl.constexpr = scores
    by_row: gl.constexpr = gl.SliceLayout(0, scores)
    element: gl.constexpr = q_ptr.dtype.element_ty
    if HAS_SOFT_CAP:
        score_scale = sm_scale / logits_soft_cap * (2.0 * LOG2E)  # tanh(x) = 1 - 2 / (1 + exp(2 x))
    else:
        score_scale = sm_scale * LOG2E
    cap_log2e = logits_soft_cap * LOG2E
    rows = gl.arange(0, BLOCK_M, layout=by_row)
    dims = gl.arange(0, BLOCK_DV, layout=gl.SliceLayout(1, output))
    no_scores = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, scores)

    worker = gl.program_id(0)
    segment_begin = gl.load(worker_indptr_ptr + worker)
    segment_end = gl.load(worker_indptr_ptr + worker + 1)
    # What the next segment needs is loaded while this one runs: its tile's id two segments ahead, its row of q one ahead.
    tile = load_tile_id(segments_ptr, segment_begin, segment_end)
    last_segment = gl.maximum(segment_end - 1, 0)
    kv_head, q_start, qo_len, row_begin, _start, kv_len, end, _blocks = load_tile(
        segments_ptr, tiles_ptr, gl.minimum(segment_begin, last_segment), tile, heads_per_row
    )
    next_tile = load_tile_id(segments_ptr, segment_begin + 1, segment_end)
    _fetch_q(q_ptr, q_bufs.index(0), kv_head, q_start, qo_len, row_begin, num_q_starts, num_q_tokens,
             stride_q_start, stride_q_token, stride_q_head, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D, DENSE)  # fmt: skip
    stage = 0
    phase = 0
    parity = 0
    for segment in range(segment_begin, segment_end):
        record(times_ptr, segment, START)
        next_head, next_start, next_len, next_row, _start, next_kv_len, next_end, _blocks = load_tile(
            segments_ptr, tiles_ptr, gl.minimum(segment + 1, last_segment), next_tile, heads_per_row
        )
        next_tile = load_tile_id(segments_ptr, segment + 2, segment_end)
        row = segments_ptr + segment.to(gl.int64) * SEGMENT_COLUMNS
        # Not carried from the segment before: Triton drops a loop-carried value that only bounds inner loops.
        num_blocks = gl.load(row + 2) - gl.load(row + 1)
        slot = gl.load(row + 3)
        slot_begin = gl.load(row + 4)
        num_slots = gl.load(row + 5)
        counter = gl.load(row + 6)
        token, head = row_index(row_begin, rows, GROUP)
        last_key = kv_len - qo_len + token  # bottom-right aligned
        if CAUSAL:
            last = gl.minimum(last_key, kv_len - 1)
        else:
            last = gl.zeros_like(last_key) + (kv_len - 1)
        if HAS_WINDOW:
            first_seen = last_key - window_left
        else:
            first_seen = last_key
        peak = gl.full([BLOCK_M], NEG_INF, gl.float32, by_row)
        sums = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, scores)
        acc = gl.zeros([BLOCK_DV, BLOCK_M], gl.float32, output)

        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        q = q_bufs.index(parity).permute([1, 0])
        if segment + 1 < segment_end:
            _fetch_q(q_ptr, q_bufs.index(parity ^ 1), next_head, next_start, next_len, next_row,
                     num_q_starts, num_q_tokens, stride_q_start, stride_q_token, stride_q_head,
                     GROUP, HEAD_DIM, BLOCK_M, BLOCK_D, DENSE)  # fmt: skip
        key = (end - num_blocks) * BLOCK_N
        mbarrier.wait(k_full.index(stage), phase)
        record(times_ptr, segment, KEYS)
        if GATHER:
            fence_async_shared()
        s_token = warpgroup_mma(k_bufs.index(stage), q, no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, (s_token,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        p, peak, sums, _factor = _softmax(
            s, peak, sums, key, last, first_seen, score_scale, cap_log2e, HAS_WINDOW, HAS_SOFT_CAP, BLOCK_N, scores
        )
        p_buf.permute([1, 0]).store(p.to(element))
        fence_async_shared()
        barrier()
        # Scores of the next block, while the values of the block before, whose probabilities are in p_buf, are summed.
        for _ in range(1, num_blocks):
            key += BLOCK_N
            key_stage, key_phase = next_stage(stage, phase, STAGES)
            mbarrier.wait(k_full.index(key_stage), key_phase)
            if GATHER:
                fence_async_shared()
            s_token = warpgroup_mma(k_bufs.index(key_stage), q, no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(stage), phase)
            if GATHER:
                fence_async_shared()
            o_token = warpgroup_mma(v_bufs.index(stage).permute([1, 0]), p_buf.permute([1, 0]), acc, is_async=True)
            s = warpgroup_mma_wait(1, (s_token,))
            mbarrier.arrive(k_empty.index(key_stage), count=1)
            p, peak, sums, factor = _softmax(
                s, peak, sums, key, last, first_seen, score_scale, cap_log2e, HAS_WINDOW, HAS_SOFT_CAP, BLOCK_N, scores
            )
            acc = warpgroup_mma_wait(0, (o_token,))
            mbarrier.arrive(v_empty.index(stage), count=1)
            acc = acc * factor.expand_dims(0)
            p_buf.permute([1, 0]).store(p.to(element))
            fence_async_shared()
            barrier()
            stage = key_stage
            phase = key_phase
        mbarrier.wait(v_full.index(stage), phase)
        if not GATHER:
            if key + BLOCK_N > kv_len:
                _clear_rows(v_bufs.index(stage), kv_len - key, BLOCK_N, BLOCK_DV)
                fence_async_shared()
                barrier()
        else:
            fence_async_shared()
        o_token = warpgroup_mma(v_bufs.index(stage).permute([1, 0]), p_buf.permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, (o_token,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)

        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        is_bad = gl.max(flags.index((segment - segment_begin) % FLAGS).load(one), 0) > 0
        if is_bad:
            gl.atomic_or(status_ptr, BAD_INDEX)
        total = gl.sum(sums, 0)
        safe = gl.where(total == 0.0, 1.0, total)
        lse2 = gl.where(total == 0.0, NEG_INF, peak + gl.log2(safe))
        acc = acc * (1.0 / safe).expand_dims(0)
        finished = num_slots == 1
        acc = gl.where(is_bad, 0.0, acc)
        lse2 = gl.where(is_bad, gl.where(finished, NEG_INF, POS_INF), lse2)
        if num_slots > 1:
            own = slot.to(gl.int64)
            gl.store(
                partial_o_ptr + own * (BLOCK_M * BLOCK_DV) + (rows.expand_dims(0) * BLOCK_DV + dims.expand_dims(1)), acc
            )
            gl.store(partial_lse_ptr + own * BLOCK_M + rows, lse2)
            counter_ptr = counters_ptr + counter
            barrier()
            finished = gl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_slots - 1
            if finished:
                record(times_ptr, segment, MERGE)
                gl.store(counter_ptr, 0)
                acc, lse2 = _merge(
                    partial_o_ptr, partial_lse_ptr, slot_begin, num_slots, rows, dims, BLOCK_M, BLOCK_DV, output
                )
        if finished:
            valid = valid_rows(token, q_start, qo_len, num_q_starts, num_q_tokens, DENSE)
            offsets = q_start.to(gl.int64) * stride_o_start + kv_head.to(gl.int64) * (GROUP * stride_o_head)
            offsets += token.to(gl.int64) * stride_o_token + head.to(gl.int64) * stride_o_head
            mask = valid.expand_dims(0) & (dims < HEAD_DIM_V).expand_dims(1)
            gl.store(out_ptr + offsets.expand_dims(0) + dims.expand_dims(1), acc.to(element), mask=mask)
            if HAS_LSE:
                offsets = q_start.to(gl.int64) * stride_lse_start + kv_head.to(gl.int64) * (GROUP * stride_lse_head)
                offsets += token.to(gl.int64) * stride_lse_token + head.to(gl.int64) * stride_lse_head
                gl.store(lse_ptr + offsets, lse2 * lse_scale, mask=valid)
        record(times_ptr, segment, END)
        kv_head, q_start, qo_len, row_begin = next_head, next_start, next_len, next_row
        kv_len, end = next_kv_len, next_end
        parity ^= 1


# Sizes of the batch are not specialised on: no compilation for a batch of one, or of a multiple of 16.
@gluon.jit(
    do_not_specialize=["window_left", "heads_per_row", "num_q_starts", "num_q_tokens", "num_pages", "num_indices"]
)
def decode(q_ptr, k, v, out_ptr, lse_ptr, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
           partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr, times_ptr,
           sm_scale, logits_soft_cap, lse_scale, window_left, heads_per_row, num_q_starts, num_q_tokens, num_pages, num_indices,
           stride_q_start, stride_q_token, stride_q_head,
           stride_k_page, stride_k_token, stride_k_head,
           stride_v_page, stride_v_token, stride_v_head,
           stride_o_start, stride_o_token, stride_o_head,
           stride_lse_start, stride_lse_token, stride_lse_head,
           GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, PAGE_SIZE: gl.constexpr, DENSE: gl.constexpr,
           GATHER: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr, HAS_LSE: gl.constexpr,
           BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BOX: gl.constexpr,
           STAGES: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Arguments as those of `kernels.forward` and `hopper_prefill.prefill`; a tile is BLOCK_M packed rows: 8, or more of 16 at a time."""
    element: gl.constexpr = q_ptr.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_bufs = gl.allocate_shared_memory(element, [2, BLOCK_M, BLOCK_D], swizzled)
    p_buf = gl.allocate_shared_memory(element, [BLOCK_M, BLOCK_N], swizzled)
    k_panels = gl.allocate_shared_memory(element, [STAGES * BLOCK_D // PANEL, BLOCK_N, PANEL], swizzled)
    v_panels = gl.allocate_shared_memory(element, [STAGES * BLOCK_DV // PANEL, BLOCK_N, PANEL], swizzled)
    k_bufs = k_panels._reinterpret(element, [STAGES, BLOCK_N, BLOCK_D], swizzled)
    v_bufs = v_panels._reinterpret(element, [STAGES, BLOCK_N, BLOCK_DV], swizzled)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    warm = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    flags = gl.allocate_shared_memory(gl.int32, [FLAGS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.init(warm, count=1)
    arrivals: gl.constexpr = 128 if GATHER else 1  # each thread of the gathering producer arrives
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=arrivals)
        mbarrier.init(k_empty.index(i), count=1)
        mbarrier.init(v_full.index(i), count=arrivals)
        mbarrier.init(v_empty.index(i), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # the kernel before, which may write what this one reads or use the same workspace, ends here
    PRODUCER_WARPS: gl.constexpr = 4 if GATHER else 1
    gl.warp_specialize(
        [
            (_consume, (q_ptr, out_ptr, lse_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
                        partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr, times_ptr,
                        sm_scale, logits_soft_cap, lse_scale, window_left, heads_per_row, num_q_starts, num_q_tokens,
                        stride_q_start, stride_q_token, stride_q_head, stride_o_start, stride_o_token, stride_o_head,
                        stride_lse_start, stride_lse_token, stride_lse_head,
                        q_bufs, p_buf, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, flags,
                        GROUP, HEAD_DIM, HEAD_DIM_V, DENSE, GATHER, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_LSE,
                        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES)),
            (produce, (k, v, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
                        heads_per_row, num_pages, num_indices, stride_k_page, stride_k_token, stride_k_head,
                        stride_v_page, stride_v_token, stride_v_head,
                        k_panels, v_panels, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, warm, flags,
                        HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, DENSE, GATHER, BLOCK_N, BLOCK_D, BLOCK_DV, BOX, STAGES)),
        ],
        [PRODUCER_WARPS],
        [232],
    )  # fmt: skip

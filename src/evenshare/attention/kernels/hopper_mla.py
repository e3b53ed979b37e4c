"""Latent attention for Hopper (sm_90): one persistent worker a SM, a tile of 64 packed rows, each latent in shared memory once.

Sums of 64 rows x 512 dims are half of a SM's registers, so two consumers share a tile by columns: 256 dims of the values each. The
first one alone computes scores and probabilities, which stay in its registers as an operand and go to the second one through shared
memory, with the factor that each row's sums shrink by. Its next scores follow its values in the tensor cores without a gap; the second
consumer's values run beside them. A producer streams blocks of 64 keys, [512 latent | 64 rotary] numbers, into a ring of STAGES buffers by
TMA, over the borders of segments.

The two halves are handed in and merged one by one, like the two consumers' rows in `hopper_prefill`: a partial is [2, 64, 256].
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

from evenshare.attention.kernels.hopper_common import (
    BAD_INDEX,
    LOG2E,
    NEG_INF,
    PANEL,
    POS_INF,
    SEGMENT_COLUMNS,
    load_tile,
    load_tile_id,
    readable_len,
    row_index,
)
from evenshare.attention.kernels.hopper_decode import FLAGS, WINDOW, _fetch_q, _load_window
from evenshare.attention.kernels.hopper_prefill import (
    _clear_rows,
    _merge,
    _pack,
    _softmax,
    _store_lse,
    _store_rows,
    _unpack,
)
from evenshare.attention.kernels.hopper_prefill_load import ROWS
from evenshare.device.gluon import barrier, next_stage

DIM = gl.constexpr(512)  # of a latent
HALF = gl.constexpr(256)  # of its dims, a consumer's
BYTES = gl.constexpr(2 * (512 + 64))  # of a key


@gluon.jit
def _produce(ckv_desc, kpe_desc, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr, num_pages, num_indices,
             panels, rotary, full, empty, flags,
             PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """One warp: a block per iteration, BLOCK_N // BOX boxes a panel of 64 dims. Page ids are loaded 32 pages ahead of their use."""
    PANELS: gl.constexpr = DIM // PANEL
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, WINDOW, layout=layout)
    worker = gl.program_id(0)
    stage = 0
    phase = 1
    segment_begin = gl.load(worker_indptr_ptr + worker)
    segment_end = gl.load(worker_indptr_ptr + worker + 1)
    tile = load_tile_id(segments_ptr, segment_begin, segment_end)
    for segment in range(segment_begin, segment_end):
        _h, _q, _l, _r, kv_start, kv_len, end, num_blocks = load_tile(segments_ptr, tiles_ptr, segment, tile, 1)
        tile = load_tile_id(segments_ptr, segment + 1, segment_end)
        readable = readable_len(kv_start, kv_len, num_pages, num_indices, PAGE_SIZE, False)
        key = (end - num_blocks) * BLOCK_N
        base = key // PAGE_SIZE
        page_end = (gl.minimum(readable, end * BLOCK_N) + PAGE_SIZE - 1) // PAGE_SIZE
        ids, bad = _load_window(kv_indices_ptr, kv_start, base, page_end, num_pages, layout)
        next_ids, next_bad = _load_window(kv_indices_ptr, kv_start, base + WINDOW, page_end, num_pages, layout)
        bad |= (readable < kv_len).to(gl.int32)
        for i in range(num_blocks):
            pages = ()
            for b in gl.static_range(BLOCK_N // BOX):
                index = (key + b * BOX) // PAGE_SIZE - base
                pages = pages + (gl.sum(gl.where(lane == index, ids, 0), 0),)
            mbarrier.wait(empty.index(stage), phase)
            if i == num_blocks - 1:
                flags.index((segment - segment_begin) % FLAGS).store(gl.full([1], 0, gl.int32, layout) | gl.max(bad, 0))
            bar = full.index(stage)
            mbarrier.expect(bar, BLOCK_N * BYTES)
            for b in gl.static_range(BLOCK_N // BOX):
                token = (key + b * BOX) % PAGE_SIZE
                tma.async_copy_global_to_shared(
                    kpe_desc, [pages[b], 0, token, 0], bar, rotary.index(stage).slice(b * BOX, BOX, 0)
                )
                for c in gl.static_range(PANELS):
                    box = panels.index(stage * PANELS + c).slice(b * BOX, BOX, 0)
                    tma.async_copy_global_to_shared(ckv_desc, [pages[b], 0, token, c * PANEL], bar, box)
            stage, phase = next_stage(stage, phase, STAGES)
            key += BLOCK_N
            # A block's pages lie in one window: their number divides 32, and the first window begins with a block.
            if key // PAGE_SIZE - base >= WINDOW:
                base += WINDOW
                ids = next_ids
                bad |= next_bad
                next_ids, next_bad = _load_window(kv_indices_ptr, kv_start, base + WINDOW, page_end, num_pages, layout)


@gluon.jit
def _hand_over(p, factor, p_buf, factors, p_full, p_empty, turn, element: gl.constexpr):
    """Probabilities of a block, and what the sums before shrink by, to the second consumer."""
    mbarrier.wait(p_empty, turn ^ 1)
    p_buf.store(p.to(element))
    factors.store(factor)
    fence_async_shared()
    barrier()
    mbarrier.arrive(p_full, count=1)
    return turn ^ 1


@gluon.jit
def _score(q_buf, q_rotary, c_buf, r_buf, BLOCK_N: gl.constexpr, scores: gl.constexpr):
    """A product under way: q [64, 576] beside a block of keys."""
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, scores)
    s_token = warpgroup_mma(q_buf, c_buf.permute([1, 0]), no_scores, use_acc=False, is_async=True)
    return warpgroup_mma(q_rotary, r_buf.permute([1, 0]), s_token, is_async=True)


@gluon.jit
def _sum_first(q_buf, q_rotary, p_buf, factors, c_bufs, halves, rotary, full, empty, p_full, p_empty, stage, phase, turn,
               last, whole_end, key, kv_len, num_blocks, score_scale,
               BLOCK_N: gl.constexpr, STAGES: gl.constexpr, scores: gl.constexpr, output: gl.constexpr,
               element: gl.constexpr):  # fmt: skip
    """Blocks of a segment: scores, probabilities, and the first half of the values -> (acc, peak, total, and where the ring is)."""
    by_row: gl.constexpr = gl.SliceLayout(1, output)
    operand: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    peak = gl.full([ROWS], NEG_INF, gl.float32, gl.SliceLayout(1, scores))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, scores))
    acc = gl.zeros([ROWS, HALF], gl.float32, output)
    mbarrier.wait(full.index(stage), phase)
    s_token = _score(q_buf, q_rotary, c_bufs.index(stage), rotary.index(stage), BLOCK_N, scores)
    s = warpgroup_mma_wait(0, (s_token,))
    p, peak, total, factor = _softmax(s, peak, total, key, last, last, 0, whole_end, score_scale, 0.0,
                                      False, False, BLOCK_N, scores)  # fmt: skip
    turn = _hand_over(p, factor, p_buf, factors, p_full, p_empty, turn, element)
    packed = _pack(p, element)
    for _ in range(1, num_blocks):
        key += BLOCK_N
        key_stage, key_phase = next_stage(stage, phase, STAGES)
        o_token = warpgroup_mma(_unpack(packed, operand, element), halves.index(2 * stage), acc, is_async=True)
        mbarrier.wait(full.index(key_stage), key_phase)
        s_token = _score(q_buf, q_rotary, c_bufs.index(key_stage), rotary.index(key_stage), BLOCK_N, scores)
        acc = warpgroup_mma_wait(2, (o_token,))
        mbarrier.arrive(empty.index(stage), count=1)
        s = warpgroup_mma_wait(0, (s_token,))
        p, peak, total, factor = _softmax(s, peak, total, key, last, last, 0, whole_end, score_scale, 0.0,
                                          False, False, BLOCK_N, scores)  # fmt: skip
        turn = _hand_over(p, factor, p_buf, factors, p_full, p_empty, turn, element)
        packed = _pack(p, element)
        acc = acc * gl.convert_layout(factor, by_row).expand_dims(1)
        stage = key_stage
        phase = key_phase
    if key + BLOCK_N > kv_len:
        _clear_rows(halves.index(2 * stage), kv_len - key, BLOCK_N, HALF)
    o_token = warpgroup_mma(_unpack(packed, operand, element), halves.index(2 * stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, (o_token,))
    mbarrier.arrive(empty.index(stage), count=1)
    stage, phase = next_stage(stage, phase, STAGES)
    return acc, peak, total, stage, phase, turn


@gluon.jit
def _sum_second(p_buf, factors, halves, full, empty, p_full, p_empty, stage, phase, turn, key, kv_len, num_blocks,
                BLOCK_N: gl.constexpr, STAGES: gl.constexpr, output: gl.constexpr):  # fmt: skip
    """Blocks of a segment: the second half of the values -> (acc, and where the ring is)."""
    acc = gl.zeros([ROWS, HALF], gl.float32, output)
    for _ in range(num_blocks):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.wait(p_full, turn)
        acc = acc * factors.load(gl.SliceLayout(1, output)).expand_dims(1)
        if key + BLOCK_N > kv_len:
            _clear_rows(halves.index(2 * stage + 1), kv_len - key, BLOCK_N, HALF)
        o_token = warpgroup_mma(p_buf, halves.index(2 * stage + 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, (o_token,))
        mbarrier.arrive(p_empty, count=1)
        mbarrier.arrive(empty.index(stage), count=1)
        turn ^= 1
        stage, phase = next_stage(stage, phase, STAGES)
        key += BLOCK_N
    return acc, stage, phase, turn


@gluon.jit
def _consume(half: gl.constexpr, q_nope_ptr, q_pe_ptr, out_ptr, lse_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
             partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr, sm_scale, lse_scale, num_q_tokens,
             stride_q_nope_token, stride_q_nope_head, stride_q_pe_token, stride_q_pe_head, stride_o_token, stride_o_head,
             stride_lse_token, stride_lse_head,
             q_buf, q_halves, q_rotary, p_buf, factors, lses, c_bufs, halves, rotary, full, empty, p_full, p_empty, q_full, flags,
             GROUP: gl.constexpr, CAUSAL: gl.constexpr, HAS_LSE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    scores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    output: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, output)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    element: gl.constexpr = out_ptr.dtype.element_ty
    score_scale = sm_scale * LOG2E
    worker = gl.program_id(0)
    segment_begin = gl.load(worker_indptr_ptr + worker)
    segment_end = gl.load(worker_indptr_ptr + worker + 1)
    stage = 0
    phase = 0
    turn = 0
    for segment in range(segment_begin, segment_end):
        tile = load_tile_id(segments_ptr, segment, segment_end)
        kv_head, q_start, qo_len, row_begin, _s, kv_len, end, num_blocks = load_tile(
            segments_ptr, tiles_ptr, segment, tile, 1
        )
        # The columns of q that this consumer's output of the segment before went through.
        _fetch_q(q_nope_ptr + half * HALF, q_halves.index(half), kv_head, q_start, qo_len, row_begin, 1, num_q_tokens,
                 stride_q_nope_token, stride_q_nope_token, stride_q_nope_head, GROUP, HALF, ROWS, HALF, False)  # fmt: skip
        if half == 0:
            _fetch_q(q_pe_ptr, q_rotary, kv_head, q_start, qo_len, row_begin, 1, num_q_tokens,
                     stride_q_pe_token, stride_q_pe_token, stride_q_pe_head, GROUP, PANEL, ROWS, PANEL, False)  # fmt: skip
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        key = (end - num_blocks) * BLOCK_N
        if half == 0:
            token, _head = row_index(row_begin, gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores)), GROUP)
            shift = kv_len - qo_len  # bottom-right aligned
            last = gl.zeros_like(token) + (kv_len - 1)
            whole_end = kv_len
            if CAUSAL:
                last = gl.minimum(shift + token, last)
                whole_end = gl.minimum(shift + row_begin // GROUP + 1, kv_len)
            mbarrier.wait(q_full, (segment - segment_begin) & 1)
            acc, peak, total, stage, phase, turn = _sum_first(
                q_buf, q_rotary, p_buf, factors, c_bufs, halves, rotary, full, empty, p_full, p_empty, stage, phase, turn,
                last, whole_end, key, kv_len, num_blocks, score_scale, BLOCK_N, STAGES, scores, output, element,
            )  # fmt: skip
            # What the second consumer's sums still want.
            safe = gl.where(total == 0.0, 1.0, total)
            factor = 1.0 / safe
            lse_rows = gl.where(total == 0.0, NEG_INF, peak + gl.log2(safe))
            mbarrier.wait(p_empty, turn ^ 1)
            factors.store(factor)
            lses.store(lse_rows)
            barrier()
            mbarrier.arrive(p_full, count=1)
            turn ^= 1
            acc = acc * gl.convert_layout(factor, by_row).expand_dims(1)
            lse2 = gl.convert_layout(lse_rows, by_row)
        else:
            mbarrier.arrive(q_full, count=1)
            acc, stage, phase, turn = _sum_second(p_buf, factors, halves, full, empty, p_full, p_empty, stage, phase, turn, key,
                                                  kv_len, num_blocks, BLOCK_N, STAGES, output)  # fmt: skip
            mbarrier.wait(p_full, turn)
            acc = acc * factors.load(by_row).expand_dims(1)
            lse2 = lses.load(by_row)
            barrier()
            mbarrier.arrive(p_empty, count=1)
            turn ^= 1

        row = segments_ptr + segment.to(gl.int64) * SEGMENT_COLUMNS
        num_slots = gl.load(row + 5)
        is_bad = gl.max(flags.index((segment - segment_begin) % FLAGS).load(one), 0) > 0
        if is_bad:
            gl.atomic_or(status_ptr, BAD_INDEX)
        finished = num_slots == 1
        acc = gl.where(is_bad, 0.0, acc)
        lse2 = gl.where(is_bad, gl.where(finished, NEG_INF, POS_INF), lse2)
        o_rows = gl.arange(0, ROWS, layout=by_row)
        if num_slots > 1:
            slot = gl.load(row + 3)
            slot_begin = gl.load(row + 4)
            counter = gl.load(row + 6)
            half_rows = half * ROWS + o_rows
            dims = gl.arange(0, HALF, layout=gl.SliceLayout(0, output))
            slot_rows = slot.to(gl.int64) * (2 * ROWS) + half_rows
            gl.store(partial_o_ptr + slot_rows.expand_dims(1) * HALF + dims.expand_dims(0), acc)
            gl.store(partial_lse_ptr + slot_rows, lse2)
            counter_ptr = counters_ptr + counter * 2 + half
            barrier()
            finished = gl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_slots - 1
            if finished:
                gl.store(counter_ptr, 0)
                acc, lse2 = _merge(
                    partial_o_ptr, partial_lse_ptr, slot_begin, num_slots, half_rows, dims, 2 * ROWS, HALF, output
                )
        if finished:
            _store_rows(out_ptr + half * HALF, q_halves.index(half), acc.to(element), kv_head, q_start, qo_len, row_begin, 1, num_q_tokens,
                        stride_o_token, stride_o_token, stride_o_head, GROUP, HALF, HALF, False)  # fmt: skip
            if HAS_LSE and half == 0:
                _store_lse(lse_ptr, lse2 * lse_scale, o_rows, kv_head, q_start, qo_len, row_begin, 1, num_q_tokens,
                           stride_lse_token, stride_lse_token, stride_lse_head, GROUP, False)  # fmt: skip
            barrier()


# Sizes of the batch are not specialised on: no compilation for a batch of one, or of a multiple of 16.
@gluon.jit(do_not_specialize=["num_q_tokens", "num_pages", "num_indices"])
def mla(q_nope_ptr, q_pe_ptr, ckv, kpe, out_ptr, lse_ptr, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
        partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr,
        sm_scale, lse_scale, num_q_tokens, num_pages, num_indices,
        stride_q_nope_token, stride_q_nope_head, stride_q_pe_token, stride_q_pe_head, stride_o_token, stride_o_head,
        stride_lse_token, stride_lse_head,
        GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, CAUSAL: gl.constexpr, HAS_LSE: gl.constexpr, BLOCK_N: gl.constexpr,
        BOX: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Arguments as those of `kernels.mla`, but for these: ckv and kpe are TMA descriptors of boxes [1, 1, BOX, 64] in [pages, 1, tokens,
    dims]; counters has two counters a split tile, partial_o [slots, 2, 64, 256], partial_lse [slots, 2, 64]."""
    element: gl.constexpr = out_ptr.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_buf = gl.allocate_shared_memory(element, [ROWS, DIM], swizzled)
    q_halves = q_buf._reinterpret(element, [2, ROWS, HALF], swizzled)
    q_rotary = gl.allocate_shared_memory(element, [ROWS, PANEL], swizzled)
    p_buf = gl.allocate_shared_memory(element, [ROWS, BLOCK_N], swizzled)
    panels = gl.allocate_shared_memory(element, [STAGES * DIM // PANEL, BLOCK_N, PANEL], swizzled)
    c_bufs = panels._reinterpret(element, [STAGES, BLOCK_N, DIM], swizzled)
    halves = panels._reinterpret(element, [STAGES * 2, BLOCK_N, HALF], swizzled)
    rotary = gl.allocate_shared_memory(element, [STAGES, BLOCK_N, PANEL], swizzled)
    factors = gl.allocate_shared_memory(gl.float32, [ROWS], plain)
    lses = gl.allocate_shared_memory(gl.float32, [ROWS], plain)
    flags = gl.allocate_shared_memory(gl.int32, [FLAGS, 1], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=1)
    mbarrier.init(q_full, count=1)
    fence_async_shared()
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (FIRST, q_nope_ptr, q_pe_ptr, out_ptr, lse_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
                        partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr, sm_scale, lse_scale, num_q_tokens,
                        stride_q_nope_token, stride_q_nope_head, stride_q_pe_token, stride_q_pe_head, stride_o_token, stride_o_head,
                        stride_lse_token, stride_lse_head,
                        q_buf, q_halves, q_rotary, p_buf, factors, lses, c_bufs, halves, rotary, full, empty, p_full, p_empty,
                        q_full, flags, GROUP, CAUSAL, HAS_LSE, BLOCK_N, STAGES)),
            (_consume, (SECOND, q_nope_ptr, q_pe_ptr, out_ptr, lse_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
                        partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr, sm_scale, lse_scale, num_q_tokens,
                        stride_q_nope_token, stride_q_nope_head, stride_q_pe_token, stride_q_pe_head, stride_o_token, stride_o_head,
                        stride_lse_token, stride_lse_head,
                        q_buf, q_halves, q_rotary, p_buf, factors, lses, c_bufs, halves, rotary, full, empty, p_full, p_empty,
                        q_full, flags, GROUP, CAUSAL, HAS_LSE, BLOCK_N, STAGES)),
            (_produce, (ckv, kpe, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr, num_pages, num_indices,
                        panels, rotary, full, empty, flags, PAGE_SIZE, BLOCK_N, BOX, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip

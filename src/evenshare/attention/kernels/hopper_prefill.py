"""Attention forward for Hopper (sm_90): one persistent worker a SM walks its segments of the plan; made for many query rows.

A worker is three roles (FlashAttention-3, section 3). The producer streams K and V blocks into a ring of STAGES buffers, runs ahead
over the borders of segments, and has the next tile's q rows and numbers ready in shared memory when its turn comes. Two consumers own
64 of the tile's 128 packed rows each and never wait for each other: a consumer issues the next Q K^T before the current P V, and hands
in or merges the partials of its own half.

K and V arrive by TMA in boxes [rows, 64 dims] out of [pages or requests, heads, tokens, dims], or, for pages that no box fits and
strides that TMA does not take, by cp.async (GATHER). fp8 keys and values come by cp.async to a buffer of one block, each thread's
pieces its own, and the producer widens them into the ring. Blocks run from a segment's last to its first: the masked ones come first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
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
    row_index,
    valid_rows,
)
from evenshare.attention.kernels.hopper_prefill_load import FLAGS, NUMBERS, ROWS, produce
from evenshare.device.clock import END, KEYS, MERGE, START, record
from evenshare.device.gluon import barrier, next_stage


@gluon.jit
def _read_number(numbers, index):
    """By every thread of a consumer."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(numbers.index(index).load(one), 0)


@gluon.jit
def _store_rows(out_ptr, o_buf, o, kv_head, q_start, qo_len, row_begin, num_q_starts, num_q_tokens,
                stride_start, stride_token, stride_head,
                GROUP: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_DV: gl.constexpr, DENSE: gl.constexpr):  # fmt: skip
    """Write 64 packed rows through shared memory: 16 bytes a thread and whole rows a warp. From wgmma's layout a store would
    take a cycle of the memory unit for every 16 bytes."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_DV, BLOCK_DV // 8], [4, 1], [1, 0])
    o_buf.store(o)
    barrier()
    o = o_buf.load(layout)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, BLOCK_DV, layout=gl.SliceLayout(0, layout))
    token, head = row_index(row_begin, rows, GROUP)
    valid = valid_rows(token, q_start, qo_len, num_q_starts, num_q_tokens, DENSE)
    offsets = q_start.to(gl.int64) * stride_start + kv_head.to(gl.int64) * (GROUP * stride_head)
    offsets += token.to(gl.int64) * stride_token + head.to(gl.int64) * stride_head
    mask = valid.expand_dims(1) & (dims < HEAD_DIM_V).expand_dims(0)
    gl.store(out_ptr + offsets.expand_dims(1) + dims.expand_dims(0), o, mask=mask)


@gluon.jit
def _store_lse(lse_ptr, lse, rows, kv_head, q_start, qo_len, row_begin, num_q_starts, num_q_tokens,
               stride_start, stride_token, stride_head, GROUP: gl.constexpr, DENSE: gl.constexpr):  # fmt: skip
    token, head = row_index(row_begin, rows, GROUP)
    valid = valid_rows(token, q_start, qo_len, num_q_starts, num_q_tokens, DENSE)
    offsets = q_start.to(gl.int64) * stride_start + kv_head.to(gl.int64) * (GROUP * stride_head)
    offsets += token.to(gl.int64) * stride_token + head.to(gl.int64) * stride_head
    gl.store(lse_ptr + offsets, lse, mask=valid)


@gluon.jit
def _softmax(s, peak, total, key, last, first_seen, whole_begin, whole_end, score_scale, cap_log2e,
             HAS_WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr, BLOCK_N: gl.constexpr,
             scores: gl.constexpr):  # fmt: skip
    """Scores of one block -> (probabilities, peak, total, factor of what was summed before), in base 2. Every row sees the keys from
    whole_begin to whole_end."""
    if HAS_SOFT_CAP:
        # cap * tanh(x): what counts is the absolute error, some 1e-7 of the cap.
        s = cap_log2e - (2.0 * cap_log2e) / (1.0 + gl.exp2(s * score_scale))
    if (key < whole_begin) | (key + BLOCK_N > whole_end):
        n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores)).expand_dims(0)
        keep = n <= (last - key).expand_dims(1)
        if HAS_WINDOW:
            keep = keep & (n >= (first_seen - key).expand_dims(1))
        s = gl.where(keep, s, NEG_INF)
    if HAS_SOFT_CAP:
        new_peak = gl.maximum(peak, gl.max(s, 1))
    else:
        new_peak = gl.maximum(peak, gl.max(s, 1) * score_scale)
    base = gl.where(new_peak == NEG_INF, 0.0, new_peak)
    if HAS_SOFT_CAP:
        p = gl.exp2(s - base.expand_dims(1))
    else:
        p = gl.exp2(s * score_scale - base.expand_dims(1))
    factor = gl.exp2(peak - base)
    total = total * factor + gl.sum(p, 1)
    return p, new_peak, total, factor


@gluon.jit
def _pack(p, element: gl.constexpr):
    """[64, n] fp32 -> [64, n / 2] int32 of two 16-bit values each. As single values they cost a PRMT each on their way through a loop."""
    even, odd = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    if element == gl.bfloat16:
        packed = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1)
    else:
        packed = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1)
    return packed


@gluon.jit
def _unpack(packed, operand: gl.constexpr, element: gl.constexpr):
    """The reverse of `_pack`, as wgmma's A operand: registers stay where they are."""
    even = packed.to(gl.int16).to(element, bitcast=True)
    odd = (packed >> 16).to(gl.int16).to(element, bitcast=True)
    p = gl.reshape(gl.join(even, odd), [packed.shape[0], packed.shape[1] * 2])
    return gl.convert_layout(p, operand)


@gluon.jit
def _describe(numbers, number, half: gl.constexpr, k_scale_ptr, stride_k_scale, score_scale, window_left,
              GROUP: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, scores: gl.constexpr):  # fmt: skip
    """Of a segment: (end block, number of blocks, kv_len, of each row the last key and the first one that it sees, begin and end of the
    keys that all rows see, factor of the scores)."""
    at = number % FLAGS * NUMBERS
    begin = _read_number(numbers, at + 1)
    end = _read_number(numbers, at + 2)
    first = _read_number(numbers, at + 13)
    qo_len = _read_number(numbers, at + 9)
    row_begin = _read_number(numbers, at + 10) + half * ROWS
    kv_len = _read_number(numbers, at + 12)
    token, _h = row_index(row_begin, gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores)), GROUP)
    shift = kv_len - qo_len  # bottom-right aligned
    last_key = shift + token
    last = gl.zeros_like(last_key) + (kv_len - 1)
    whole_end = kv_len
    if CAUSAL:
        last = gl.minimum(last_key, last)
        whole_end = gl.minimum(shift + row_begin // GROUP + 1, kv_len)
    first_seen = last_key
    whole_begin = 0
    if HAS_WINDOW:
        first_seen -= window_left
        whole_begin = shift + (row_begin + ROWS - 1) // GROUP - window_left
    if k_scale_ptr is not None:
        score_scale *= gl.load(k_scale_ptr + _read_number(numbers, at + 15) * stride_k_scale)
    return first + end, end - begin, kv_len, last, first_seen, whole_begin, whole_end, score_scale


@gluon.jit
def _await_q(q_bufs, q_full, number, half: gl.constexpr, Q_BOX: gl.constexpr, Q_BUFFERS: gl.constexpr):
    """The 64 rows of this consumer."""
    STEP: gl.constexpr = q_bufs.shape[0] // (2 * Q_BUFFERS)  # buffers are as wide as the wider of q and out
    parity = number % Q_BUFFERS
    mbarrier.wait(q_full.index(parity), number // Q_BUFFERS & 1)
    if Q_BOX == 0:
        fence_async_shared()
    return q_bufs.index((2 * parity + half) * STEP)


@gluon.jit
def _begin(q, stage, phase, key, last, first_seen, whole_begin, whole_end, score_scale, cap_log2e, k_bufs, k_full, k_empty, times_ptr, segment, half: gl.constexpr,
           GATHER: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr,
           BLOCK_N: gl.constexpr, scores: gl.constexpr, element: gl.constexpr):  # fmt: skip
    """Probabilities of a segment's first block, with nothing else to do."""
    record(times_ptr, segment, START, half)
    mbarrier.wait(k_full.index(stage), phase)
    record(times_ptr, segment, KEYS, half)
    if GATHER:
        fence_async_shared()
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, scores)
    s_token = warpgroup_mma(q, k_bufs.index(stage).permute([1, 0]), no_scores, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, (s_token,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    peak = gl.full([ROWS], NEG_INF, gl.float32, gl.SliceLayout(1, scores))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, scores))
    p, peak, total, _factor = _softmax(s, peak, total, key, last, first_seen, whole_begin, whole_end, score_scale, cap_log2e,
                                       HAS_WINDOW, HAS_SOFT_CAP, BLOCK_N, scores)  # fmt: skip
    return _pack(p, element), peak, total


@gluon.jit
def _iterate(q, p, peak, total, acc, v_stage, v_phase, turn, key, last, first_seen, whole_begin, whole_end, score_scale, cap_log2e,
             k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, turns, half: gl.constexpr,
             GATHER: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr,
             BLOCK_N: gl.constexpr, STAGES: gl.constexpr, scores: gl.constexpr, output: gl.constexpr, element: gl.constexpr):  # fmt: skip
    """Scores of the next block, while the values of the block before, whose probabilities are p, are summed -> (factor of that sum,
    and what the next iteration takes)."""
    stage, phase = next_stage(v_stage, v_phase, STAGES)
    mbarrier.wait(k_full.index(stage), phase)
    if GATHER:
        fence_async_shared()
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, scores)
    # The products of one consumer run during the softmax of the other (FlashAttention-3, section 3.1).
    mbarrier.wait(turns.index(half), turn)
    s_token = warpgroup_mma(q, k_bufs.index(stage).permute([1, 0]), no_scores, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    if GATHER:
        fence_async_shared()
    operand: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    o_token = warpgroup_mma(_unpack(p, operand, element), v_bufs.index(v_stage), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - half), count=1)
    s = warpgroup_mma_wait(1, (s_token,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    p, peak, total, factor = _softmax(s, peak, total, key, last, first_seen, whole_begin, whole_end, score_scale, cap_log2e,
                                      HAS_WINDOW, HAS_SOFT_CAP, BLOCK_N, scores)  # fmt: skip
    acc = warpgroup_mma_wait(0, (o_token,))
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    return factor, _pack(p, element), peak, total, acc, stage, phase, turn ^ 1


@gluon.jit
def _finish(p, acc, stage, phase, v_bufs, v_full, v_empty, GATHER: gl.constexpr, STAGES: gl.constexpr,
            output: gl.constexpr, element: gl.constexpr):  # fmt: skip
    """The values of the last block, with nothing else to do."""
    mbarrier.wait(v_full.index(stage), phase)
    if GATHER:
        fence_async_shared()
    operand: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    o_token = warpgroup_mma(_unpack(p, operand, element), v_bufs.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, (o_token,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    stage, phase = next_stage(stage, phase, STAGES)
    return acc, stage, phase


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
    fence_async_shared()
    barrier()


@gluon.jit
def _merge(partial_o_ptr, partial_lse_ptr, slot_begin, num_slots, rows, dims, BLOCK_M: gl.constexpr, BLOCK_DV: gl.constexpr,
           output: gl.constexpr):  # fmt: skip
    """Combine the partials of 64 rows in tile order -> (acc, lse2); +inf marks a bad page, NaN stays NaN."""
    peak = gl.full([ROWS], NEG_INF, gl.float32, gl.SliceLayout(1, output))
    for s in range(num_slots):
        lse = gl.load(partial_lse_ptr + (slot_begin + s).to(gl.int64) * BLOCK_M + rows)
        peak = gl.maximum(peak, lse)
    usable = (peak > NEG_INF) & (peak < POS_INF)
    base = gl.where(usable, peak, 0.0)
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, output))
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, output)
    for s in range(num_slots):
        slot_rows = (slot_begin + s).to(gl.int64) * BLOCK_M + rows
        lse = gl.load(partial_lse_ptr + slot_rows)
        weight = gl.where(usable, gl.exp2(lse - base), 0.0)
        o = gl.load(partial_o_ptr + slot_rows.expand_dims(1) * BLOCK_DV + dims.expand_dims(0))
        acc += o * weight.expand_dims(1)
        total += weight
    safe = gl.where(total > 0.0, total, 1.0)
    lse2 = gl.where(usable, base + gl.log2(safe), gl.where((peak == NEG_INF) | (peak == POS_INF), NEG_INF, peak))
    acc = gl.where((peak != peak).expand_dims(1), peak.expand_dims(1), acc / safe.expand_dims(1))
    return acc, lse2


@gluon.jit
def _consume(half: gl.constexpr, out_ptr, lse_ptr, k_scale_ptr, v_scale_ptr, worker_indptr_ptr,
             partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr, times_ptr,
             sm_scale, logits_soft_cap, lse_scale, window_left, num_q_starts, num_q_tokens,
             stride_o_start, stride_o_token, stride_o_head,
             stride_lse_start, stride_lse_token, stride_lse_head, stride_k_scale, stride_v_scale,
             q_bufs, o_bufs, q_full, q_empty, numbers, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, v_clear, flags, turns,
             GROUP: gl.constexpr, HEAD_DIM_V: gl.constexpr, DENSE: gl.constexpr,
             GATHER: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr,
             HAS_LSE: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_DV: gl.constexpr,
             STAGES: gl.constexpr, Q_BOX: gl.constexpr, Q_BUFFERS: gl.constexpr):  # fmt: skip
    BLOCK_M: gl.constexpr = 2 * ROWS
    scores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    output: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_DV, 16]
    )
    element: gl.constexpr = out_ptr.dtype.element_ty
    if HAS_SOFT_CAP:
        score_scale = sm_scale / logits_soft_cap * (2.0 * LOG2E)  # tanh(x) = 1 - 2 / (1 + exp(2 x))
    else:
        score_scale = sm_scale * LOG2E
    cap_log2e = logits_soft_cap * LOG2E
    O_STEP: gl.constexpr = o_bufs.shape[0] // (2 * Q_BUFFERS)
    Q_STEP: gl.constexpr = q_bufs.shape[0] // (2 * Q_BUFFERS)

    worker = gl.program_id(0)
    segment_begin = gl.load(worker_indptr_ptr + worker)
    segment_end = gl.load(worker_indptr_ptr + worker + 1)
    stage = 0
    phase = 0
    clear_phases = (
        1 << STAGES
    )  # a bit for each stage; begins unlike any other value, since Triton 3.6 mixes up those that begin equal
    turn = half ^ 1  # the first consumer begins
    if segment_begin < segment_end:
        if Q_BUFFERS == 2:
            q = _await_q(q_bufs, q_full, 0, half, Q_BOX, Q_BUFFERS)
            end, _b, _k, last, first_seen, whole_begin, whole_end, scale = _describe(
                numbers, 0, half, k_scale_ptr, stride_k_scale, score_scale, window_left, GROUP, CAUSAL, HAS_WINDOW, scores
            )  # fmt: skip
            p, peak, total = _begin(
                q, stage, phase, (end - 1) * BLOCK_N, last, first_seen, whole_begin, whole_end, scale, cap_log2e, k_bufs, k_full, k_empty,
                times_ptr, segment_begin, half, GATHER, HAS_WINDOW, HAS_SOFT_CAP, BLOCK_N, scores, element,
            )  # fmt: skip
        for segment in range(segment_begin, segment_end):
            number = segment - segment_begin
            if Q_BUFFERS == 1:
                q = _await_q(q_bufs, q_full, number, half, Q_BOX, Q_BUFFERS)
            else:
                q = q_bufs.index((2 * (number % 2) + half) * Q_STEP)
            end, num_blocks, kv_len, last, first_seen, whole_begin, whole_end, scale = _describe(
                numbers, number, half, k_scale_ptr, stride_k_scale, score_scale, window_left, GROUP, CAUSAL, HAS_WINDOW, scores
            )  # fmt: skip
            key = (end - 1) * BLOCK_N
            if Q_BUFFERS == 1:
                p, peak, total = _begin(
                    q, stage, phase, key, last, first_seen, whole_begin, whole_end, scale, cap_log2e, k_bufs, k_full, k_empty,
                    times_ptr, segment, half, GATHER, HAS_WINDOW, HAS_SOFT_CAP, BLOCK_N, scores, element,
                )  # fmt: skip
            if not GATHER:
                if key + BLOCK_N > kv_len:
                    if half == 0:
                        mbarrier.wait(v_full.index(stage), phase)
                        _clear_rows(v_bufs.index(stage), kv_len - key, BLOCK_N, BLOCK_DV)
                        mbarrier.arrive(v_clear.index(stage), count=1)
                    else:
                        mbarrier.wait(v_clear.index(stage), clear_phases >> stage & 1)
                    clear_phases ^= 1 << stage
            acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, output)
            for _ in range(1, num_blocks):
                key -= BLOCK_N
                factor, p, peak, total, acc, stage, phase, turn = _iterate(
                    q, p, peak, total, acc, stage, phase, turn, key, last, first_seen, whole_begin, whole_end, scale, cap_log2e,
                    k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, turns, half,
                    GATHER, HAS_WINDOW, HAS_SOFT_CAP, BLOCK_N, STAGES, scores, output, element,
                )  # fmt: skip
                acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, output)).expand_dims(1)
            next_peak = peak
            next_total = total
            if (Q_BUFFERS == 2) & (segment + 1 < segment_end):
                # The last block's values are summed during the first scores of the next segment.
                q = _await_q(q_bufs, q_full, number + 1, half, Q_BOX, Q_BUFFERS)
                end, _b, _k, last, first_seen, whole_begin, whole_end, scale = _describe(
                    numbers, number + 1, half, k_scale_ptr, stride_k_scale, score_scale, window_left, GROUP, CAUSAL, HAS_WINDOW, scores
                )  # fmt: skip
                next_peak = gl.full([ROWS], NEG_INF, gl.float32, gl.SliceLayout(1, scores))
                next_total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, scores))
                _f, p, next_peak, next_total, acc, stage, phase, turn = _iterate(
                    q, p, next_peak, next_total, acc, stage, phase, turn, (end - 1) * BLOCK_N,
                    last, first_seen, whole_begin, whole_end, scale, cap_log2e,
                    k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, turns, half,
                    GATHER, HAS_WINDOW, HAS_SOFT_CAP, BLOCK_N, STAGES, scores, output, element,
                )  # fmt: skip
            else:
                acc, stage, phase = _finish(
                    p, acc, stage, phase, v_bufs, v_full, v_empty, GATHER, STAGES, output, element
                )
            at = number % FLAGS * NUMBERS
            num_slots = _read_number(numbers, at + 5)
            q_start = _read_number(numbers, at + 8)
            qo_len = _read_number(numbers, at + 9)
            row_begin = _read_number(numbers, at + 10)
            kv_head = _read_number(numbers, at + 15)
            every: gl.constexpr = gl.BlockedLayout([flags.shape[1]], [32], [4], [0])
            is_bad = gl.max(flags.index(number % FLAGS).load(every), 0) > 0
            if is_bad:
                gl.atomic_or(status_ptr, BAD_INDEX)
            o_rows = half * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, output))
            dims = gl.arange(0, BLOCK_DV, layout=gl.SliceLayout(0, output))
            safe = gl.where(total == 0.0, 1.0, total)
            lse2 = gl.convert_layout(gl.where(total == 0.0, NEG_INF, peak + gl.log2(safe)), gl.SliceLayout(1, output))
            scale_o = gl.convert_layout(1.0 / safe, gl.SliceLayout(1, output))
            if v_scale_ptr is not None:
                scale_o *= gl.load(v_scale_ptr + kv_head * stride_v_scale)
            acc = acc * scale_o.expand_dims(1)
            finished = num_slots == 1
            acc = gl.where(is_bad, 0.0, acc)
            lse2 = gl.where(is_bad, gl.where(finished, NEG_INF, POS_INF), lse2)
            if num_slots > 1:
                slot = _read_number(numbers, at + 3)
                slot_begin = _read_number(numbers, at + 4)
                counter = _read_number(numbers, at + 6)
                slot_rows = slot.to(gl.int64) * BLOCK_M + o_rows
                gl.store(partial_o_ptr + slot_rows.expand_dims(1) * BLOCK_DV + dims.expand_dims(0), acc)
                gl.store(partial_lse_ptr + slot_rows, lse2)
                counter_ptr = counters_ptr + counter * 2 + half
                barrier()
                finished = gl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_slots - 1
                if finished:
                    record(times_ptr, segment, MERGE, half)
                    gl.store(counter_ptr, 0)
                    acc, lse2 = _merge(partial_o_ptr, partial_lse_ptr, slot_begin, num_slots, o_rows, dims,
                                       BLOCK_M, BLOCK_DV, output)  # fmt: skip
            if finished:
                _store_rows(out_ptr, o_bufs.index((2 * (number % Q_BUFFERS) + half) * O_STEP), acc.to(element), kv_head, q_start, qo_len, row_begin + half * ROWS, num_q_starts, num_q_tokens,
                            stride_o_start, stride_o_token, stride_o_head, GROUP, HEAD_DIM_V, BLOCK_DV, DENSE)  # fmt: skip
                if HAS_LSE:
                    _store_lse(lse_ptr, lse2 * lse_scale, o_rows, kv_head, q_start, qo_len, row_begin, num_q_starts, num_q_tokens,
                               stride_lse_start, stride_lse_token, stride_lse_head, GROUP, DENSE)  # fmt: skip
            record(times_ptr, segment, END, half)
            if (Q_BUFFERS == 2) & (segment + 1 < segment_end):
                record(times_ptr, segment + 1, START, half)
                record(times_ptr, segment + 1, KEYS, half)
            # The buffer, through which the output went, is free for a later tile's q.
            fence_async_shared()
            barrier()
            mbarrier.arrive(q_empty.index(number % Q_BUFFERS), count=1)
            peak = next_peak
            total = next_total


# Sizes of the batch are not specialised on: no compilation for a batch of one, or of a multiple of 16.
@gluon.jit(
    do_not_specialize=["window_left", "heads_per_row", "num_q_starts", "num_q_tokens", "num_pages", "num_indices",
                       "stride_k_scale", "stride_v_scale"]
)  # fmt: skip
def prefill(q, k, v, out_ptr, lse_ptr, kv_indices_ptr, k_scale_ptr, v_scale_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
            partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr, times_ptr,
            sm_scale, logits_soft_cap, lse_scale, window_left, heads_per_row, num_q_starts, num_q_tokens, num_pages, num_indices,
            stride_q_start, stride_q_token, stride_q_head,
            stride_k_page, stride_k_token, stride_k_head,
            stride_v_page, stride_v_token, stride_v_head,
            stride_o_start, stride_o_token, stride_o_head,
            stride_lse_start, stride_lse_token, stride_lse_head, stride_k_scale, stride_v_scale,
            GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, PAGE_SIZE: gl.constexpr, DENSE: gl.constexpr,
            GATHER: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr, HAS_LSE: gl.constexpr,
            BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, Q_BOX: gl.constexpr, Q_BUFFERS: gl.constexpr,
            CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Arguments as in `kernels.forward`, but for these. q: TMA descriptor of boxes [Q_BOX, 1, GROUP, 64], 64 packed rows, in [tokens, KV
    heads, GROUP, dims], before which DENSE has requests; pointer for Q_BOX = 0. k, v: TMA descriptors of boxes [1, 1, BOX, 64] in
    [pages or requests, heads, tokens, dims]; pointers for GATHER. heads_per_row: KV heads that a row of the tile table stands for, one after the other from the
    row's HEAD column on. The tile is 128 packed rows; counters has two counters a split tile. fp8 k and v are pointers; q may be
    fp8 as well."""
    element: gl.constexpr = out_ptr.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # Q_BUFFERS q buffers a consumer; the one that is done with serves to write the output.
    widest: gl.constexpr = max(BLOCK_D, BLOCK_DV)
    q_panels = gl.allocate_shared_memory(element, [2 * Q_BUFFERS * (widest // PANEL), ROWS, PANEL], swizzled)
    q_bufs = q_panels._reinterpret(element, [2 * Q_BUFFERS * (widest // BLOCK_D), ROWS, BLOCK_D], swizzled)
    o_bufs = q_panels._reinterpret(element, [2 * Q_BUFFERS * (widest // BLOCK_DV), ROWS, BLOCK_DV], swizzled)
    k_panels = gl.allocate_shared_memory(element, [STAGES * BLOCK_D // PANEL, BLOCK_N, PANEL], swizzled)
    v_panels = gl.allocate_shared_memory(element, [STAGES * BLOCK_DV // PANEL, BLOCK_N, PANEL], swizzled)
    k_bufs = k_panels._reinterpret(element, [STAGES, BLOCK_N, BLOCK_D], swizzled)
    v_bufs = v_panels._reinterpret(element, [STAGES, BLOCK_N, BLOCK_DV], swizzled)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    WARPS_OF_KEYS: gl.constexpr = BLOCK_N // 32 if GATHER else 1
    flags = gl.allocate_shared_memory(gl.int32, [FLAGS, WARPS_OF_KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    FP8: gl.constexpr = k_scale_ptr is not None
    arrivals: gl.constexpr = 128 if GATHER and not FP8 else 1  # each thread of the gathering producer arrives
    if FP8:
        rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        k_raw = gl.allocate_shared_memory(k.dtype.element_ty, [BLOCK_N, BLOCK_D], rows)
        v_raw = gl.allocate_shared_memory(k.dtype.element_ty, [BLOCK_N, BLOCK_DV], rows)
    else:
        k_raw = k_bufs
        v_raw = v_bufs
    PRODUCER_WARPS: gl.constexpr = 4 if GATHER else 1
    pages = gl.allocate_shared_memory(gl.int32, [2, BLOCK_N if GATHER else 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS, 1], mbarrier.MBarrierLayout())
    numbers = gl.allocate_shared_memory(gl.int32, [FLAGS * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    number_rows = numbers._reinterpret(gl.int32, [FLAGS, NUMBERS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(Q_BUFFERS):
        mbarrier.init(q_full.index(i), count=1 if Q_BOX > 0 else 32 * PRODUCER_WARPS)
        mbarrier.init(q_empty.index(i), count=2)
    v_clear = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=arrivals)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=arrivals)
        mbarrier.init(v_empty.index(i), count=2)
        mbarrier.init(v_clear.index(i), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # the kernel before, which may write what this one reads or use the same workspace, ends here
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (FIRST,
                        out_ptr, lse_ptr, k_scale_ptr, v_scale_ptr, worker_indptr_ptr,
                        partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr, times_ptr,
                        sm_scale, logits_soft_cap, lse_scale, window_left, num_q_starts, num_q_tokens,
                        stride_o_start, stride_o_token, stride_o_head,
                        stride_lse_start, stride_lse_token, stride_lse_head, stride_k_scale, stride_v_scale,
                        q_bufs, o_bufs, q_full, q_empty, numbers, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, v_clear, flags, turns,
                        GROUP, HEAD_DIM_V, DENSE, GATHER, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_LSE,
                        BLOCK_N, BLOCK_DV, STAGES, Q_BOX, Q_BUFFERS)),
            (_consume, (SECOND,
                        out_ptr, lse_ptr, k_scale_ptr, v_scale_ptr, worker_indptr_ptr,
                        partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr, times_ptr,
                        sm_scale, logits_soft_cap, lse_scale, window_left, num_q_starts, num_q_tokens,
                        stride_o_start, stride_o_token, stride_o_head,
                        stride_lse_start, stride_lse_token, stride_lse_head, stride_k_scale, stride_v_scale,
                        q_bufs, o_bufs, q_full, q_empty, numbers, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, v_clear, flags, turns,
                        GROUP, HEAD_DIM_V, DENSE, GATHER, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_LSE,
                        BLOCK_N, BLOCK_DV, STAGES, Q_BOX, Q_BUFFERS)),
            (produce, (q, k, v, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
                        heads_per_row, num_q_starts, num_q_tokens, num_pages, num_indices, stride_q_start, stride_q_token, stride_q_head,
                        stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
                        q_panels, q_bufs, q_full, q_empty, number_rows,
                        pages, k_raw, v_raw, k_panels, v_panels, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty, flags,
                        GROUP, HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, DENSE, GATHER, BLOCK_N, BLOCK_D, BLOCK_DV, BOX,
                        STAGES, Q_BOX, Q_BUFFERS)),
        ],
        [4, PRODUCER_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip

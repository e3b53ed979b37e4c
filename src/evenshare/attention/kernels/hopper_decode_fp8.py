"""`hopper_decode` for fp8 keys and values: twice the keys for the bytes, so more is to do in the time that memory gives.

K and V are the A operands of S^T = K Q^T and O^T = V^T P^T, and wgmma takes those from registers: a consumer loads the codes of a block
into registers as wgmma wants 16-bit numbers, a pair of codes for each number, and widens them there to two operands, one of the pairs'
low codes and one of the high ones. No 16-bit K or V ever lies in shared memory, which could not take that many bytes in and out. The
pairs are neighbours in a row, so the low codes are the even dims: of K these go with the even dims of q, of V they give the even dims of
the output. Two consumers of four warps take the blocks of the ring in turns, with sums of their own that the first one joins.

Arithmetic is in fp16, which holds every code, of q as well, whatever the type of the others: a row of bf16 q is divided by a power of two. Probabilities are
multiplied by 2^14, so that those fp16 loses are below 2^-38.
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
    POS_INF,
    SEGMENT_COLUMNS,
    load_tile,
    load_tile_id,
    pieces,
    row_index,
    valid_rows,
)
from evenshare.attention.kernels.hopper_decode import _clear_rows, _merge, _softmax, produce
from evenshare.device.clock import END, KEYS, MERGE, START, record
from evenshare.device.gluon import barrier

PANEL = gl.constexpr(128)  # dims of a TMA box: 128 bytes, the widest swizzle
FLAGS = gl.constexpr(16)  # segments that the producer may be ahead, and more
P_SCALE = gl.constexpr(2.0**14)


@gluon.jit
def _widen(pairs):
    """int16 pairs of fp8 codes -> (their low codes, their high codes) as fp16, exactly; NaN stays NaN."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        .reg .b16 low, high;
        prmt.b32 t, $2, 0, 0x3120;
        mov.b32 {low, high}, t;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [pairs],
        (gl.float16, gl.float16),
        True,
        2,
    )


@gluon.jit
def _load_q(q_ptr, kv_head, q_start, qo_len, row_begin, num_q_starts, num_q_tokens, stride_start, stride_token, stride_head,
            GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, DENSE: gl.constexpr):  # fmt: skip
    """The packed rows of a tile of q; rows past the request are zero."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
    token, head = row_index(row_begin, rows, GROUP)
    valid = valid_rows(token, q_start, qo_len, num_q_starts, num_q_tokens, DENSE)
    offsets = q_start.to(gl.int64) * pieces(stride_start) + kv_head.to(gl.int64) * (GROUP * pieces(stride_head))
    offsets += token.to(gl.int64) * pieces(stride_token) + head.to(gl.int64) * pieces(stride_head)
    mask = valid.expand_dims(1) & (d < HEAD_DIM).expand_dims(0)
    return gl.load(q_ptr + offsets.expand_dims(1) + d.expand_dims(0), mask=mask, other=0.0)


@gluon.jit
def _place_q(q, low_buf, high_buf):
    """Write the even and the odd dims of q as fp16 -> what its rows were divided by."""
    if q.dtype == gl.bfloat16:
        wide = q.to(gl.float32)
        exponent = gl.max(gl.abs(wide), 1).to(gl.int32, bitcast=True) & 0x7F800000
        divisor = exponent.to(gl.float32, bitcast=True)
        inverse = (0x7F000000 - exponent).to(gl.float32, bitcast=True)
        q = (wide * inverse.expand_dims(1)).to(gl.float16)
    else:
        q = q.to(gl.float16)
        divisor = gl.full([q.shape[0]], 1.0, gl.float32, gl.SliceLayout(1, q.type.layout))
    low, high = gl.split(gl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))
    low_buf.store(low)
    high_buf.store(high)
    return divisor


@gluon.jit
def _interleave(low, high):
    """[d, rows] of the even and of the odd dims -> [2 d, rows]."""
    return gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [2 * low.shape[0], low.shape[1]])


@gluon.jit
def _consume(half: gl.constexpr, q_ptr, out_ptr, lse_ptr, k_scale_ptr, v_scale_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
             partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr, times_ptr,
             sm_scale, logits_soft_cap, lse_scale, window_left, heads_per_row, num_q_starts, num_q_tokens,
             stride_q_start, stride_q_token, stride_q_head, stride_o_start, stride_o_token, stride_o_head,
             stride_lse_start, stride_lse_token, stride_lse_head, stride_k_scale, stride_v_scale,
             q_bufs, p_bufs, k_bufs, v_bufs, full, empty, o_bufs, row_bufs, o_full, o_empty, flags,
             GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, DENSE: gl.constexpr,
             GATHER: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr, HAS_LSE: gl.constexpr,
             BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    by_row: gl.constexpr = gl.SliceLayout(0, layout)
    element: gl.constexpr = out_ptr.dtype.element_ty
    if HAS_SOFT_CAP:
        score_scale = sm_scale / logits_soft_cap * (2.0 * LOG2E)  # tanh(x) = 1 - 2 / (1 + exp(2 x))
    else:
        score_scale = sm_scale * LOG2E
    cap_log2e = logits_soft_cap * LOG2E
    rows = gl.arange(0, BLOCK_M, layout=by_row)
    no_scores = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    low_buf = q_bufs.index(2 * half)
    high_buf = q_bufs.index(2 * half + 1)
    p_buf = p_bufs.index(half).permute([1, 0])

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
    q = _load_q(q_ptr, kv_head, q_start, qo_len, row_begin, num_q_starts, num_q_tokens,
                stride_q_start, stride_q_token, stride_q_head, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D, DENSE)  # fmt: skip
    k_scale = gl.load(k_scale_ptr + kv_head * stride_k_scale)
    block = 0  # of the ring, the segment's first
    for segment in range(segment_begin, segment_end):
        record(times_ptr, segment, START, half)
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
        v_scale = gl.load(v_scale_ptr + kv_head * stride_v_scale)
        token, _h = row_index(row_begin, rows, GROUP)
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
        sums = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
        low = gl.zeros([BLOCK_DV // 2, BLOCK_M], gl.float32, layout)
        high = gl.zeros([BLOCK_DV // 2, BLOCK_M], gl.float32, layout)

        barrier()
        divisor = gl.convert_layout(_place_q(q, low_buf, high_buf), by_row)
        row_scale = (divisor * (score_scale * k_scale)).expand_dims(0)
        fence_async_shared()
        barrier()
        q = _load_q(q_ptr, next_head, next_start, next_len, next_row, num_q_starts, num_q_tokens,
                    stride_q_start, stride_q_token, stride_q_head, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D, DENSE)  # fmt: skip
        k_scale = gl.load(k_scale_ptr + next_head * stride_k_scale)
        first = (block ^ half) & 1  # the ring's blocks are taken in turns
        key = (end - num_blocks + first) * BLOCK_N
        for i in range(first, num_blocks, 2):
            stage = (block + i) % STAGES
            mbarrier.wait(full.index(stage), (block + i) // STAGES & 1)
            if i == first:
                record(times_ptr, segment, KEYS, half)
            k_low, k_high = _widen(k_bufs.index(stage).load(operand))
            s = warpgroup_mma(k_low, low_buf.permute([1, 0]), no_scores, use_acc=False, is_async=True)
            s = warpgroup_mma(k_high, high_buf.permute([1, 0]), s, is_async=True)
            s = warpgroup_mma_wait(0, (s,))
            if not GATHER:
                if key + BLOCK_N > kv_len:
                    _clear_rows(v_bufs.index(stage), kv_len - key, BLOCK_N, BLOCK_DV // 2)
                    barrier()
            v_low, v_high = _widen(v_bufs.index(stage).permute([1, 0]).load(operand))
            p, peak, sums, factor = _softmax(
                s, peak, sums, key, last, first_seen, row_scale, cap_log2e, HAS_WINDOW, HAS_SOFT_CAP, BLOCK_N, layout
            )
            low = low * factor.expand_dims(0)
            high = high * factor.expand_dims(0)
            p_buf.store((p * P_SCALE).to(gl.float16))
            fence_async_shared()
            barrier()
            mbarrier.arrive(empty.index(stage), count=1)  # all four warps have read the block
            low = warpgroup_mma(v_low, p_buf, low, is_async=True)
            high = warpgroup_mma(v_high, p_buf, high, is_async=True)
            low, high = warpgroup_mma_wait(0, (low, high))
            key += 2 * BLOCK_N
        block += num_blocks
        total = gl.sum(sums, 0)

        turn = (segment - segment_begin) & 1
        if half == 1:
            mbarrier.wait(o_empty, turn ^ 1)
            o_bufs.index(0).store(low)
            o_bufs.index(1).store(high)
            row_bufs.index(0).store(peak)
            row_bufs.index(1).store(total)
            barrier()
            mbarrier.arrive(o_full, count=1)
        else:
            mbarrier.wait(o_full, turn)
            other_peak = row_bufs.index(0).load(by_row)
            new_peak = gl.maximum(peak, other_peak)
            base = gl.where(new_peak == NEG_INF, 0.0, new_peak)
            factor = gl.exp2(peak - base)
            other_factor = gl.exp2(other_peak - base)
            total = total * factor + row_bufs.index(1).load(by_row) * other_factor
            factor = factor.expand_dims(0)
            other_factor = other_factor.expand_dims(0)
            low = low * factor + o_bufs.index(0).load(layout) * other_factor
            high = high * factor + o_bufs.index(1).load(layout) * other_factor
            barrier()
            mbarrier.arrive(o_empty, count=1)

            one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            is_bad = gl.max(flags.index((segment - segment_begin) % FLAGS).load(one), 0) > 0
            if is_bad:
                gl.atomic_or(status_ptr, BAD_INDEX)
            safe = gl.where(total == 0.0, 1.0, total)
            lse2 = gl.where(total == 0.0, NEG_INF, new_peak + gl.log2(safe))
            acc = _interleave(low, high)
            output: gl.constexpr = acc.type.layout
            dims = gl.arange(0, BLOCK_DV, layout=gl.SliceLayout(1, output))
            o_rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, output))
            scale = gl.convert_layout(v_scale / P_SCALE / safe, gl.SliceLayout(0, output))
            lse2 = gl.convert_layout(lse2, gl.SliceLayout(0, output))
            acc = acc * scale.expand_dims(0)
            finished = num_slots == 1
            acc = gl.where(is_bad, 0.0, acc)
            lse2 = gl.where(is_bad, gl.where(finished, NEG_INF, POS_INF), lse2)
            if num_slots > 1:
                own = slot.to(gl.int64)
                offsets = o_rows.expand_dims(0) * BLOCK_DV + dims.expand_dims(1)
                gl.store(partial_o_ptr + own * (BLOCK_M * BLOCK_DV) + offsets, acc)
                gl.store(partial_lse_ptr + own * BLOCK_M + o_rows, lse2)
                counter_ptr = counters_ptr + counter
                barrier()
                finished = gl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_slots - 1
                if finished:
                    record(times_ptr, segment, MERGE, half)
                    gl.store(counter_ptr, 0)
                    acc, lse2 = _merge(
                        partial_o_ptr, partial_lse_ptr, slot_begin, num_slots, o_rows, dims, BLOCK_M, BLOCK_DV, output
                    )
            if finished:
                o_token, o_head = row_index(row_begin, o_rows, GROUP)
                valid = valid_rows(o_token, q_start, qo_len, num_q_starts, num_q_tokens, DENSE)
                offsets = q_start.to(gl.int64) * stride_o_start + kv_head.to(gl.int64) * (GROUP * stride_o_head)
                offsets += o_token.to(gl.int64) * stride_o_token + o_head.to(gl.int64) * stride_o_head
                mask = valid.expand_dims(0) & (dims < HEAD_DIM_V).expand_dims(1)
                gl.store(out_ptr + offsets.expand_dims(0) + dims.expand_dims(1), acc.to(element), mask=mask)
                if HAS_LSE:
                    offsets = q_start.to(gl.int64) * stride_lse_start + kv_head.to(gl.int64) * (GROUP * stride_lse_head)
                    offsets += o_token.to(gl.int64) * stride_lse_token + o_head.to(gl.int64) * stride_lse_head
                    gl.store(lse_ptr + offsets, lse2 * lse_scale, mask=valid)
        record(times_ptr, segment, END, half)
        kv_head, q_start, qo_len, row_begin = next_head, next_start, next_len, next_row
        kv_len, end = next_kv_len, next_end


# Sizes of the batch are not specialised on: no compilation for a batch of one, or of a multiple of 16.
@gluon.jit(
    do_not_specialize=["window_left", "heads_per_row", "num_q_starts", "num_q_tokens", "num_pages", "num_indices",
                       "stride_k_scale", "stride_v_scale"]
)  # fmt: skip
def decode(q_ptr, k, v, out_ptr, lse_ptr, kv_indices_ptr, k_scale_ptr, v_scale_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
           partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr, times_ptr,
           sm_scale, logits_soft_cap, lse_scale, window_left, heads_per_row, num_q_starts, num_q_tokens, num_pages, num_indices,
           stride_q_start, stride_q_token, stride_q_head,
           stride_k_page, stride_k_token, stride_k_head,
           stride_v_page, stride_v_token, stride_v_head,
           stride_o_start, stride_o_token, stride_o_head,
           stride_lse_start, stride_lse_token, stride_lse_head, stride_k_scale, stride_v_scale,
           GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, PAGE_SIZE: gl.constexpr, DENSE: gl.constexpr,
           GATHER: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr, HAS_LSE: gl.constexpr,
           BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BOX: gl.constexpr,
           STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Arguments as those of `hopper_decode.decode` and, of the scales, `kernels.forward`. BLOCK_D and BLOCK_DV are multiples of 128."""
    codes: gl.constexpr = gl.float8e4nv
    bytes: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    words: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    q_bufs = gl.allocate_shared_memory(gl.float16, [4, BLOCK_M, BLOCK_D // 2], words)
    p_bufs = gl.allocate_shared_memory(gl.float16, [2, BLOCK_M, BLOCK_N], words)
    k_panels = gl.allocate_shared_memory(codes, [STAGES * BLOCK_D // PANEL, BLOCK_N, PANEL], bytes)
    v_panels = gl.allocate_shared_memory(codes, [STAGES * BLOCK_DV // PANEL, BLOCK_N, PANEL], bytes)
    k_codes = k_panels._reinterpret(codes, [STAGES, BLOCK_N, BLOCK_D], bytes)
    v_codes = v_panels._reinterpret(codes, [STAGES, BLOCK_N, BLOCK_DV], bytes)
    k_bufs = k_panels._reinterpret(gl.int16, [STAGES, BLOCK_N, BLOCK_D // 2], words)
    v_bufs = v_panels._reinterpret(gl.int16, [STAGES, BLOCK_N, BLOCK_DV // 2], words)
    o_bufs = gl.allocate_shared_memory(gl.float32, [2, BLOCK_DV // 2, BLOCK_M], plain)  # from the second consumer
    row_bufs = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], vector)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)  # of K and of V
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    o_full = gl.allocate_shared_memory(gl.int64, [1], barriers)
    o_empty = gl.allocate_shared_memory(gl.int64, [1], barriers)
    warm = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(warm, count=1)
    flags = gl.allocate_shared_memory(gl.int32, [FLAGS, 1], vector)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=256 if GATHER else 2)  # each thread of the gathering producer arrives
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(o_full, count=1)
    mbarrier.init(o_empty, count=1)
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # the kernel before, which may write what this one reads or use the same workspace, ends here
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    PRODUCER_WARPS: gl.constexpr = 4 if GATHER else 1
    gl.warp_specialize(
        [
            (_consume, (FIRST,
                        q_ptr, out_ptr, lse_ptr, k_scale_ptr, v_scale_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
                        partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr, times_ptr,
                        sm_scale, logits_soft_cap, lse_scale, window_left, heads_per_row, num_q_starts, num_q_tokens,
                        stride_q_start, stride_q_token, stride_q_head, stride_o_start, stride_o_token, stride_o_head,
                        stride_lse_start, stride_lse_token, stride_lse_head, stride_k_scale, stride_v_scale,
                        q_bufs, p_bufs, k_bufs, v_bufs, full, empty, o_bufs, row_bufs, o_full, o_empty, flags,
                        GROUP, HEAD_DIM, HEAD_DIM_V, DENSE, GATHER, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_LSE,
                        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES)),
            (_consume, (SECOND,
                        q_ptr, out_ptr, lse_ptr, k_scale_ptr, v_scale_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
                        partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr, times_ptr,
                        sm_scale, logits_soft_cap, lse_scale, window_left, heads_per_row, num_q_starts, num_q_tokens,
                        stride_q_start, stride_q_token, stride_q_head, stride_o_start, stride_o_token, stride_o_head,
                        stride_lse_start, stride_lse_token, stride_lse_head, stride_k_scale, stride_v_scale,
                        q_bufs, p_bufs, k_bufs, v_bufs, full, empty, o_bufs, row_bufs, o_full, o_empty, flags,
                        GROUP, HEAD_DIM, HEAD_DIM_V, DENSE, GATHER, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_LSE,
                        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES)),
            (produce, (k, v, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
                        heads_per_row, num_pages, num_indices, stride_k_page, stride_k_token, stride_k_head,
                        stride_v_page, stride_v_token, stride_v_head,
                        k_panels, v_panels, k_codes, v_codes, full, empty, full, empty, warm, flags,
                        HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, DENSE, GATHER, BLOCK_N, BLOCK_D, BLOCK_DV, BOX, STAGES)),
        ],
        [4, PRODUCER_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip

"""Portable attention forward: one worker walks its segments of the plan, and the last arriver merges a split tile.

A tile is BLOCK_M packed rows of one request and one KV head: row p of a request is query token p // GROUP and query head
kv_head * GROUP + p % GROUP, so the query heads of one KV head share every key that is loaded (FlashInfer, section 3.2).
An iteration is BLOCK_N keys. Softmax runs in base 2 (FlashAttention-2's order of operations); a partial is (o, lse) in fp32.

fp8 keys, values and queries become numbers of the output's type, exactly; the scale of k, with that of q in it, joins the scores',
that of v the output's.

A variant is a few device functions (`attention.variants`): VARIANT changes the scores, in units of e, and hides some; SINK gives each row
a score that joins its denominator. Without SOFTMAX scores are weights, hidden ones 0, and a partial is (o, 0). QUERY, KEY, VALUE and
OUTPUT, if not None, change vectors in fp32: queries once for each tile, keys and values whenever they are loaded.

A partial whose request points outside the cache carries lse = +inf: the merge turns the tile into o = 0, lse = -inf.
"""

import triton
import triton.language as tl

from evenshare.attention.kernels.state import join, merge_tile, store_rows, with_sink
from evenshare.device.arithmetic import tanh
from evenshare.device.clock import END, START, record

# Columns of the segment table (schedule.plan) and of the tile table (attention.tiles), and status bits, as kernels see them.
SEGMENT_COLUMNS = tl.constexpr(8)
TILE_COLUMNS = tl.constexpr(8)
BAD_INDEX = tl.constexpr(8)
NEG_INF = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(q, peak, total, acc, bad, k_ptr, v_ptr, kv_indices_ptr, variant_args, request, kv_head, head, block, kv_start, kv_len,
            readable_len, num_pages, last_key, score_scale, logits_soft_cap, window_left, k_head, v_head, stride_k_page, stride_k_token, stride_v_page, stride_v_token,
            HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE_SIZE: tl.constexpr, SAME_STRIDES: tl.constexpr,
            MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
            VARIANT: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BASE_2: tl.constexpr, SOFTMAX: tl.constexpr):  # fmt: skip
    """One iteration: the keys of `block` join the softmax state. MASKED is off for blocks that every row sees whole."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if PAGE_SIZE > 0:
        page = tl.load(kv_indices_ptr + kv_start + n // PAGE_SIZE, mask=n < readable_len, other=-1)
        readable = page.to(tl.uint32, bitcast=True) < num_pages  # false for -1 as well
        token = n % PAGE_SIZE
        k_rows = page.to(tl.int64) * stride_k_page + token.to(tl.int64) * stride_k_token
        if SAME_STRIDES:
            v_rows = k_rows
        else:
            v_rows = page.to(tl.int64) * stride_v_page + token.to(tl.int64) * stride_v_token
        bad |= (readable != (n < kv_len)).to(tl.int32)
    else:
        readable = n < readable_len
        k_rows = kv_start * stride_k_page + n.to(tl.int64) * stride_k_token
        v_rows = kv_start * stride_v_page + n.to(tl.int64) * stride_v_token
    k_mask = readable[None, :] & (d < HEAD_DIM)[:, None]
    v_mask = readable[:, None] & (dv < HEAD_DIM_V)[None, :]
    k = tl.load(k_ptr + k_head + k_rows[None, :] + d[:, None], mask=k_mask, other=0.0)
    v = tl.load(v_ptr + v_head + v_rows[:, None] + dv[None, :], mask=v_mask, other=0.0)
    if KEY is not None:
        k = KEY(k.to(tl.float32), k_ptr + k_head + k_rows[None, :], readable[None, :], request, kv_head.to(tl.int32), n[None, :],
                d[:, None], variant_args, HEAD_DIM, 0)  # fmt: skip
    if VALUE is not None:
        v = VALUE(v.to(tl.float32), v_ptr + v_head + v_rows[:, None], readable[:, None], request, kv_head.to(tl.int32), n[:, None],
                  dv[None, :], variant_args, HEAD_DIM_V, 1)  # fmt: skip
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    s = tl.dot(q, k, input_precision=PRECISION) * score_scale
    if HAS_SOFT_CAP:
        s = (logits_soft_cap * LOG2E if BASE_2 else logits_soft_cap) * tanh(s)  # the softmax is in base 2
    if VARIANT is not None:
        s = VARIANT(s, request, head.to(tl.int32)[:, None], last_key[:, None], n[None, :], variant_args)
        if SOFTMAX and not BASE_2:
            s *= LOG2E
    if MASKED:
        keep = (n < kv_len)[None, :]
        if CAUSAL:
            keep = keep & (n[None, :] <= last_key[:, None])
        if HAS_WINDOW:
            keep = keep & (n[None, :] + window_left >= last_key[:, None])
        s = tl.where(keep, s, NEG_INF if SOFTMAX else 0.0)
    peak, total, acc = join(s, v, peak, total, acc, PRECISION, SOFTMAX)
    return peak, total, acc, bad


# Sizes of the batch are not specialised on: no compilation for a batch of one, or of a multiple of 16.
@triton.jit(do_not_specialize=["window_left", "num_q_starts", "num_q_tokens", "num_pages", "num_indices",
                                 "stride_k_scale", "stride_v_scale"])  # fmt: skip
def forward(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, kv_indices_ptr, k_scale_ptr, v_scale_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
            partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr, times_ptr,
            sm_scale, logits_soft_cap, lse_scale, window_left, num_kv_heads, num_q_starts, num_q_tokens, num_pages, num_indices,
            stride_q_start, stride_q_token, stride_q_head,
            stride_k_page, stride_k_token, stride_k_head,
            stride_v_page, stride_v_token, stride_v_head,
            stride_o_start, stride_o_token, stride_o_head,
            stride_lse_start, stride_lse_token, stride_lse_head, stride_k_scale, stride_v_scale, variant_args,
            GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE_SIZE: tl.constexpr, DENSE: tl.constexpr,
            SAME_STRIDES: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_LSE: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
            NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr,
            VARIANT: tl.constexpr, SINK: tl.constexpr, QUERY: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, OUTPUT: tl.constexpr,
            BASE_2: tl.constexpr, SOFTMAX: tl.constexpr):  # fmt: skip
    """PAGE_SIZE > 0: k and v are pages, found through kv_indices. PAGE_SIZE == 0: contiguous keys, the request's first at
    kv_start * stride_k_page. DENSE: q_start and kv_start count batch entries (stride_*_start, stride_*_page are batch strides);
    otherwise they count tokens, or entries of kv_indices, and stride_q_start == stride_q_token.
    times_ptr: times of the segments (`device.clock`), or None.
    k_scale_ptr, v_scale_ptr: fp32, one for each KV head or, with stride 0, for all; None: k and v have q's dtype, and that is the output's.
    SAME_STRIDES: k and v have the same page and token strides, so their row offsets are computed once.
    VARIANT, SINK, QUERY, KEY, VALUE, OUTPUT: device functions or None (`variants.program`); variant_args: the tensors they read, a
    flat tuple or None. BASE_2: no function wants the
    scores in units of e, so log2(e) is in their scale."""
    worker = tl.program_id(0)
    rows = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    if HAS_SOFT_CAP:
        score_scale = sm_scale / logits_soft_cap
    else:
        score_scale = sm_scale * LOG2E if BASE_2 else sm_scale
    segment_end = tl.load(worker_indptr_ptr + worker + 1)
    for segment in range(tl.load(worker_indptr_ptr + worker), segment_end):
        record(times_ptr, segment, START)
        row = segments_ptr + segment * SEGMENT_COLUMNS
        tile = tl.load(row)
        block_lo = tl.load(row + 1)
        block_hi = tl.load(row + 2)
        slot = tl.load(row + 3)
        slot_begin = tl.load(row + 4)
        num_slots = tl.load(row + 5)
        counter = tl.load(row + 6)

        row_tile = tile // num_kv_heads
        kv_head = tl.cast(tile - row_tile * num_kv_heads, tl.int64)
        info = tiles_ptr + row_tile.to(tl.int64) * TILE_COLUMNS
        q_start = tl.load(info).to(tl.int64)
        qo_len = tl.load(info + 1)
        row_begin = tl.load(info + 2)
        kv_start = tl.load(info + 3).to(tl.int64)
        kv_len = tl.load(info + 4)
        first_block = tl.load(info + 5)
        kv_head += tl.load(info + 7)
        request = 0
        if VARIANT is not None:
            request = tl.load(info + 6)

        packed = row_begin + rows
        q_idx = packed // GROUP
        head = kv_head * GROUP + (packed - q_idx * GROUP)
        # Every index is clamped to what the caller's tensors hold: the plan's values may come from the device, unread.
        rows_valid = packed < qo_len * GROUP
        if DENSE:
            rows_valid &= (q_start < num_q_starts) & (q_idx < num_q_tokens)
        else:
            rows_valid &= q_start + q_idx < num_q_tokens
        if PAGE_SIZE > 0:
            readable_len = tl.minimum(kv_len, tl.maximum(num_indices - kv_start, 0) * PAGE_SIZE)
        elif DENSE:
            readable_len = tl.where(kv_start < num_pages, kv_len, 0)
        else:
            readable_len = tl.minimum(kv_len, tl.maximum(num_pages - kv_start, 0))
        q_rows = q_start * stride_q_start + q_idx.to(tl.int64) * stride_q_token + head * stride_q_head
        q = tl.load(q_ptr + q_rows[:, None] + d[None, :], mask=rows_valid[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        last_key = kv_len - qo_len + q_idx  # bottom-right aligned: the last key that a causal row sees
        if QUERY is not None:
            q = QUERY(q.to(tl.float32), (q_ptr + q_rows)[:, None], rows_valid[:, None], request, head.to(tl.int32)[:, None],
                      last_key[:, None], d[None, :], variant_args, HEAD_DIM, 1)  # fmt: skip
        q = q.to(out_ptr.dtype.element_ty)

        # Blocks before whole_end need no mask: every row of the tile sees all their keys.
        whole_keys = kv_len
        if CAUSAL:
            whole_keys = tl.minimum(whole_keys, tl.maximum(kv_len - qo_len + row_begin // GROUP + 1, 0))
        begin = first_block + block_lo
        end = first_block + block_hi
        # A second loop costs registers, which float32, wide heads and transforms do not have (they spill by the hundreds): all
        # masked there.
        TWO_LOOPS: tl.constexpr = (
            (not HAS_WINDOW) and BLOCK_D <= 128 and BLOCK_DV <= 128 and q_ptr.dtype.element_ty != tl.float32
        ) and (KEY is None and VALUE is None)
        whole_end = begin
        if TWO_LOOPS:
            whole_end = tl.minimum(tl.maximum(whole_keys // BLOCK_N, begin), end)
        peak = tl.full([BLOCK_M], NEG_INF, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        bad = tl.zeros([BLOCK_N], tl.int32)
        k_head = kv_head * stride_k_head
        v_head = kv_head * stride_v_head
        head_scale = score_scale
        if k_scale_ptr is not None:
            head_scale *= tl.load(k_scale_ptr + kv_head * stride_k_scale)
        if TWO_LOOPS:
            for block in tl.range(begin, whole_end, num_stages=NUM_STAGES):
                peak, total, acc, bad = _attend(
                    q, peak, total, acc, bad, k_ptr, v_ptr, kv_indices_ptr, variant_args, request, kv_head, head, block, kv_start, kv_len,
                    readable_len, num_pages, last_key, head_scale, logits_soft_cap, window_left, k_head, v_head, stride_k_page, stride_k_token, stride_v_page,
                    stride_v_token, HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, SAME_STRIDES, False, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP,
                    BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, VARIANT, KEY, VALUE, BASE_2, SOFTMAX,
                )  # fmt: skip
        for block in tl.range(whole_end, end, num_stages=1 if TWO_LOOPS else NUM_STAGES):
            peak, total, acc, bad = _attend(
                q, peak, total, acc, bad, k_ptr, v_ptr, kv_indices_ptr, variant_args, request, kv_head, head, block, kv_start, kv_len,
                readable_len, num_pages, last_key, head_scale, logits_soft_cap, window_left, k_head, v_head, stride_k_page, stride_k_token, stride_v_page,
                stride_v_token, HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, SAME_STRIDES, True, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP,
                BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, VARIANT, KEY, VALUE, BASE_2, SOFTMAX,
            )  # fmt: skip

        is_bad = (tl.max(bad, 0) > 0) | (readable_len < kv_len)
        if is_bad:
            tl.atomic_or(status_ptr, BAD_INDEX)
        if SOFTMAX:
            safe = tl.where(total == 0.0, 1.0, total)
            acc = acc / safe[:, None]
        if v_scale_ptr is not None:
            acc *= tl.load(v_scale_ptr + kv_head * stride_v_scale)
        acc = tl.where(is_bad, 0.0, acc)
        lse2 = total
        if SOFTMAX:
            lse2 = tl.where(total == 0.0, NEG_INF, peak + tl.log2(safe))

        acc, lse2, finished = merge_tile(acc, lse2, is_bad, partial_o_ptr, partial_lse_ptr, counters_ptr, times_ptr, segment, slot,
                                         slot_begin, num_slots, counter, BLOCK_M, BLOCK_DV, SOFTMAX)  # fmt: skip
        if finished:
            if SINK is not None:
                acc, lse2 = with_sink(acc, lse2, head, variant_args, SINK)
            if OUTPUT is not None:
                has_keys = lse2 != NEG_INF
                if not SOFTMAX:
                    has_keys &= kv_len > 0
                    if CAUSAL:
                        has_keys &= last_key >= 0
                acc = OUTPUT(acc, None, has_keys[:, None], request, head.to(tl.int32)[:, None], last_key[:, None], dv[None, :],
                             variant_args, HEAD_DIM_V, 1)  # fmt: skip
            store_rows(out_ptr, lse_ptr, acc, lse2, q_start, q_idx.to(tl.int64), head, rows_valid, lse_scale,
                        stride_o_start, stride_o_token, stride_o_head, stride_lse_start, stride_lse_token, stride_lse_head,
                        HEAD_DIM_V, BLOCK_DV, HAS_LSE)  # fmt: skip
        record(times_ptr, segment, END)

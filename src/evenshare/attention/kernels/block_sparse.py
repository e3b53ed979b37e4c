"""Block-sparse attention: each block of query rows has a list of key blocks, and an iteration is BLOCK_N keys of that list.

A tile is BLOCK_M packed rows of one row block, as in `kernels/forward.py`, and its list comes from a table of its own: the blocks
that its rows see whole, then those that a mask function decides on. Blocks that are in no list are never visited.
Positions, of rows and of keys, count from 0 in their sequence (FlexAttention's).
"""

import triton
import triton.language as tl

from evenshare.attention.kernels.state import LOG2E, NEG_INF, join, merge_tile, store_rows, with_sink
from evenshare.device.arithmetic import tanh

# Columns of the segment table (schedule.plan) and of the tile table (attention.sparse.tiles), and a status bit, as kernels see them.
SEGMENT_COLUMNS = tl.constexpr(8)
TILE_COLUMNS = tl.constexpr(8)
BAD_INDEX = tl.constexpr(8)


@triton.jit
def _attend(q, peak, total, acc, bad, k_ptr, v_ptr, list_ptr, variant_args, request, kv_head, head, q_idx, block, num_full, num_blocks,
            kv_len, num_kv_blocks, score_scale, logits_soft_cap, stride_k_token, stride_v_token,
            HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_SIZE: tl.constexpr, WHOLE_BLOCKS: tl.constexpr,
            EVEN_KEYS: tl.constexpr, MASKED: tl.constexpr, SELECT: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
            MODIFY: tl.constexpr, RESCORE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
            BASE_2: tl.constexpr, SOFTMAX: tl.constexpr):  # fmt: skip
    """One iteration: the keys of `block` of the list join the softmax state. MASKED: MODIFY masks them; SELECT: but not those of
    the first num_full blocks. WHOLE_BLOCKS: an iteration's keys lie in one block."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)  # places in the list
    if WHOLE_BLOCKS:
        entry = block * BLOCK_N // BLOCK_SIZE
        index = tl.load(list_ptr + entry)
        known = index.to(tl.uint32, bitcast=True) < num_kv_blocks
        position = index * BLOCK_SIZE + (n - entry * BLOCK_SIZE)
        bad |= (known == 0).to(tl.int32)
        seen = (position < kv_len) & known
    else:
        entry = n // BLOCK_SIZE
        listed = entry < num_blocks
        index = tl.load(list_ptr + entry, mask=listed, other=0)
        known = index.to(tl.uint32, bitcast=True) < num_kv_blocks
        position = index * BLOCK_SIZE + (n - entry * BLOCK_SIZE)
        bad |= (known == 0).to(tl.int32)
        seen = (position < kv_len) & known & listed
    k_rows = k_ptr + position.to(tl.int64) * stride_k_token
    v_rows = v_ptr + position.to(tl.int64) * stride_v_token
    k = tl.load(k_rows[None, :] + d[:, None], mask=seen[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
    v = tl.load(v_rows[:, None] + dv[None, :], mask=seen[:, None] & (dv < HEAD_DIM_V)[None, :], other=0.0)
    if KEY is not None:
        k = KEY(k.to(tl.float32), k_rows[None, :], seen[None, :], request, kv_head, position[None, :], d[:, None],
                variant_args, HEAD_DIM, 0)  # fmt: skip
    if VALUE is not None:
        v = VALUE(v.to(tl.float32), v_rows[:, None], seen[:, None], request, kv_head, position[:, None], dv[None, :],
                  variant_args, HEAD_DIM_V, 1)  # fmt: skip
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    s = tl.dot(q, k, input_precision=PRECISION) * score_scale
    if HAS_SOFT_CAP:
        s = (logits_soft_cap * LOG2E if BASE_2 else logits_soft_cap) * tanh(s)
    rescored = s
    if RESCORE is not None and (SELECT or not MASKED):
        rescored = RESCORE(s, request, head[:, None], q_idx[:, None], position[None, :], variant_args)
    if MASKED:
        s = MODIFY(s, request, head[:, None], q_idx[:, None], position[None, :], variant_args)
        if SELECT:
            s = tl.where((n < num_full * BLOCK_SIZE)[None, :], rescored, s)
    else:
        s = rescored
    if SOFTMAX and not BASE_2:
        s *= LOG2E
    if not (WHOLE_BLOCKS and EVEN_KEYS):
        s = tl.where(seen[None, :], s, NEG_INF if SOFTMAX else 0.0)
    peak, total, acc = join(s, v, peak, total, acc, PRECISION, SOFTMAX)
    return peak, total, acc, bad


@triton.jit(do_not_specialize=["kv_len"])
def block_sparse(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
                 partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr,
                 sm_scale, logits_soft_cap, lse_scale, kv_len,
                 stride_q_batch, stride_q_token, stride_q_head, stride_k_batch, stride_k_token, stride_k_head,
                 stride_v_batch, stride_v_token, stride_v_head, stride_o_batch, stride_o_token, stride_o_head,
                 stride_lse_batch, stride_lse_token, stride_lse_head, variant_args,
                 GROUP: tl.constexpr, KV_SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
                 BLOCK_SIZE: tl.constexpr, EVEN_KEYS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
                 HAS_LSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                 NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr, MODIFY: tl.constexpr, RESCORE: tl.constexpr,
                 SINK: tl.constexpr, QUERY: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, OUTPUT: tl.constexpr,
                 BASE_2: tl.constexpr, SOFTMAX: tl.constexpr):  # fmt: skip
    """q, out: [B, Sq, Hq, D]; k, v: [B, Skv, Hkv, D]; a tile is for one group of GROUP query heads, and KV_SHARE groups share a KV
    head. HAS_MASK: lists have blocks that MODIFY masks. RESCORE: scores without that mask, or None.
    EVEN_KEYS: kv_len is a multiple of BLOCK_SIZE."""
    WHOLE_BLOCKS: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    # A second loop costs registers: see kernels/forward.py.
    TWO_LOOPS: tl.constexpr = (
        (BLOCK_D <= 128 and BLOCK_DV <= 128 and q_ptr.dtype.element_ty != tl.float32)
        and (KEY is None and VALUE is None)
    ) or not HAS_MASK
    worker = tl.program_id(0)
    rows = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    if HAS_SOFT_CAP:
        score_scale = sm_scale / logits_soft_cap
    else:
        score_scale = sm_scale * LOG2E if BASE_2 else sm_scale
    num_kv_blocks = (kv_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    segment_end = tl.load(worker_indptr_ptr + worker + 1)
    for segment in range(tl.load(worker_indptr_ptr + worker), segment_end):
        row = segments_ptr + segment * SEGMENT_COLUMNS
        tile = tl.load(row)
        block_lo = tl.load(row + 1)
        block_hi = tl.load(row + 2)
        slot = tl.load(row + 3)
        slot_begin = tl.load(row + 4)
        num_slots = tl.load(row + 5)
        counter = tl.load(row + 6)

        info = tiles_ptr + tile.to(tl.int64) * TILE_COLUMNS
        request = tl.load(info)
        row_begin = tl.load(info + 1)
        row_end = tl.load(info + 2)
        list_ptr = indices_ptr + tl.load(info + 3)
        num_full = tl.load(info + 4)
        num_blocks = tl.load(info + 5)
        group = tl.load(info + 6)

        packed = row_begin + rows
        q_idx = packed // GROUP
        head = group * GROUP + (packed - q_idx * GROUP)
        kv_head = group // KV_SHARE
        rows_valid = packed < row_end
        wide_request = request.to(tl.int64)
        q_rows = wide_request * stride_q_batch + q_idx.to(tl.int64) * stride_q_token + head.to(tl.int64) * stride_q_head
        q = tl.load(q_ptr + q_rows[:, None] + d[None, :], mask=rows_valid[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        if QUERY is not None:
            q = QUERY(q.to(tl.float32), (q_ptr + q_rows)[:, None], rows_valid[:, None], request, head[:, None], q_idx[:, None],
                      d[None, :], variant_args, HEAD_DIM, 1)  # fmt: skip
        q = q.to(out_ptr.dtype.element_ty)
        k_base = k_ptr + (wide_request * stride_k_batch + kv_head.to(tl.int64) * stride_k_head)
        v_base = v_ptr + (wide_request * stride_v_batch + kv_head.to(tl.int64) * stride_v_head)

        # A tile without blocks has one iteration all the same, for its zeros.
        block_hi = tl.minimum(block_hi, (num_blocks * BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N)
        full_end = block_lo
        if TWO_LOOPS:
            full_keys = num_full * BLOCK_SIZE
            if not HAS_MASK:
                full_keys = block_hi * BLOCK_N
            full_end = tl.minimum(tl.maximum(full_keys // BLOCK_N, block_lo), block_hi)
        peak = tl.full([BLOCK_M], NEG_INF, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        bad = tl.zeros([BLOCK_N], tl.int32)
        if TWO_LOOPS:
            for block in tl.range(block_lo, full_end, num_stages=NUM_STAGES):
                peak, total, acc, bad = _attend(
                    q, peak, total, acc, bad, k_base, v_base, list_ptr, variant_args, request, kv_head, head, q_idx, block, num_full,
                    num_blocks, kv_len, num_kv_blocks, score_scale, logits_soft_cap, stride_k_token, stride_v_token, HEAD_DIM, HEAD_DIM_V,
                    BLOCK_SIZE, WHOLE_BLOCKS, EVEN_KEYS, False, False, HAS_SOFT_CAP, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
                    MODIFY, RESCORE, KEY, VALUE, BASE_2, SOFTMAX,
                )  # fmt: skip
        if HAS_MASK:
            for block in tl.range(full_end, block_hi, num_stages=NUM_STAGES):
                peak, total, acc, bad = _attend(
                    q, peak, total, acc, bad, k_base, v_base, list_ptr, variant_args, request, kv_head, head, q_idx, block, num_full,
                    num_blocks, kv_len, num_kv_blocks, score_scale, logits_soft_cap, stride_k_token, stride_v_token, HEAD_DIM, HEAD_DIM_V,
                    BLOCK_SIZE, WHOLE_BLOCKS, EVEN_KEYS, True, not (TWO_LOOPS and WHOLE_BLOCKS), HAS_SOFT_CAP, BLOCK_N, BLOCK_D,
                    BLOCK_DV, PRECISION, MODIFY, RESCORE, KEY, VALUE, BASE_2, SOFTMAX,
                )  # fmt: skip

        is_bad = tl.max(bad, 0) > 0
        if is_bad:
            tl.atomic_or(status_ptr, BAD_INDEX)
        lse2 = total
        if SOFTMAX:
            safe = tl.where(total == 0.0, 1.0, total)
            acc = acc / safe[:, None]
            lse2 = tl.where(total == 0.0, NEG_INF, peak + tl.log2(safe))
        acc = tl.where(is_bad, 0.0, acc)
        acc, lse2, finished = merge_tile(acc, lse2, is_bad, partial_o_ptr, partial_lse_ptr, counters_ptr, None, segment, slot,
                                         slot_begin, num_slots, counter, BLOCK_M, BLOCK_DV, SOFTMAX)  # fmt: skip
        if finished:
            if SINK is not None:
                acc, lse2 = with_sink(acc, lse2, head, variant_args, SINK)
            if OUTPUT is not None:
                has_keys = (lse2 != NEG_INF) & (num_blocks > 0)
                acc = OUTPUT(acc, None, has_keys[:, None], request, head[:, None], q_idx[:, None], dv[None, :], variant_args,
                             HEAD_DIM_V, 1)  # fmt: skip
            store_rows(out_ptr, lse_ptr, acc, lse2, wide_request, q_idx.to(tl.int64), head.to(tl.int64), rows_valid, lse_scale,
                       stride_o_batch, stride_o_token, stride_o_head, stride_lse_batch, stride_lse_token, stride_lse_head,
                       HEAD_DIM_V, BLOCK_DV, HAS_LSE)  # fmt: skip

"""Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): each latent is loaded once and is key and value at once.

A tile is BLOCK_M packed rows of one request: row p is query token p // GROUP and query head p % GROUP, all heads sharing the one
KV head. A key is a latent of DIM_CKV numbers beside DIM_KPE rotary ones; its value is the latent. Segments, softmax and partials are
those of `kernels/forward.py`; the last arriver merges and stores a few columns at a time, since a whole tile of sums and another of
partials do not fit the registers.
"""

import triton
import triton.language as tl

from evenshare.attention.kernels.state import LOG2E, NEG_INF, POS_INF, join, merge_partials, store_rows
from evenshare.device.merge import arrive

# Columns of the segment table (schedule.plan) and of the tile table (attention.tiles), and a status bit, as kernels see them.
SEGMENT_COLUMNS = tl.constexpr(8)
TILE_COLUMNS = tl.constexpr(8)
BAD_INDEX = tl.constexpr(8)


# Sizes of the batch are not specialised on: no compilation for a batch of one, or of a multiple of 16.
@triton.jit(do_not_specialize=["num_q_tokens", "num_pages", "num_indices"])
def mla(q_nope_ptr, q_pe_ptr, ckv_ptr, kpe_ptr, out_ptr, lse_ptr, kv_indices_ptr, worker_indptr_ptr, segments_ptr, tiles_ptr,
        partial_o_ptr, partial_lse_ptr, counters_ptr, status_ptr,
        sm_scale, lse_scale, num_q_tokens, num_pages, num_indices,
        stride_q_nope_token, stride_q_nope_head, stride_q_pe_token, stride_q_pe_head, stride_ckv_page, stride_ckv_token,
        stride_kpe_page, stride_kpe_token, stride_o_token, stride_o_head, stride_lse_token, stride_lse_head,
        GROUP: tl.constexpr, DIM_CKV: tl.constexpr, DIM_KPE: tl.constexpr, PAGE_SIZE: tl.constexpr, CAUSAL: tl.constexpr,
        HAS_LSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_MERGE: tl.constexpr, NUM_STAGES: tl.constexpr,
        PRECISION: tl.constexpr):  # fmt: skip
    """q_nope: [tokens, GROUP, DIM_CKV]; q_pe: [tokens, GROUP, DIM_KPE]; ckv: [pages, PAGE_SIZE, DIM_CKV]; kpe: [pages, PAGE_SIZE,
    DIM_KPE]; dims are powers of two from 16 on. kv_start counts entries of kv_indices. BLOCK_MERGE: columns merged at a time."""
    worker = tl.program_id(0)
    rows = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_CKV)
    r = tl.arange(0, DIM_KPE)
    score_scale = sm_scale * LOG2E
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
        q_start = tl.load(info).to(tl.int64)
        qo_len = tl.load(info + 1)
        row_begin = tl.load(info + 2)
        kv_start = tl.load(info + 3).to(tl.int64)
        kv_len = tl.load(info + 4)
        first_block = tl.load(info + 5)

        packed = row_begin + rows
        q_idx = packed // GROUP
        head = (packed - q_idx * GROUP).to(tl.int64)
        # Every index is clamped to what the caller's tensors hold: the plan's values may come from the device, unread.
        token = q_start + q_idx
        rows_valid = (packed < qo_len * GROUP) & (token < num_q_tokens)
        readable_len = tl.minimum(kv_len, tl.maximum(num_indices - kv_start, 0) * PAGE_SIZE)
        nope_rows = q_nope_ptr + token * stride_q_nope_token + head * stride_q_nope_head
        pe_rows = q_pe_ptr + token * stride_q_pe_token + head * stride_q_pe_head
        q_nope = tl.load(nope_rows[:, None] + d[None, :], mask=rows_valid[:, None], other=0.0)
        q_pe = tl.load(pe_rows[:, None] + r[None, :], mask=rows_valid[:, None], other=0.0)
        last_key = kv_len - qo_len + q_idx  # bottom-right aligned: the last key that a causal row sees

        peak = tl.full([BLOCK_M], NEG_INF, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM_CKV], tl.float32)
        bad = tl.zeros([BLOCK_N], tl.int32)
        for block in tl.range(first_block + block_lo, first_block + block_hi, num_stages=NUM_STAGES):
            n = block * BLOCK_N + tl.arange(0, BLOCK_N)
            if PAGE_SIZE % BLOCK_N == 0:  # one page a block, which spares registers
                entry = block * BLOCK_N // PAGE_SIZE
                page = tl.load(kv_indices_ptr + kv_start + entry, mask=entry * PAGE_SIZE < readable_len, other=-1)
                known = page.to(tl.uint32, bitcast=True) < num_pages  # false for -1 as well
                bad |= (known != (block * BLOCK_N < kv_len)).to(tl.int32)
                readable = known & (n < kv_len)
                ckv_page = ckv_ptr + page.to(tl.int64) * stride_ckv_page
                kpe_page = kpe_ptr + page.to(tl.int64) * stride_kpe_page
                place = n - entry * PAGE_SIZE
            else:
                page = tl.load(kv_indices_ptr + kv_start + n // PAGE_SIZE, mask=n < readable_len, other=-1)
                readable = page.to(tl.uint32, bitcast=True) < num_pages
                bad |= (readable != (n < kv_len)).to(tl.int32)
                ckv_page = ckv_ptr + page.to(tl.int64) * stride_ckv_page
                kpe_page = kpe_ptr + page.to(tl.int64) * stride_kpe_page
                place = n % PAGE_SIZE
            ckv_rows = ckv_page + place.to(tl.int64) * stride_ckv_token
            kpe_rows = kpe_page + place.to(tl.int64) * stride_kpe_token
            latents = tl.load(ckv_rows[:, None] + d[None, :], mask=readable[:, None], other=0.0)
            rotary = tl.load(kpe_rows[:, None] + r[None, :], mask=readable[:, None], other=0.0)
            s = tl.dot(q_nope, tl.trans(latents), input_precision=PRECISION)
            s = tl.dot(q_pe, tl.trans(rotary), s, input_precision=PRECISION) * score_scale
            keep = (n < kv_len)[None, :]
            if CAUSAL:
                keep = keep & (n[None, :] <= last_key[:, None])
            s = tl.where(keep, s, NEG_INF)
            peak, total, acc = join(s, latents, peak, total, acc, PRECISION, True)

        is_bad = (tl.max(bad, 0) > 0) | (readable_len < kv_len)
        if is_bad:
            tl.atomic_or(status_ptr, BAD_INDEX)
        safe = tl.where(total == 0.0, 1.0, total)
        acc = tl.where(is_bad, 0.0, acc / safe[:, None])
        lse2 = tl.where(total == 0.0, NEG_INF, peak + tl.log2(safe))
        zero = q_start * 0
        if num_slots == 1:
            lse2 = tl.where(is_bad, NEG_INF, lse2)
            store_rows(out_ptr, lse_ptr, acc, lse2, zero, token, head, rows_valid, lse_scale, 0, stride_o_token, stride_o_head,
                       0, stride_lse_token, stride_lse_head, DIM_CKV, DIM_CKV, HAS_LSE)  # fmt: skip
        else:
            slot_rows = slot.to(tl.int64) * BLOCK_M + rows
            tl.store(partial_o_ptr + slot_rows[:, None] * DIM_CKV + d[None, :], acc)
            tl.store(partial_lse_ptr + slot_rows, tl.where(is_bad, POS_INF, lse2))
            if arrive(counters_ptr + counter, num_slots):
                columns = tl.arange(0, BLOCK_MERGE)
                for first in range(0, DIM_CKV, BLOCK_MERGE):
                    merged, lse2 = merge_partials(partial_o_ptr, partial_lse_ptr, slot_begin, num_slots, first + columns,
                                                  BLOCK_M, DIM_CKV, BLOCK_MERGE, 16, True)  # fmt: skip
                    store_rows(out_ptr + first, lse_ptr, merged, lse2, zero, token, head, rows_valid, lse_scale, 0, stride_o_token,
                               stride_o_head, 0, stride_lse_token, stride_lse_head, BLOCK_MERGE, BLOCK_MERGE, HAS_LSE)  # fmt: skip

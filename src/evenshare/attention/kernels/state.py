"""A tile's softmax state: scores join it, the last arriver merges the partial ones, and whoever finishes the tile stores its rows.

Softmax runs in base 2 (FlashAttention-2's order of operations); a partial is (o, lse) in fp32. One whose indices are wrong carries
lse = +inf: the merge turns the tile into o = 0, lse = -inf. Without SOFTMAX scores are weights, and a partial is (o, 0).
"""

import triton
import triton.language as tl

from evenshare.device.clock import MERGE, record
from evenshare.device.merge import arrive

NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def join(s, v, peak, total, acc, PRECISION: tl.constexpr, SOFTMAX: tl.constexpr):
    """Scores s, in base 2, and their values join the softmax state; without SOFTMAX they are weights."""
    if not SOFTMAX:
        return peak, total, acc + tl.dot(s.to(v.dtype), v, input_precision=PRECISION)
    new_peak = tl.maximum(peak, tl.max(s, 1))
    base = tl.where(new_peak == NEG_INF, 0.0, new_peak)
    p = tl.exp2(s - base[:, None])
    alpha = tl.exp2(peak - base)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return new_peak, total, acc


@triton.jit
def merge_partials(partial_o_ptr, partial_lse_ptr, slot_begin, num_slots, columns, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
                   BLOCK_COLUMNS: tl.constexpr, SLOT_BLOCK: tl.constexpr, SOFTMAX: tl.constexpr):  # fmt: skip
    """Combine the partials of one tile in tile order: (o, lse) of all slots -> (acc [BLOCK_M, BLOCK_COLUMNS], lse2 [BLOCK_M]).

    columns: BLOCK_COLUMNS of the BLOCK_DV that a partial has."""
    rows = tl.arange(0, BLOCK_M)
    slots = tl.arange(0, SLOT_BLOCK)
    # The maximum first, SLOT_BLOCK slots at a time: the loads of the second loop are then independent of each other.
    peak = tl.full([BLOCK_M], NEG_INF, tl.float32)
    for s in range(0, num_slots, SLOT_BLOCK):
        offsets = (slot_begin + s + slots).to(tl.int64)[:, None] * BLOCK_M + rows[None, :]
        lse = tl.load(partial_lse_ptr + offsets, mask=(s + slots < num_slots)[:, None], other=NEG_INF)
        peak = tl.maximum(peak, tl.max(lse, 0))
    # A row with an infinite peak has no key (-inf) or a bad index (+inf): its weights are all zero.
    usable = (peak > NEG_INF) & (peak < POS_INF)
    base = tl.where(usable, peak, 0.0)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_COLUMNS], tl.float32)
    # Pipelined where the tile is small and its partials many; the buffers of a large tile would cost registers and shared memory.
    for s in tl.range(0, num_slots, num_stages=3 if BLOCK_M == 16 else 1):
        slot = (slot_begin + s).to(tl.int64)
        lse = tl.load(partial_lse_ptr + slot * BLOCK_M + rows)
        weight = tl.where(usable, tl.exp2(lse - base), 0.0)
        o = tl.load(partial_o_ptr + (slot * BLOCK_M + rows)[:, None] * BLOCK_DV + columns[None, :])
        acc += o * weight[:, None]
        total += weight
    safe = tl.where(total > 0.0, total, 1.0)
    lse2 = tl.where(
        usable, base + tl.log2(safe), tl.where(peak == NEG_INF, NEG_INF, tl.where(peak == POS_INF, NEG_INF, peak))
    )
    if SOFTMAX:
        # A NaN peak (NaN in q or k) stays NaN.
        acc = tl.where((peak != peak)[:, None], peak[:, None], acc / safe[:, None])
    return acc, lse2


@triton.jit
def merge_tile(acc, lse2, is_bad, partial_o_ptr, partial_lse_ptr, counters_ptr, times_ptr, segment, slot, slot_begin, num_slots, counter,
               BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, SOFTMAX: tl.constexpr):  # fmt: skip
    """Hand in a segment's (o, lse): (those of the whole tile, True) for who finishes it, (its own, False) for the others."""
    rows = tl.arange(0, BLOCK_M)
    dv = tl.arange(0, BLOCK_DV)
    finished = num_slots == 1
    if num_slots > 1:
        lse2 = tl.where(is_bad, POS_INF, lse2)
        slot_rows = slot.to(tl.int64) * BLOCK_M + rows
        tl.store(partial_o_ptr + slot_rows[:, None] * BLOCK_DV + dv[None, :], acc)
        tl.store(partial_lse_ptr + slot_rows, lse2)
        finished = arrive(counters_ptr + counter, num_slots)
        if finished:
            record(times_ptr, segment, MERGE)
            acc, lse2 = merge_partials(
                partial_o_ptr, partial_lse_ptr, slot_begin, num_slots, dv, BLOCK_M, BLOCK_DV, BLOCK_DV, 16, SOFTMAX
            )
    else:
        lse2 = tl.where(is_bad, NEG_INF, lse2)
    return acc, lse2, finished


@triton.jit
def with_sink(acc, lse2, head, variant_args, SINK: tl.constexpr):
    """Once for each row, by whoever finishes it. A row without keys stays one."""
    sink2 = SINK(head, variant_args) * LOG2E
    top = tl.maximum(lse2, sink2)
    joined = top + tl.log2(tl.exp2(lse2 - top) + tl.exp2(sink2 - top))
    acc *= tl.where(lse2 == NEG_INF, 0.0, tl.exp2(lse2 - joined))[:, None]
    return acc, tl.where(lse2 == NEG_INF, NEG_INF, joined)


@triton.jit
def store_rows(out_ptr, lse_ptr, acc, lse2, q_start, q_idx, head, rows_valid, lse_scale,
                stride_o_start, stride_o_token, stride_o_head, stride_lse_start, stride_lse_token, stride_lse_head,
                HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_LSE: tl.constexpr):  # fmt: skip
    dv = tl.arange(0, BLOCK_DV)
    rows = q_start * stride_o_start + q_idx * stride_o_token + head * stride_o_head
    mask = rows_valid[:, None] & (dv < HEAD_DIM_V)[None, :]
    tl.store(out_ptr + rows[:, None] + dv[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_LSE:
        lse_rows = q_start * stride_lse_start + q_idx * stride_lse_token + head * stride_lse_head
        tl.store(lse_ptr + lse_rows, lse2 * lse_scale, mask=rows_valid)

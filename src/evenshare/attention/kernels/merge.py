"""Merging attention states (o, lse) of the same queries over disjoint sets of keys (FlashInfer, section 2.2).

A row is one (token, query head). Weights are powers of two of the lse's differences, in fp32; a state with lse = -inf has
weight zero and its o is not used, so NaN in it does no harm. A row of nothing but such states is (0, -inf).
One program holds a row's whole head dim, so the outputs may be the tensors of the first state.
"""

import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def _rows(num_rows, num_heads, BLOCK_M: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // num_heads
    return token, row - token * num_heads, row < num_rows


@triton.jit
def _anchor(peak):
    """The exponent that weights are relative to: any finite number will do where no state has weight."""
    return tl.where(peak == NEG_INF, 0.0, peak)


@triton.jit
def _weighted(o, lse, weight):
    return tl.where((lse == NEG_INF)[:, None], 0.0, o.to(tl.float32)) * weight[:, None]


@triton.jit
def merge_state(o_a_ptr, lse_a_ptr, o_b_ptr, lse_b_ptr, out_ptr, lse_out_ptr, num_rows, num_heads, log2_base,
                stride_oa_token, stride_oa_head, stride_oa_dim, stride_la_token, stride_la_head,
                stride_ob_token, stride_ob_head, stride_ob_dim, stride_lb_token, stride_lb_head,
                stride_out_token, stride_out_head, stride_out_dim, stride_lse_token, stride_lse_head,
                HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    token, head, valid = _rows(num_rows, num_heads, BLOCK_M)
    lse_a = tl.load(lse_a_ptr + token * stride_la_token + head * stride_la_head, mask=valid, other=NEG_INF) * log2_base
    lse_b = tl.load(lse_b_ptr + token * stride_lb_token + head * stride_lb_head, mask=valid, other=NEG_INF) * log2_base
    # NaN in one lse must not be lost in the maximum.
    peak = tl.maximum(lse_a, lse_b, propagate_nan=tl.PropagateNan.ALL)
    weight_a = tl.exp2(lse_a - _anchor(peak))
    weight_b = tl.exp2(lse_b - _anchor(peak))
    total = weight_a + weight_b
    safe = tl.where(peak == NEG_INF, 1.0, total)
    merged_lse = (peak + tl.log2(safe)) / log2_base
    tl.store(lse_out_ptr + token * stride_lse_token + head * stride_lse_head, merged_lse, mask=valid)
    o_a_row = o_a_ptr + token * stride_oa_token + head * stride_oa_head
    o_b_row = o_b_ptr + token * stride_ob_token + head * stride_ob_head
    out_row = out_ptr + token * stride_out_token + head * stride_out_head
    for start in tl.static_range(0, HEAD_DIM, BLOCK_D):
        d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
        mask = valid[:, None] & (d < HEAD_DIM)[None, :]
        o_a = tl.load(o_a_row[:, None] + (d * stride_oa_dim)[None, :], mask=mask, other=0.0)
        o_b = tl.load(o_b_row[:, None] + (d * stride_ob_dim)[None, :], mask=mask, other=0.0)
        o = (_weighted(o_a, lse_a, weight_a) + _weighted(o_b, lse_b, weight_b)) / safe[:, None]
        tl.store(out_row[:, None] + (d * stride_out_dim)[None, :], o.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def merge_states(o_ptr, lse_ptr, out_ptr, lse_out_ptr, num_rows, num_heads, num_states, log2_base,
                 stride_o_token, stride_o_state, stride_o_head, stride_o_dim, stride_l_token, stride_l_state, stride_l_head,
                 stride_out_token, stride_out_head, stride_out_dim, stride_lse_token, stride_lse_head,
                 HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    token, head, valid = _rows(num_rows, num_heads, BLOCK_M)
    first_lse = lse_ptr + token * stride_l_token + head * stride_l_head
    peak = tl.full([BLOCK_M], NEG_INF, tl.float32)
    lse_row = first_lse
    for _ in range(num_states):
        lse = tl.load(lse_row, mask=valid, other=NEG_INF) * log2_base
        peak = tl.maximum(peak, lse, propagate_nan=tl.PropagateNan.ALL)
        lse_row += stride_l_state
    anchor = _anchor(peak)
    total = tl.zeros([BLOCK_M], tl.float32)
    lse_row = first_lse
    for _ in range(num_states):
        total += tl.exp2(tl.load(lse_row, mask=valid, other=NEG_INF) * log2_base - anchor)
        lse_row += stride_l_state
    safe = tl.where(peak == NEG_INF, 1.0, total)
    merged_lse = (peak + tl.log2(safe)) / log2_base
    tl.store(lse_out_ptr + token * stride_lse_token + head * stride_lse_head, merged_lse, mask=valid)
    first_o = o_ptr + token * stride_o_token + head * stride_o_head
    out_row = out_ptr + token * stride_out_token + head * stride_out_head
    for start in tl.static_range(0, HEAD_DIM, BLOCK_D):
        d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
        mask = valid[:, None] & (d < HEAD_DIM)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        lse_row = first_lse
        o_rows = first_o[:, None] + (d * stride_o_dim)[None, :]
        for _ in range(num_states):
            lse = tl.load(lse_row, mask=valid, other=NEG_INF) * log2_base
            acc += _weighted(tl.load(o_rows, mask=mask, other=0.0), lse, tl.exp2(lse - anchor))
            lse_row += stride_l_state
            o_rows += stride_o_state
        o = acc / safe[:, None]
        tl.store(out_row[:, None] + (d * stride_out_dim)[None, :], o.to(out_ptr.dtype.element_ty), mask=mask)

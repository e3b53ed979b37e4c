"""Rotary position embedding (arXiv 2104.09864). A program rotates all heads of one token, whose sines and cosines it needs once.

An angle is an integer here: position * frequency in units of 2^-64 turns, so that whole turns overflow and are gone. What is left is
exact to fp32 at any position, where a product in fp32 is off by 0.003 at position 100,000, and needs no library's reduction.
"""

import triton
import triton.language as tl

RADIANS = tl.constexpr(6.283185307179586 / 2**64)
EIGHTH, QUARTER_BITS = tl.constexpr(1 << 61), tl.constexpr(62)


@triton.jit
def _cos_sin(phase):
    """(cos, sin) of int64 `phase` / 2^64 turns, in fp32: Taylor's series of an eighth of a turn, to 3e-8."""
    quarter = (phase + EIGHTH) >> QUARTER_BITS
    x = (phase - (quarter << QUARTER_BITS)).to(tl.float32) * RADIANS
    y = x * x
    c = 1.0 + y * (-1 / 2 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320))))
    s = x * (1.0 + y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y * (1 / 362880)))))
    odd = (quarter & 1) == 1
    sign = tl.where((quarter & 2) == 0, 1.0, -1.0)
    return tl.where(odd, -s, c) * sign, tl.where(odd, c, s) * sign


@triton.jit
def _rotate_heads(x, out, cos, sin, num_heads, stride_x_head, stride_x_dim, stride_out_head, stride_out_dim,
                  HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVE: tl.constexpr, COPY_REST: tl.constexpr,
                  BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr):  # fmt: skip
    HALF: tl.constexpr = ROTARY_DIM // 2
    for start in range(0, num_heads, BLOCK_H):
        head = start + tl.arange(0, BLOCK_H).to(tl.int64)
        valid = (head < num_heads)[:, None]
        x_row = x + (head * stride_x_head)[:, None]
        out_row = out + (head * stride_out_head)[:, None]
        if INTERLEAVE:
            d = tl.arange(0, 2 * BLOCK_HALF).to(tl.int64)[None, :]
            inside = valid & (d < ROTARY_DIM)
            pairs = tl.load(x_row + d * stride_x_dim, mask=inside, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(pairs, [BLOCK_H, BLOCK_HALF, 2]))
            rotated = tl.join(a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :])
            rotated = tl.reshape(rotated, [BLOCK_H, 2 * BLOCK_HALF]).to(out_row.dtype.element_ty)
            tl.store(out_row + d * stride_out_dim, rotated, mask=inside)
        else:
            d = tl.arange(0, BLOCK_HALF).to(tl.int64)[None, :]
            inside = valid & (d < HALF)
            a = tl.load(x_row + d * stride_x_dim, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(x_row + (d + HALF) * stride_x_dim, mask=inside, other=0.0).to(tl.float32)
            first = a * cos[None, :] - b * sin[None, :]
            second = b * cos[None, :] + a * sin[None, :]
            tl.store(out_row + d * stride_out_dim, first.to(out_row.dtype.element_ty), mask=inside)
            tl.store(out_row + (d + HALF) * stride_out_dim, second.to(out_row.dtype.element_ty), mask=inside)
        if COPY_REST:
            d = ROTARY_DIM + tl.arange(0, BLOCK_REST).to(tl.int64)[None, :]
            inside = valid & (d < HEAD_DIM)
            rest = tl.load(x_row + d * stride_x_dim, mask=inside, other=0.0)
            tl.store(out_row + d * stride_out_dim, rest, mask=inside)


@triton.jit
def rope(q_ptr, k_ptr, q_out_ptr, k_out_ptr, positions_ptr, table_ptr, num_q_heads, num_k_heads, num_cached,
         stride_q_token, stride_q_head, stride_q_dim, stride_k_token, stride_k_head, stride_k_dim,
         stride_qo_token, stride_qo_head, stride_qo_dim, stride_ko_token, stride_ko_head, stride_ko_dim,
         stride_position, stride_table, stride_table_dim,
         HAS_CACHE: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVE: tl.constexpr,
         COPY_REST: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr):  # fmt: skip
    """table: HAS_CACHE: [num_cached, ROTARY_DIM] of cosines, then sines; a token outside it is not rotated. Otherwise the
    frequencies, int64 [ROTARY_DIM / 2], in 2^-64 turns a position."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token * stride_position).to(tl.int64)
    half = tl.arange(0, BLOCK_HALF).to(tl.int64)
    if HAS_CACHE:
        known = (half < HALF) & (position >= 0) & (position < num_cached)
        row = table_ptr + position * stride_table
        cos = tl.load(row + half * stride_table_dim, mask=known, other=1.0).to(tl.float32)
        sin = tl.load(row + (half + HALF) * stride_table_dim, mask=known, other=0.0).to(tl.float32)
    else:
        cos, sin = _cos_sin(position * tl.load(table_ptr + half * stride_table_dim, mask=half < HALF, other=0))
    _rotate_heads(q_ptr + token * stride_q_token, q_out_ptr + token * stride_qo_token, cos, sin, num_q_heads,
                  stride_q_head, stride_q_dim, stride_qo_head, stride_qo_dim,
                  HEAD_DIM, ROTARY_DIM, INTERLEAVE, COPY_REST, BLOCK_H, BLOCK_HALF, BLOCK_REST)  # fmt: skip
    _rotate_heads(k_ptr + token * stride_k_token, k_out_ptr + token * stride_ko_token, cos, sin, num_k_heads,
                  stride_k_head, stride_k_dim, stride_ko_head, stride_ko_dim,
                  HEAD_DIM, ROTARY_DIM, INTERLEAVE, COPY_REST, BLOCK_H, BLOCK_HALF, BLOCK_REST)  # fmt: skip

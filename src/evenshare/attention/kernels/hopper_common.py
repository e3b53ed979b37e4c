"""What the attention kernels for Hopper do alike: a worker's segments and tiles, the rows of queries and of keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SEGMENT_COLUMNS = gl.constexpr(8)  # schedule.plan
TILE_COLUMNS = gl.constexpr(8)  # attention.tiles
BAD_INDEX = gl.constexpr(8)  # schedule.plan.Status
NEG_INF = gl.constexpr(float("-inf"))
POS_INF = gl.constexpr(float("inf"))
LOG2E = gl.constexpr(1.4426950408889634)
PANEL = gl.constexpr(64)  # dims of a TMA box: 128 bytes, the widest swizzle


@gluon.jit
def load_tile(segments_ptr, tiles_ptr, segment, tile, heads_per_row):
    """(kv_head, q_start, qo_len, row_begin, kv_start, kv_len, end block, number of blocks) of a segment, whose tile is known."""
    row = segments_ptr + segment.to(gl.int64) * SEGMENT_COLUMNS
    begin = gl.load(row + 1)
    end = gl.load(row + 2)
    row_tile = tile // heads_per_row
    kv_head = tile - row_tile * heads_per_row
    info = tiles_ptr + row_tile.to(gl.int64) * TILE_COLUMNS
    q_start = gl.load(info)
    qo_len = gl.load(info + 1)
    row_begin = gl.load(info + 2)
    kv_start = gl.load(info + 3)
    kv_len = gl.load(info + 4)
    first = gl.load(info + 5)
    kv_head += gl.load(info + 7)
    return kv_head, q_start, qo_len, row_begin, kv_start, kv_len, first + end, end - begin


@gluon.jit
def load_tile_id(segments_ptr, segment, segment_end):
    return gl.load(segments_ptr + segment.to(gl.int64) * SEGMENT_COLUMNS, mask=segment < segment_end, other=0)


@gluon.jit
def readable_len(kv_start, kv_len, num_pages, num_indices, PAGE_SIZE: gl.constexpr, DENSE: gl.constexpr):
    """Keys that may be read: every index is clamped to what the caller's tensors hold, since device metadata goes unread."""
    if PAGE_SIZE > 0:
        held = gl.maximum(num_indices - kv_start, 0)
        readable = gl.where(held < (kv_len + PAGE_SIZE - 1) // PAGE_SIZE, held * PAGE_SIZE, kv_len)
    elif DENSE:
        readable = gl.where(kv_start < num_pages, kv_len, 0)
    else:
        readable = gl.minimum(kv_len, gl.maximum(num_pages - kv_start, 0))
    return readable


@gluon.jit
def pieces(stride, PIECE: gl.constexpr = 8):
    """A stride that is known to be a multiple of PIECE elements, said so that the compiler knows it and copies 16 bytes at once."""
    return stride // PIECE * PIECE


@gluon.jit
def key_rows(page, n, kv_start, readable, stride_page, stride_token, PAGE_SIZE: gl.constexpr, DENSE: gl.constexpr):
    """Keys n of a request, on pages that are -1 where nothing may be read -> (element offsets of their rows, which may be read).

    page: unused without pages."""
    if PAGE_SIZE > 0:
        valid = page >= 0
        rows = page.to(gl.int64) * stride_page + (n % PAGE_SIZE).to(gl.int64) * stride_token
    elif DENSE:
        valid = n < readable
        rows = kv_start.to(gl.int64) * stride_page + n.to(gl.int64) * stride_token
    else:
        valid = n < readable
        rows = (kv_start + n).to(gl.int64) * stride_token
    return rows, valid


@gluon.jit
def row_index(row_begin, rows, GROUP: gl.constexpr):
    """Packed rows of a tile -> (query token of the request, query head within the KV head)."""
    packed = row_begin + rows
    token = packed // GROUP
    return token, packed - token * GROUP


@gluon.jit
def valid_rows(token, q_start, qo_len, num_q_starts, num_q_tokens, DENSE: gl.constexpr):
    if DENSE:
        valid = (token < qo_len) & (token < num_q_tokens) & (q_start < num_q_starts)
    else:
        valid = (token < qo_len) & (q_start + token < num_q_tokens)
    return valid

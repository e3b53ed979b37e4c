"""Tile sizes as a pure function of the problem, and the table of row tiles of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evenshare.attention.metadata import Batch, request_bounds
from evenshare.attention.problem import Problem

# Columns of the tile table; a row is 32 bytes, one sector. RESERVED is zero.
Q_START, QO_LEN, ROW_BEGIN, KV_START, KV_LEN, FIRST_BLOCK, REQUEST, RESERVED = range(8)
TILE_COLUMNS = 8


@dataclass(frozen=True)
class TileConfig:
    """Launch constants of the forward kernel."""

    block_m: int  # packed rows: query tokens x query heads of one KV head
    block_n: int  # keys of one iteration
    num_warps: int
    num_stages: int
    workers_per_sm: int


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def choose_tile(problem: Problem, mean_qo_len: float, interpreted: bool = False) -> TileConfig:
    """Tile sizes for requests of `mean_qo_len` query tokens.

    Few rows are bound by memory: 16 rows are the smallest mma, and two workers a SM keep loads in flight.
    Many rows are bound by the tensor cores, which want 64 rows or more a warp group.
    """
    if interpreted:
        return TileConfig(16, 16, 4, 1, 1)  # small, so that short inputs have several iterations, row tiles and splits
    rows = mean_qo_len * problem.group_size
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    if problem.dtype == torch.float32:
        # FMA units take their operands from registers: larger tiles spill (ptxas, sm_80 and sm_90).
        block_n = 16 if wide else 32
        return TileConfig(16, block_n, 4, 2, 2) if rows <= 16 else TileConfig(32, block_n, 8, 2, 1)
    if rows <= 16:
        # H200, 64 requests of 8192 keys, 32/8 heads, D = 128, pages of 16: 4.15 TB/s; 64 keys an iteration give 3.7, 8 warps
        # 3.7, one worker a SM 3.2; more stages than 3 cost what they bring. Wide heads need 8 warps to stay in registers.
        return TileConfig(16, 64, 8, 2, 2) if wide else TileConfig(16, 128, 4, 3, 2)
    if rows <= 32:
        return TileConfig(32, 32, 8, 2, 2) if wide else TileConfig(32, 64, 4, 3, 2)
    if wide:
        return TileConfig(64, 32, 8, 2, 1)
    return TileConfig(64, 64, 8, 2, 1) if rows <= 64 else TileConfig(128, 64, 8, 3, 1)


def max_row_tiles(problem: Problem, tile: TileConfig, max_batch: int, max_q_rows: int) -> int:
    """Bound on the row tiles of `max_batch` requests with `max_q_rows` query tokens in all."""
    return max_q_rows * problem.group_size // tile.block_m + min(max_batch, max_q_rows)


def tile_table(problem: Problem, tile: TileConfig, batch: Batch, max_tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Host metadata -> (tiles int32 [max_tiles, 8], iterations int32 [max_tiles]).

    A row tile is block_m packed rows of a request; its iterations are the key blocks that its mask leaves, at least one,
    since somebody has to write the zeros of a row without keys. Raises ValueError if there are more than max_tiles.
    """
    q_start, qo_len, kv_start, kv_len = request_bounds(batch, problem.page_size)
    counts = (qo_len * problem.group_size + tile.block_m - 1) // tile.block_m
    request = torch.repeat_interleave(torch.arange(batch.size, dtype=torch.int32), counts)
    num_tiles = request.shape[0]
    if num_tiles > max_tiles:
        raise ValueError(
            f"qo_indptr: got {num_tiles} row tiles, want at most the plan's capacity of {max_tiles} (see max_q_rows)"
        )
    offsets = torch.cumsum(counts, 0, dtype=torch.int32) - counts
    r = request.long()
    row_begin = (torch.arange(num_tiles, dtype=torch.int32) - offsets[r]) * tile.block_m
    first_q = row_begin // problem.group_size
    last_q = torch.minimum((row_begin + tile.block_m - 1) // problem.group_size, qo_len[r] - 1)
    shift = kv_len[r] - qo_len[r]  # causal is bottom-right aligned
    end = kv_len[r]
    if problem.causal:
        end = torch.minimum(end, shift + last_q + 1).clamp(min=0)
    begin = torch.zeros_like(end)
    if problem.window_left >= 0:
        begin = torch.minimum((shift + first_q - problem.window_left).clamp(min=0), end)
    first_block = begin // tile.block_n
    blocks = (end + tile.block_n - 1) // tile.block_n - first_block
    tiles = torch.zeros(max_tiles, TILE_COLUMNS, dtype=torch.int32)
    columns = [
        q_start[r],
        qo_len[r],
        row_begin,
        kv_start[r],
        kv_len[r],
        first_block,
        request,
        torch.zeros_like(request),
    ]
    tiles[:num_tiles] = torch.stack(columns, 1)
    iterations = torch.zeros(max_tiles, dtype=torch.int32)
    iterations[:num_tiles] = blocks.clamp(min=1)
    return tiles, iterations

"""Tile sizes as a pure function of the problem, and the table of row tiles of a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from evenshare.attention.metadata import Batch, request_bounds
from evenshare.attention.problem import CODES, Problem

# Columns of the tile table; a row is 32 bytes, one sector.
Q_START, QO_LEN, ROW_BEGIN, KV_START, KV_LEN, FIRST_BLOCK, REQUEST, HEAD = range(8)
TILE_COLUMNS = 8

BOX_DIMS, FP8_BOX_DIMS = 64, 128  # of a TMA box: 128 bytes, the widest swizzle
SHARED_BYTES = (227 << 10) - 2048  # of a SM on Hopper, less barriers and alignment
MAX_STAGES = 12
MIN_BOX_ROWS = 16
BOX_ROWS = 64  # of q: a consumer's


@dataclass(frozen=True)
class TileConfig:
    """The forward kernel, its launch constants and the order of its tiles."""

    block_m: int  # packed rows: query tokens x query heads of one KV head
    block_n: int  # keys of one iteration
    num_warps: int
    num_stages: int
    workers_per_sm: int
    kernel: str = "forward"  # a file of kernels/
    q_buffers: int = 1  # hopper_prefill: 2 if the next tile's q has a buffer of its own
    head_major: bool = False  # a request's tiles head by head; otherwise the heads of a row tile are neighbours
    overhead: int = 1  # a tile's prologue and epilogue, in iterations
    cut_cost: int = 2  # a partial written, read and merged, in iterations

    def heads_per_row(self, problem: Problem) -> int:
        """KV heads that one row of the tile table stands for."""
        return 1 if self.head_major else problem.num_kv_heads


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def portable_twin(tile: TileConfig) -> TileConfig:
    """The portable kernel over the same tiles, for tensors whose rows the Hopper kernels cannot copy. It is there to be right."""
    return replace(tile, kernel="forward", num_warps=8, num_stages=1)


def runs_on_hopper(problem: Problem, capability: tuple[int, int]) -> bool:
    """Whether the Hopper kernels compute this problem: 16-bit, or 8-bit keys; rows of whole 16-byte pieces, a scale above 0.

    Variants run on the portable kernel."""
    piece = 16 if problem.fp8_kv else 8
    return (
        capability == (9, 0)
        and problem.dtype in (torch.float16, torch.bfloat16)
        and problem.head_dim % piece == 0
        and problem.head_dim_v % piece == 0
        and problem.sm_scale > 0
        and problem.variant is None
    )


def _prefill_tile(problem: Problem) -> TileConfig:
    """Shared memory (227 KB): 128 rows of q, once or twice, and num_stages blocks of K and V, dims padded to a power of two.

    Between the last block of a tile and the second of the next the tensor cores have next to nothing to do for some 5800 cycles;
    an iteration takes 2640 (H200, D = 128).
    """
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > 128:
        return TileConfig(128, 64, 4, 2, 1, "hopper_prefill", 1, True, overhead=2, cut_cost=9)
    return TileConfig(128, 128, 4, 2 if widest > 64 else 3, 1, "hopper_prefill", 2, True, overhead=2, cut_cost=9)


def _decode_tile(problem: Problem, rows: float) -> TileConfig:
    """As few rows as wgmma takes, and all of shared memory for keys: q twice, probabilities, and a ring of K and V blocks.

    Of key blocks those of 128 cost the consumer less, but gathering, and what does not fit three times, wants 64. A worker alone
    reads at more than twice an even share of the bandwidth, so idle workers cost little: 5 us are worth no cut (H200).
    """
    block_m = next(size for size in (8, 16, 32) if rows <= size)
    block_d, block_dv = padded_dim(problem.head_dim), padded_dim(problem.head_dim_v)

    def num_stages(block_n: int) -> int:
        left = SHARED_BYTES - 2 * block_m * (2 * block_d + block_n)
        return min(left // (2 * block_n * (block_d + block_dv)), MAX_STAGES)

    block_n = 128 if box_rows(problem, 128) > 0 and num_stages(128) >= 3 else 64
    cut_cost = 3 * 128 // block_n
    return TileConfig(
        block_m, block_n, 4, num_stages(block_n), 1, "hopper_decode", overhead=128 // block_n, cut_cost=cut_cost
    )


def _fp8_decode_tile(problem: Problem, rows: float) -> TileConfig:
    """As `_decode_tile`. q, probabilities and output lie there for each of two consumers, but for the first one's output.

    32 rows of scores and probabilities leave the registers for 64 keys. An iteration takes half the time, the rest does not.
    """
    block_m = next(size for size in (8, 16, 32) if rows <= size)
    block_d, block_dv = padded_dim(problem.head_dim, FP8_BOX_DIMS), padded_dim(problem.head_dim_v, FP8_BOX_DIMS)

    def num_stages(block_n: int) -> int:
        left = SHARED_BYTES - 4 * block_m * (block_d + block_n + block_dv)
        return min(left // (block_n * (block_d + block_dv)), MAX_STAGES)

    block_n = 128 if block_m < 32 and box_rows(problem, 128) > 0 and num_stages(128) >= 4 else 64
    overhead, cut_cost = 2 * 128 // block_n, 6 * 128 // block_n
    return TileConfig(
        block_m, block_n, 4, num_stages(block_n), 1, "hopper_decode_fp8", overhead=overhead, cut_cost=cut_cost
    )


def box_rows(problem: Problem, block_n: int) -> int:
    """Keys of one TMA box: those of a page, or of a block if that is less. 0: no box fits, the kernel gathers key by key."""
    page = problem.page_size
    if page == 0:
        return block_n
    fits = page >= MIN_BOX_ROWS and page == next_power_of_2(page)
    return min(page, block_n) if fits else 0


def q_box_tokens(problem: Problem) -> int:
    """Query tokens of one TMA box, 64 packed rows of `hopper_prefill`. 0: rows begin inside a token, they are copied one by one."""
    return 0 if BOX_ROWS % problem.group_size else BOX_ROWS // problem.group_size


def padded_dim(dim: int, smallest: int = BOX_DIMS) -> int:
    """The size of a head dim in a kernel's tiles."""
    return max(next_power_of_2(dim), smallest)


def choose_tile(
    problem: Problem, mean_qo_len: float, capability: tuple[int, int] = (0, 0), interpreted: bool = False
) -> TileConfig:
    """The kernel and its tile sizes for requests of `mean_qo_len` query tokens on a GPU of this compute capability.

    Few rows are bound by memory: 16 rows are the smallest mma, and two workers a SM keep loads in flight.
    Many rows are bound by the tensor cores, which want 64 rows or more a warp group.
    """
    if interpreted:
        return TileConfig(
            16, 16, 4, 1, 1, cut_cost=0
        )  # small, so that short inputs have several iterations, row tiles and splits
    rows = mean_qo_len * problem.group_size
    if runs_on_hopper(problem, capability):
        # Sums and output of more rows than these do not fit the registers of the decode kernel's four warps.
        few = 16 if max(problem.head_dim, problem.head_dim_v) > 128 else 32
        if rows <= few:
            return _fp8_decode_tile(problem, rows) if problem.fp8_kv else _decode_tile(problem, rows)
        return _prefill_tile(problem)
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    if problem.changes_keys:
        # A transformed block of keys is in registers as fp32, and so are the numbers that change it (ptxas, sm_80 and sm_90).
        fp32 = problem.dtype == torch.float32
        block_n = 16 if wide or fp32 else 32
        # Triton 3.6 and 3.7 do not compile 16 rows and 16 keys of integers in fp32.
        if rows <= 16 and not (fp32 and problem.kv_dtype in CODES):
            return TileConfig(16, block_n, 8, 4 if block_n == 32 else 2, 1)
        return TileConfig(32 if fp32 else 64, block_n, 8, 2, 1)
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
    """Bound on the rows of the tile table for `max_batch` requests with `max_q_rows` query tokens in all."""
    row_tiles = max_q_rows * problem.group_size // tile.block_m + min(max_batch, max_q_rows)
    return row_tiles * (problem.num_kv_heads // tile.heads_per_row(problem))


def tile_table(problem: Problem, tile: TileConfig, batch: Batch, max_tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Host metadata -> (tiles int32 [max_tiles, 8], iterations int32 [max_tiles]).

    A row tile is block_m packed rows of a request, for `tile.heads_per_row` KV heads from HEAD on; its iterations are the key
    blocks that its mask leaves, at least one, since somebody has to write the zeros of a row without keys.
    Raises ValueError if there are more than max_tiles.
    """
    q_start, qo_len, kv_start, kv_len = request_bounds(batch, problem.page_size)
    row_tiles = (qo_len * problem.group_size + tile.block_m - 1) // tile.block_m
    counts = row_tiles * (problem.num_kv_heads // tile.heads_per_row(problem))
    request = torch.repeat_interleave(torch.arange(batch.size, dtype=torch.int32), counts)
    num_tiles = request.shape[0]
    if num_tiles > max_tiles:
        raise ValueError(
            f"qo_indptr: got {num_tiles} row tiles, want at most the plan's capacity of {max_tiles} (see max_q_rows)"
        )
    offsets = torch.cumsum(counts, 0, dtype=torch.int32) - counts
    r = request.long()
    within = torch.arange(num_tiles, dtype=torch.int32) - offsets[r]
    head = within // row_tiles[r]
    row_tile = within - head * row_tiles[r]
    # Every other head backwards: a causal request's long row tiles are then spread over the workers that take turns.
    row_tile = torch.where(head % 2 == 1, row_tiles[r] - 1 - row_tile, row_tile)
    row_begin = row_tile * tile.block_m
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
        head,
    ]
    tiles[:num_tiles] = torch.stack(columns, 1)
    iterations = torch.zeros(max_tiles, dtype=torch.int32)
    iterations[:num_tiles] = blocks.clamp(min=1)
    return tiles, iterations

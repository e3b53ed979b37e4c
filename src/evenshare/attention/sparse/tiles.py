"""The row tiles of a block-sparse call, in torch operations of static shapes: on the host and the device alike, without a sync."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from evenshare.attention.problem import Problem
from evenshare.attention.sparse.blocks import BlockSparsity
from evenshare.attention.tiles import TILE_COLUMNS, TileConfig, choose_tile
from evenshare.device.target import Target

MIN_WHOLE_BLOCK = 32  # keys; an iteration takes several smaller blocks at once and looks up each key's


@dataclass(frozen=True)
class Heads:
    """How query heads share rows of a tile and keys: `groups` of `group` query heads each; kv_share groups share a KV head."""

    groups: int
    group: int
    kv_share: int

    @classmethod
    def of(cls, lists: int, num_qo_heads: int, num_kv_heads: int) -> Heads:
        """Of lists for all heads, for each KV head or for each query head."""
        if lists in (1, num_kv_heads):
            return cls(num_kv_heads, num_qo_heads // num_kv_heads, 1)
        return cls(num_qo_heads, 1, num_qo_heads // num_kv_heads)


def choose_block_tile(problem: Problem, heads: Heads, block_size: tuple[int, int], target: Target) -> TileConfig:
    """The portable kernel's tile for row blocks of so many rows; large key blocks are multiples of its iterations."""
    grouped = replace(problem, num_kv_heads=heads.groups)
    tile = choose_tile(grouped, block_size[0], interpreted=target.interpreted)
    whole = block_size[1] & -block_size[1]  # the largest power of 2 that divides it
    return replace(tile, block_n=whole) if MIN_WHOLE_BLOCK <= whole < tile.block_n else tile


def row_tiles(
    sparsity: BlockSparsity, heads: Heads, tile: TileConfig, batch: int, qo_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tiles int32 [n, 8], iterations int32 [n]) where the lists are: a tile is block_m packed rows of a row block.

    Columns: batch entry, first packed row, the row block's end, first entry of its list, full blocks, blocks, group of heads.
    Head by head, so that the keys of few heads are in use at a time. Lists are cut to what `indices` holds.
    """
    device, (block_rows, block_keys) = sparsity.device, sparsity.block_size
    rows = block_rows * heads.group
    per_block, whole_blocks = -(-rows // tile.block_m), qo_len // block_rows
    last = -(-(qo_len - whole_blocks * block_rows) * heads.group // tile.block_m)
    within = torch.arange(whole_blocks * per_block + last, device=device)
    row_block = within // per_block
    row_begin = row_block * rows + (within - row_block * per_block) * tile.block_m
    row_end = ((row_block + 1) * rows).clamp(max=qo_len * heads.group)
    shape = (batch, heads.groups, len(within))

    def of_lists(values: torch.Tensor) -> torch.Tensor:
        return values[:, :, row_block].expand(shape)

    begin = of_lists(sparsity.begin).clamp(0, sparsity.indices.numel())
    num_blocks = torch.minimum(of_lists(sparsity.num_blocks).clamp(min=0), sparsity.indices.numel() - begin)
    entry = torch.arange(batch, device=device)[:, None, None]
    head = torch.arange(heads.groups, device=device)[None, :, None]
    columns = (entry, row_begin, row_end, begin, of_lists(sparsity.num_full), num_blocks, head)
    tiles = torch.zeros(*shape, TILE_COLUMNS, dtype=torch.int32, device=device)
    for number, column in enumerate(columns):
        tiles[..., number] = column
    iterations = ((num_blocks * block_keys + tile.block_n - 1) // tile.block_n).clamp(min=1)
    return tiles.flatten(0, 2), iterations.flatten().to(torch.int32)

"""Tile sizes of the latent attention kernel as a pure function of the problem."""

from __future__ import annotations

import torch

from evenshare.attention.mla.problem import MLAProblem
from evenshare.attention.tiles import TileConfig

MERGE_COLUMNS = 128  # of a split tile, merged at a time


def choose_mla_tile(problem: MLAProblem, mean_qo_len: float, interpreted: bool = False) -> TileConfig:
    """Few rows are bound by memory, many by the tensor cores, whose sums of 64 rows x 512 dims are half of a SM's registers."""
    if interpreted:  # small, so that short inputs have several iterations, row tiles and splits
        return TileConfig(16, 16, 4, 1, 1, "mla", cut_cost=0)
    if problem.dtype == torch.float32:
        return TileConfig(16, 16, 8, 2, 1, "mla")
    if mean_qo_len * problem.group_size <= 16:
        return TileConfig(16, 64, 8, 2, 1, "mla")
    return TileConfig(64, 64, 8, 2, 1, "mla")

"""Tile sizes of the latent attention kernel as a pure function of the problem."""

from __future__ import annotations

import torch

from evenshare.attention.mla.problem import MLAProblem
from evenshare.attention.tiles import TileConfig, box_rows

MERGE_COLUMNS = 128  # of a split tile, merged at a time


def runs_on_hopper(problem: MLAProblem, mean_qo_len: float, capability: tuple[int, int]) -> bool:
    """Whether the Hopper kernel computes this: DeepSeek's dims in 16 bits, pages that TMA takes boxes of, and many rows."""
    return (
        capability == (9, 0)
        and problem.dtype in (torch.float16, torch.bfloat16)
        and (problem.head_dim_v, problem.head_dim_kpe) == (512, 64)
        and box_rows(problem, 64) > 0
        and problem.sm_scale > 0
        and mean_qo_len * problem.group_size > 16
    )


def choose_mla_tile(
    problem: MLAProblem, mean_qo_len: float, capability: tuple[int, int] = (0, 0), interpreted: bool = False
) -> TileConfig:
    """The kernel and its tile sizes for requests of `mean_qo_len` query tokens on a GPU of this compute capability.

    Sums of 64 rows x 512 dims spill, 32 rows do not (ptxas, sm_80 and sm_90). Of five stages the first two find the page, so that
    two blocks are on their way; with 32 rows of q they take 112 KB of shared memory, which only the large GPUs have.
    """
    if interpreted:  # small, so that short inputs have several iterations, row tiles and splits
        return TileConfig(16, 16, 4, 1, 1, "mla", cut_cost=0)
    if problem.dtype == torch.float32:
        return TileConfig(16, 16, 8, 2, 1, "mla")
    if runs_on_hopper(problem, mean_qo_len, capability):
        return TileConfig(64, 64, 4, 2, 1, "hopper_mla")
    large = capability == (8, 0) or capability[0] in (9, 10)
    many = large and mean_qo_len * problem.group_size > 16
    return TileConfig(32 if many else 16, 32, 8, 5, 1, "mla")

"""From a block-sparse plan and tensors to the kernel's launch. Holds no policy."""

from __future__ import annotations

import torch

from evenshare.attention.kernels import block_sparse as kernels
from evenshare.attention.problem import Problem
from evenshare.attention.sparse.blocks import BlockSparsity
from evenshare.attention.sparse.tiles import Heads
from evenshare.attention.tiles import TileConfig, padded_dim
from evenshare.device.launcher import Launch, get_launcher
from evenshare.device.workspace import Workspace
from evenshare.schedule.plan import Plan

MIN_BLOCK_D = 16  # the smallest mma


def partial_elements(problem: Problem, tile: TileConfig) -> int:
    """fp32 values of one partial: o [block_m, block_dv] and lse [block_m]."""
    return tile.block_m * (padded_dim(problem.head_dim_v, MIN_BLOCK_D) + 1)


def bind(
    problem: Problem,
    heads: Heads,
    tile: TileConfig,
    sparsity: BlockSparsity,
    schedule: Plan,
    tables: tuple[torch.Tensor, torch.Tensor],
    workspace: Workspace,
    status: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    lse_scale: float,
) -> Launch:
    """A launch for tensors laid out like these, called with (q, k, v, out, lse). tables: the lists' indices, and the row tiles.

    Without lse the call passes any other array, which the kernel does not touch.
    """
    variant, block_keys = problem.variant, sparsity.block_size[1]
    assert variant is not None
    indices, tiles = tables
    block_dv = padded_dim(problem.head_dim_v, MIN_BLOCK_D)
    functions = {name.upper(): function for name, function in variant.functions.items()}
    launcher = get_launcher(
        kernels.block_sparse,
        5,
        GROUP=heads.group,
        KV_SHARE=heads.kv_share,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_SIZE=block_keys,
        EVEN_KEYS=k.shape[1] % block_keys == 0,
        HAS_MASK=sparsity.mask_mod is not None,
        HAS_SOFT_CAP=problem.logits_soft_cap > 0,
        HAS_LSE=lse is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded_dim(problem.head_dim, MIN_BLOCK_D),
        BLOCK_DV=block_dv,
        NUM_STAGES=tile.num_stages,
        PRECISION="ieee",
        MODIFY=variant.modify,
        **functions,
        BASE_2=variant.scores_in_base_2,
        SOFTMAX=variant.softmax,
        num_warps=tile.num_warps,
    )
    partial_o = workspace.partials
    partial_lse = partial_o[schedule.max_slots * tile.block_m * block_dv :] if schedule.max_slots else partial_o
    strides = [stride for t in (q, k, v, out) for stride in t.stride()[:3]]
    static = (
        indices,
        schedule.worker_indptr,
        schedule.segments,
        tiles,
        partial_o,
        partial_lse,
        workspace.counters,
        status,
        problem.sm_scale,
        problem.logits_soft_cap,
        lse_scale,
        k.shape[1],
        *strides,
        *(lse.stride() if lse is not None else (0, 0, 0)),
        variant.arguments,
    )
    return launcher.bind(q.device, (schedule.num_workers,), static)

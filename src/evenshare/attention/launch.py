"""From a plan and tensors to kernel launches. Holds no policy."""

from __future__ import annotations

import torch
import triton

from evenshare.attention.kernels import forward as forward_kernels
from evenshare.attention.kernels import tile_table as tile_table_kernels
from evenshare.attention.metadata import Batch
from evenshare.attention.problem import Problem
from evenshare.attention.tiles import TileConfig, next_power_of_2
from evenshare.device.workspace import Workspace
from evenshare.schedule.plan import Plan

FORMS = {"ragged": 0, "paged": 1, "block_table": 2, "dense": 3}
REQUEST_BLOCK = 1024  # requests that one step of the prefix sum takes
TILE_BLOCK = 128
INTERPRETER_BLOCK = 16  # the interpreter's time grows with the block


def partial_elements(problem: Problem, tile: TileConfig) -> int:
    """fp32 values of one partial: o [block_m, block_dv] and lse [block_m]."""
    return tile.block_m * (_block_dim(problem.head_dim_v) + 1)


def _block_dim(dim: int) -> int:
    return max(next_power_of_2(dim), 16)  # 16: the smallest mma


def launch_tile_table(
    problem: Problem,
    tile: TileConfig,
    batch: Batch,
    tiles: torch.Tensor,
    iterations: torch.Tensor,
    offsets: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """Device metadata -> tiles, iterations and status, in place. No sync, no allocation."""
    small = tiles.device.type == "cpu"
    max_tiles = tiles.shape[0]
    placeholder = offsets
    indptrs = (
        batch.qo_indptr if batch.qo_indptr is not None else placeholder,
        batch.kv_indptr if batch.kv_indptr is not None else placeholder,
        batch.kv_lens if batch.kv_lens is not None else placeholder,
    )
    table = (batch.table_stride, batch.table_width, batch.num_indices)
    shared = {
        "HAS_QO": batch.qo_indptr is not None,
        "FORM": FORMS[batch.form],
        "PAGE_SIZE": problem.page_size,
        "GROUP": problem.group_size,
        "BLOCK_M": tile.block_m,
    }
    tile_table_kernels.tile_offsets[(1,)](
        *indptrs,
        offsets,
        status,
        batch.size,
        max_tiles,
        *table,
        **shared,
        BLOCK=INTERPRETER_BLOCK if small else REQUEST_BLOCK,
    )
    block = INTERPRETER_BLOCK if small else TILE_BLOCK
    tile_table_kernels.tile_table[(triton.cdiv(max_tiles, block),)](
        *indptrs,
        offsets,
        tiles,
        iterations,
        batch.size,
        max_tiles,
        *table,
        problem.window_left,
        **shared,
        CAUSAL=problem.causal,
        HAS_WINDOW=problem.window_left >= 0,
        BLOCK_N=tile.block_n,
        BLOCK=block,
    )


def launch_forward(
    problem: Problem,
    tile: TileConfig,
    plan: Plan,
    tiles: torch.Tensor,
    workspace: Workspace,
    status: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    num_indices: int,
    lse_scale: float,
) -> None:
    """q, out: [tokens, Hq, D] or dense [B, S, Hq, D]; k, v: pages [num_pages, page_size, Hkv, D], [tokens, Hkv, D] or dense."""
    if plan.num_workers == 0 or plan.max_segments == 0 or out.numel() == 0:
        return
    dense = q.dim() == 4

    def row_strides(t: torch.Tensor) -> tuple[int, int, int]:
        return (t.stride(0), t.stride(1), t.stride(2)) if dense else (t.stride(0), t.stride(0), t.stride(1))

    def key_strides(t: torch.Tensor) -> tuple[int, int, int]:
        return (t.stride(0), t.stride(1), t.stride(2)) if t.dim() == 4 else (t.stride(0), t.stride(0), t.stride(1))

    slots = plan.max_slots * tile.block_m
    block_dv = _block_dim(problem.head_dim_v)
    partial_o = workspace.partials
    partial_lse = workspace.partials[slots * block_dv :] if slots else workspace.partials
    forward_kernels.forward[(plan.num_workers,)](
        q,
        k,
        v,
        out,
        lse if lse is not None else partial_o,
        kv_indices if kv_indices is not None else tiles,
        plan.worker_indptr,
        plan.segments,
        tiles,
        partial_o,
        partial_lse,
        workspace.counters,
        status,
        problem.sm_scale,
        problem.logits_soft_cap,
        lse_scale,
        problem.window_left,
        problem.num_kv_heads,
        q.shape[0],
        q.shape[1] if dense else q.shape[0],
        k.shape[0],
        num_indices,
        *row_strides(q),
        *key_strides(k),
        *key_strides(v),
        *row_strides(out),
        *(row_strides(lse) if lse is not None else (0, 0, 0)),
        GROUP=problem.group_size,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        PAGE_SIZE=problem.page_size,
        DENSE=dense,
        SAME_STRIDES=k.stride()[:-2] == v.stride()[:-2],
        CAUSAL=problem.causal,
        HAS_WINDOW=problem.window_left >= 0,
        HAS_SOFT_CAP=problem.logits_soft_cap > 0,
        HAS_LSE=lse is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=_block_dim(problem.head_dim),
        BLOCK_DV=block_dv,
        NUM_STAGES=tile.num_stages,
        PRECISION="ieee",
        num_warps=tile.num_warps,
    )

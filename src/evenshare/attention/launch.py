"""From a plan and tensors to kernel launches. Holds no policy."""

from __future__ import annotations

import torch
import triton

from evenshare.attention.kernels import forward as forward_kernels
from evenshare.attention.kernels import tile_table as tile_table_kernels
from evenshare.attention.metadata import Batch
from evenshare.attention.problem import Problem
from evenshare.attention.tiles import TileConfig, next_power_of_2
from evenshare.device.launcher import Launch, get_launcher
from evenshare.device.workspace import Workspace
from evenshare.schedule.plan import Plan

FORMS = {"ragged": 0, "paged": 1, "block_table": 2, "dense": 3}
REQUEST_BLOCKS = (128, 1024)  # requests that a step of the prefix sum takes: at least, at most
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
    num_tiles: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """Device metadata -> tiles, iterations, their number and status, in place. No sync, no allocation."""
    max_tiles = tiles.shape[0]
    if tiles.device.type == "cpu":
        block = request_block = INTERPRETER_BLOCK
    else:
        low, high = REQUEST_BLOCKS
        block, request_block = TILE_BLOCK, min(max(next_power_of_2(batch.size), low), high)
    tile_table_kernels.tile_table[(max(triton.cdiv(max_tiles, block), 1),)](
        batch.qo_indptr if batch.qo_indptr is not None else status,  # a placeholder
        batch.kv_indptr if batch.kv_indptr is not None else status,
        batch.kv_lens if batch.kv_lens is not None else status,
        tiles,
        iterations,
        num_tiles,
        status,
        batch.size,
        max_tiles,
        batch.table_stride,
        batch.table_width,
        batch.num_indices,
        problem.window_left,
        HAS_QO=batch.qo_indptr is not None,
        FORM=FORMS[batch.form],
        PAGE_SIZE=problem.page_size,
        GROUP=problem.group_size,
        CAUSAL=problem.causal,
        HAS_WINDOW=problem.window_left >= 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK=block,
        REQUEST_BLOCK=request_block,
    )


class ForwardLauncher:
    """The forward kernel of one plan, for all its layers and steps: it holds the plan's arrays, which stay."""

    def __init__(
        self,
        problem: Problem,
        tile: TileConfig,
        plan: Plan,
        tiles: torch.Tensor,
        workspace: Workspace,
        status: torch.Tensor,
    ) -> None:
        self.problem, self.tile, self.plan = problem, tile, plan
        slots = plan.max_slots * tile.block_m
        partial_o = workspace.partials
        partial_lse = partial_o[slots * _block_dim(problem.head_dim_v) :] if slots else partial_o
        self.arrays = (plan.worker_indptr, plan.segments, tiles, partial_o, partial_lse, workspace.counters, status)

    def bind(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        num_indices: int,
        lse_scale: float,
    ) -> Launch:
        """A launch for tensors laid out like these; it is called with (q, k, v, out, lse, kv_indices).

        q, out: [tokens, Hq, D] or dense [B, S, Hq, D]; k, v: pages [num_pages, page_size, Hkv, D], [tokens, Hkv, D] or dense.
        Without lse or pages the call passes any other array, which the kernel does not touch.
        """
        problem, tile, plan = self.problem, self.tile, self.plan
        if plan.num_workers == 0 or plan.max_segments == 0 or out.numel() == 0:
            return _launch_nothing
        dense = q.dim() == 4
        launcher = get_launcher(
            forward_kernels.forward,
            6,
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
            BLOCK_DV=_block_dim(problem.head_dim_v),
            NUM_STAGES=tile.num_stages,
            PRECISION="ieee",
            num_warps=tile.num_warps,
        )
        sizes = (q.shape[0], q.shape[1] if dense else q.shape[0], k.shape[0], num_indices)
        paged = k.dim() == 4  # or dense
        strides = (*_strides(q, dense), *_strides(k, paged), *_strides(v, paged), *_strides(out, dense))
        static = (
            *self.arrays,
            problem.sm_scale,
            problem.logits_soft_cap,
            lse_scale,
            problem.window_left,
            problem.num_kv_heads,
            *sizes,
            *strides,
            *(_strides(lse, dense) if lse is not None else (0, 0, 0)),
        )
        return launcher.bind(q.device, (plan.num_workers,), static)


def _strides(t: torch.Tensor, batched: bool) -> tuple[int, ...]:
    strides = t.stride()
    return strides[:3] if batched else (strides[0], *strides[:2])


def _launch_nothing(*_: torch.Tensor | None) -> None:
    pass

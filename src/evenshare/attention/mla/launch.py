"""From a plan of latent attention and tensors to the kernel's launch. Holds no policy."""

from __future__ import annotations

import torch

from evenshare.attention.kernels import mla as kernels
from evenshare.attention.mla.problem import MLAProblem
from evenshare.attention.mla.tiles import MERGE_COLUMNS
from evenshare.attention.tiles import TileConfig
from evenshare.device.launcher import Launch, get_launcher
from evenshare.device.workspace import Workspace
from evenshare.schedule.plan import Plan


def bind(
    problem: MLAProblem,
    tile: TileConfig,
    schedule: Plan,
    tiles: torch.Tensor,
    workspace: Workspace,
    status: torch.Tensor,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv: torch.Tensor,
    kpe: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    num_indices: int,
    lse_scale: float,
) -> Launch:
    """A launch for tensors laid out like these; it is called with (q_nope, q_pe, ckv, kpe, out, lse, kv_indices).

    Without lse the call passes any other array, which the kernel does not touch.
    """
    dim = problem.head_dim_v
    launcher = get_launcher(
        kernels.mla,
        7,
        GROUP=problem.group_size,
        DIM_CKV=dim,
        DIM_KPE=problem.head_dim_kpe,
        PAGE_SIZE=problem.page_size,
        CAUSAL=problem.causal,
        HAS_LSE=lse is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_MERGE=min(dim, MERGE_COLUMNS),
        NUM_STAGES=tile.num_stages,
        PRECISION="ieee",
        num_warps=tile.num_warps,
    )
    partial_o = workspace.partials
    partial_lse = partial_o[schedule.max_slots * tile.block_m * dim :] if schedule.max_slots else partial_o
    static = (
        schedule.worker_indptr,
        schedule.segments,
        tiles,
        partial_o,
        partial_lse,
        workspace.counters,
        status,
        problem.sm_scale,
        lse_scale,
        q_nope.shape[0],
        ckv.shape[0],
        num_indices,
        *(stride for t in (q_nope, q_pe, ckv, kpe, out) for stride in t.stride()[:2]),
        *(lse.stride() if lse is not None else (0, 0)),
    )
    return launcher.bind(q_nope.device, (schedule.num_workers,), static)

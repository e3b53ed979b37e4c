"""From a plan and tensors to the kernel launch. Holds no policy."""

from __future__ import annotations

import torch

from evenshare.device.epilogue import get_activation
from evenshare.device.target import Target
from evenshare.device.workspace import stream_workspace
from evenshare.gemm.kernels import matmul as kernels
from evenshare.gemm.plan import plan_matmul


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
    target: Target,
) -> None:
    """out [m, n] = activation(a [m, k] b [k, n] + bias); m and n at least 1, any strides."""
    (m, k), n = a.shape, b.shape[1]
    plan = plan_matmul(m, n, k, a.element_size(), target.num_sms, target.interpreted)
    tile, shares = plan.tile, plan.shares
    workspace = stream_workspace(plan.partial_elements, shares.max_counters, a.device)
    with torch.cuda.device_of(a):  # the tensors' GPU, not the current one
        kernels.matmul[(shares.num_workers,)](
            a,
            b,
            a if bias is None else bias.contiguous(),
            out,
            workspace.partials,
            workspace.counters,
            m,
            n,
            k,
            *a.stride(),
            *b.stride(),
            *out.stride(),
            shares.num_workers,
            shares.num_tiles,
            shares.iters_per_tile,
            shares.num_whole,
            HAS_BIAS=bias is not None,
            ACTIVATION=get_activation(activation),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            NUM_STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )

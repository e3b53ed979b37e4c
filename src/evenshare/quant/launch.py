"""From a plan and tensors to the kernel launch. Holds no policy."""

from __future__ import annotations

import torch

from evenshare.device.activations import is_gated
from evenshare.device.epilogue import get_activation
from evenshare.device.target import Target
from evenshare.device.workspace import stream_workspace
from evenshare.quant import packing
from evenshare.quant.kernels.w4a16 import w4a16
from evenshare.quant.plan import plan_matmul
from evenshare.quant.weight import QuantizedWeight

# Permuted columns of x are gathered in the kernel, element by element, for every column tile again; for more rows than this once
# before, so that the kernel loads vectors.
GATHER_ROWS = 64


def matmul(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    target: Target,
) -> None:
    """out [m, n_out] = activation(x [m, k] Wᵀ + bias) + residual; m and n at least 1, any strides."""
    m, n_out = out.shape
    packed = packing.pack(weight)
    permutation = packed.permutation
    if permutation is not None and m > GATHER_ROWS:
        x, permutation = weight.gather(x), None
    tile, plan = plan_matmul(m, weight.n, packed.num_steps, x.element_size(), target.num_sms)
    workspace = stream_workspace(plan.max_slots * tile.block_m * tile.block_n, plan.max_counters, x.device)
    with torch.cuda.device_of(x):  # the tensors' GPU, not the current one
        w4a16[(plan.num_workers,)](
            x,
            permutation,
            packed.words,
            packed.scales,
            packed.zeros,
            None if bias is None else bias.contiguous(),
            residual,
            out,
            workspace.partials,
            workspace.counters,
            m,
            n_out,
            x.shape[1],
            packed.padded_n,
            *x.stride(),
            *out.stride(),
            *((0, 0) if residual is None else residual.stride()),
            plan.num_workers,
            plan.num_tiles,
            plan.iters_per_tile,
            plan.num_whole,
            BITS=weight.bits,
            GROUP_SIZE=packed.group_size,
            FORM=packed.form,
            ACTIVATION=get_activation(activation),
            GATED=is_gated(activation),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            NUM_STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )

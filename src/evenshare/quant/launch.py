"""From a plan and tensors to the kernel launch. Holds no policy."""

from __future__ import annotations

import torch
import triton

from evenshare.device.activations import is_gated
from evenshare.device.epilogue import get_activation
from evenshare.device.target import HOPPER, Target
from evenshare.device.workspace import stream_workspace
from evenshare.quant import packing, plan
from evenshare.quant.experts import ExpertWeights
from evenshare.quant.kernels.grouped import grouped_w4a16
from evenshare.quant.kernels.w4a16 import w4a16
from evenshare.quant.plan import Planner, plan_grouped, plan_matmul
from evenshare.quant.weight import QuantizedWeight

# Permuted columns of x are gathered in the kernel, element by element, for every column tile again; for more rows than this once
# before, so that the kernel loads vectors.
GATHER_ROWS = 64


def _on_hopper(dtype: torch.dtype, weight: QuantizedWeight, target: Target) -> bool:
    """Whether the Hopper kernels, whose modules are loaded only for them, compute this."""
    if target.capability != HOPPER:
        return False
    from evenshare.quant import hopper_weight

    return hopper_weight.refusal(dtype, weight, target) is None


def pack(
    weight: QuantizedWeight, num_experts: int | None, dtype: torch.dtype, activation: str | None, target: Target
) -> None:
    """Packs for the kernels that will take the weight, or for num_experts of them."""
    if num_experts is None and target.capability == HOPPER:
        from evenshare.quant import dense

        dense.pack(weight, dtype)
    if num_experts is None and _on_hopper(dtype, weight, target):
        from evenshare.quant import hopper_weight

        hopper_weight.pack(weight, is_gated(activation))
    else:
        packing.pack(weight, num_experts)


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
    if target.capability == HOPPER:
        from evenshare.quant import dense

        if dense.takes(x, weight, target):
            dense.matmul(x, weight, bias, activation, residual, out, target)
            return
    if _on_hopper(x.dtype, weight, target):
        from evenshare.quant import hopper

        hopper.matmul(x, weight, bias, activation, residual, out, target)
        return
    portable_matmul(x, weight, bias, activation, residual, out, target)


def portable_matmul(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    target: Target,
    planner: Planner = plan_matmul,
) -> None:
    """As `matmul`, by the portable kernel. planner: who computes what."""
    m, n_out = out.shape
    packed = packing.pack(weight)
    permutation = packed.permutation
    if permutation is not None and m > GATHER_ROWS:
        x, permutation = weight.gather(x), None
    tile, shares = planner(m, weight.n, packed.num_steps, x.element_size(), target.num_sms)
    workspace = stream_workspace(shares.max_slots * tile.block_m * tile.block_n, shares.max_counters, x.device)
    with torch.cuda.device_of(x):  # the tensors' GPU, not the current one
        w4a16[(shares.num_workers,)](
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
            shares.num_workers,
            shares.num_tiles,
            shares.iters_per_tile,
            shares.num_whole,
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


def grouped_matmul(
    x: torch.Tensor,
    weights: ExpertWeights,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
    target: Target,
) -> None:
    """out [m, n_out], rows offsets[e] to offsets[e + 1] by the weight of expert e; m and n at least 1, any strides."""
    if target.capability == HOPPER:
        from evenshare.quant import dense

        if dense.takes(x, weights.weight, target, weights.num_experts):
            dense.grouped_matmul(x, weights, offsets, bias, activation, out, target)
            return
    m, n_out = out.shape
    packed = packing.pack(weights.weight, weights.num_experts)
    permutation = packed.permutation
    if permutation is not None and m > GATHER_ROWS:
        x, permutation = weights.weight.gather(x), None
    steps = packed.num_steps
    tile, num_workers = plan_grouped(m, weights.num_experts, weights.n, steps, x.element_size(), target.num_sms)
    workspace = stream_workspace(2 * num_workers * tile.block_m * tile.block_n, 2 * num_workers, x.device)
    with torch.cuda.device_of(x):
        grouped_w4a16[(num_workers,)](
            x,
            permutation,
            packed.words,
            packed.scales,
            packed.zeros,
            None if bias is None else bias.contiguous(),
            out,
            workspace.partials,
            workspace.counters,
            offsets.contiguous(),
            m,
            n_out,
            x.shape[1],
            packed.padded_n,
            *x.stride(),
            *out.stride(),
            weights.num_experts,
            num_workers,
            steps,
            packed.scales.shape[1],
            plan.MIN_STEPS_PER_SHARE,
            BITS=weights.weight.bits,
            GROUP_SIZE=packed.group_size,
            FORM=packed.form,
            ACTIVATION=get_activation(activation),
            GATED=is_gated(activation),
            EXPERTS=triton.next_power_of_2(weights.num_experts),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            NUM_STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )

"""From a plan and tensors to the kernel launch. Holds no policy."""

from __future__ import annotations

import torch
import triton

from evenshare.device.activations import is_gated
from evenshare.device.epilogue import get_activation
from evenshare.device.target import HOPPER, Target
from evenshare.device.workspace import stream_workspace
from evenshare.gemm import plan as plans
from evenshare.gemm.costs import costs_of
from evenshare.gemm.epilogue import Epilogue
from evenshare.gemm.kernels import grouped
from evenshare.gemm.kernels import matmul as kernels
from evenshare.gemm.kernels import scaled_matmul as scaled_kernels
from evenshare.gemm.plan import GemmPlan, plan_grouped, plan_matmul
from evenshare.gemm.scales import Scales


def loads_vectors(t: torch.Tensor) -> bool:
    """Whether t [rows, columns] can be loaded 16 bytes at a time, as far as Triton can tell: it specialises on multiples of 16."""
    (rows, columns), (stride_rows, stride_columns) = t.shape, t.stride()
    contiguous, other = (columns, stride_rows) if stride_columns == 1 else (rows, stride_columns)
    return 1 in t.stride() and contiguous % 16 == 0 and other % 16 == 0 and t.data_ptr() % 16 == 0


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Epilogue,
    out: torch.Tensor,
    target: Target,
    precision: str = "ieee",
    plan: GemmPlan | None = None,
) -> None:
    """out [batch, m, n_out] = activation(alpha a [batch, m, k] b [batch, k, n] + bias) + beta residual. Any strides; of the sizes
    only k may be 0. plan: what the portable kernel is to do; None: the kernel and its plan are chosen.
    """
    (batch, m, k), n, n_out = a.shape, b.shape[2], out.shape[2]
    if plan is None and target.capability == HOPPER:
        from evenshare.gemm import hopper, hopper_skinny

        first = a[0], b[0]
        for kernel in (hopper_skinny, hopper):
            if kernel.takes(*first, batch, target):
                for i in range(batch):
                    residual = None if epilogue.residual is None else epilogue.residual[i]
                    kernel.matmul(a[i], b[i], epilogue._replace(residual=residual), out[i], target)
                return
    if plan is None:
        # Of a gated product each half of b has to begin at a multiple of 16.
        aligned = loads_vectors(a[0]) and loads_vectors(b[0] if n == n_out else b[0, :, :n_out])
        aligned = aligned and (batch == 1 or (a.stride(0) % 16 == 0 and b.stride(0) % 16 == 0))
        sizes, tf32, costs = (m, n, k, a.element_size(), target.num_sms), precision == "tf32", costs_of(target.device)
        plan = plan_matmul(*sizes, aligned, target.interpreted, tf32, batch, costs=costs)
    tile, shares = plan.tile, plan.shares
    workspace = stream_workspace(plan.partial_elements, shares.max_counters, a.device)
    bias, activation, residual, alpha, beta = epilogue
    with torch.cuda.device_of(a):  # the tensors' GPU, not the current one
        kernels.matmul[(shares.num_workers,)](
            a,
            b,
            None if bias is None else bias.contiguous(),
            residual,
            out,
            workspace.partials,
            workspace.counters,
            float(alpha),
            float(beta),
            m,
            n_out,
            k,
            *a.stride(),
            *b.stride(),
            *out.stride(),
            *((0, 0, 0) if residual is None else residual.stride()),
            shares.num_workers,
            shares.num_tiles,
            shares.iters_per_tile,
            shares.num_whole,
            ACTIVATION=get_activation(activation),
            GATED=is_gated(activation),
            PRECISION=precision,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            NUM_STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )


def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: Scales,
    epilogue: Epilogue,
    out: torch.Tensor,
    target: Target,
    plan: GemmPlan | None = None,
) -> None:
    """out [m, n_out] = activation((scaled a [m, k]) (scaled b [k, n]) + bias) + residual. Any strides; only k may be 0.

    plan: as for `matmul`."""
    (m, k), n, n_out = a.shape, b.shape[1], out.shape[1]
    if plan is None and target.capability == HOPPER:
        from evenshare.gemm import hopper_scaled

        if hopper_scaled.refusal(a, b, scales, n != n_out, target) is None:
            hopper_scaled.matmul(a, b, scales, epilogue, out, target)
            return
    if plan is None:
        # Of a gated product each half of b has to begin at a multiple of 16.
        aligned = loads_vectors(a) and loads_vectors(b if n == n_out else b[:, :n_out])
        sizes, costs = (m, n, k, a.element_size(), target.num_sms), costs_of(target.device)
        plan = plan_matmul(*sizes, aligned, target.interpreted, costs=costs)
    tile, shares = plan.tile, plan.shares
    workspace = stream_workspace(plan.partial_elements, shares.max_counters, a.device)
    bias, activation, residual, _, _ = epilogue
    e4m3 = [operand.dtype == torch.float8_e4m3fn for operand in (a, b)]
    with torch.cuda.device_of(a):
        scaled_kernels.scaled_matmul[(shares.num_workers,)](
            a.view(torch.uint8),
            b.view(torch.uint8),
            scales.a,
            scales.b,
            None if bias is None else bias.contiguous(),
            residual,
            out,
            workspace.partials,
            workspace.counters,
            scales.factor * 256.0 ** sum(e4m3),
            m,
            n_out,
            k,
            *a.stride(),
            *b.stride(),
            *scales.strides,
            *out.stride(),
            *((0, 0) if residual is None else residual.stride()),
            shares.num_workers,
            shares.num_tiles,
            shares.iters_per_tile,
            shares.num_whole,
            A_E4M3=e4m3[0],
            B_E4M3=e4m3[1],
            A_BLOCKS=scales.a_blocks,
            COLUMNS_PER_SCALE=scales.columns_per_scale,
            ACTIVATION=get_activation(activation),
            GATED=is_gated(activation),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            NUM_STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )


def grouped_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    gather: torch.Tensor | None,
    scatter: torch.Tensor | None,
    m: int,
    out: torch.Tensor,
    target: Target,
    first_group: int = 0,
) -> None:
    """out[scatter[i]] = activation(x[gather[i]] w[g] + bias[g]), m rows i of all groups g; m and n at least 1, any strides.

    w and bias may be those of the groups from first_group on alone: then rows of other groups stay as they are."""
    (num_here, k, n), (num_out_rows, n_out), num_groups = w.shape, out.shape, offsets.shape[0] - 1
    if target.capability == HOPPER and gather is None and scatter is None:
        from evenshare.gemm import hopper_grouped

        if hopper_grouped.refusal(x, w, num_groups, target) is None:
            hopper_grouped.matmul(x, w, offsets.contiguous(), bias, activation, out, target, first_group)
            return
    aligned = loads_vectors(x) and w.stride(0) % 16 == 0 and loads_vectors(w[0] if n == n_out else w[0][:, :n_out])
    tile, num_workers = plan_grouped(m, num_groups, n, k, x.element_size(), target.num_sms, aligned, target.interpreted)
    workspace = stream_workspace(2 * num_workers * tile.block_m * tile.block_n, 2 * num_workers, x.device)
    with torch.cuda.device_of(x):
        grouped.grouped_matmul[(num_workers,)](
            x,
            w,
            bias,
            out,
            offsets.contiguous(),
            None if gather is None else gather.contiguous(),
            None if scatter is None else scatter.contiguous(),
            workspace.partials,
            workspace.counters,
            m,
            n_out,
            k,
            x.shape[0],
            num_out_rows,
            *x.stride(),
            *w.stride(),
            *((0, 0) if bias is None else bias.stride()),
            *out.stride(),
            num_groups,
            first_group,
            num_here,
            num_workers,
            max(1, -(-k // tile.block_k)),
            plans.MIN_STEPS_PER_SHARE,
            ACTIVATION=get_activation(activation),
            GATED=is_gated(activation),
            GROUPS=triton.next_power_of_2(num_here),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            NUM_STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )

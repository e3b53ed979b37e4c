"""Gated activations of a row [gate | up]: act(gate) * up."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from evenshare.device import epilogue
from evenshare.device.activations import GATED_SUFFIX, get_activation
from evenshare.device.launcher import Launch, get_launcher
from evenshare.device.target import select_target
from evenshare.ops.kernels import activation as activation_kernels
from evenshare.ops.rows import check_float, check_like, choose_blocks, fold, shares_memory

GATES = ("silu", "gelu", "gelu_tanh")
MAX_BLOCK_D = 1024


def activate_and_multiply(
    x: torch.Tensor, activation: str, *, out: torch.Tensor | None = None, backend: str | None = None
) -> torch.Tensor:
    """activation(x[..., :d]) * x[..., d:], as in SwiGLU and GeGLU (arXiv 2002.05202).

    x: [..., 2 d], float32, float16 or bfloat16, any strides. activation: "silu", "gelu" (with erf) or "gelu_tanh".
    out: [..., d] of x's dtype, any strides; it may be x[..., :d].

    Returns out, computed in fp32 and rounded once. Raises ValueError or TypeError naming the argument, before any write.

    >>> activate_and_multiply(torch.tensor([[0.0, 20.0, 5.0, 2.0]]), "silu")
    tensor([[ 0., 40.]])
    """
    check_float("x", x)
    if activation not in GATES:
        raise ValueError(f"activation: got {activation!r}, want one of {', '.join(GATES)}")
    if x.shape[-1] % 2:
        raise ValueError(f"x: got {x.shape[-1]} columns, want an even number: [gate | up]")
    width = x.shape[-1] // 2
    shape = (*x.shape[:-1], width)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    else:
        check_like("out", out, "x", x, shape)
    target = select_target(x.device, backend)
    if out.numel() == 0:
        return out
    if target.backend == "cpu":
        out.copy_(get_activation(activation + GATED_SUFFIX)(x.float()))
        return out
    rows, out_rows = fold(x), fold(out)
    launch = _launch(x.device, tuple(out_rows.shape), rows.stride(), out_rows.stride(), activation, target.interpreted)
    launch(rows, out_rows)
    if not shares_memory(out_rows, out):
        out.copy_(out_rows.view(out.shape))
    return out


@lru_cache(maxsize=512)
def _launch(
    device: torch.device,
    shape: tuple[int, ...],
    x_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    activation: str,
    interpreted: bool,
) -> Launch:
    outer, inner, width = shape
    blocks = choose_blocks(width, MAX_BLOCK_D, interpreted)
    launcher = get_launcher(
        activation_kernels.gated_activation,
        2,
        ACTIVATION=epilogue.get_activation(activation),
        BLOCK_M=blocks.rows,
        BLOCK_D=blocks.columns,
        num_warps=blocks.num_warps,
    )
    grid = (triton.cdiv(outer * inner, blocks.rows), triton.cdiv(width, blocks.columns))
    return launcher.bind(device, grid, (outer * inner, inner, width, *x_strides, *out_strides))

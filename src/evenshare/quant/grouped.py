"""The product of a mixture of experts, each with its own 4-bit weight and its own rows of x."""

from __future__ import annotations

import torch

from evenshare.device.checks import check_epilogue, check_is_tensor
from evenshare.device.target import select_target
from evenshare.quant import cpu
from evenshare.quant.experts import ExpertWeights
from evenshare.quant.functions import check_x


def grouped_w4a16_matmul(
    x: torch.Tensor,
    weights: ExpertWeights,
    offsets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """y[offsets[e] : offsets[e + 1]] = activation(x[offsets[e] : offsets[e + 1]] W_eᵀ + bias[e]) for every expert e.

    x: float16, bfloat16 or float32 [num_tokens, k], sorted by expert, any strides.
    weights: 4-bit weights [n, k] of all experts, on the device of x.
    offsets: int32 [num_experts + 1], not decreasing, on the device of x, where the host never reads it. Experts may have no rows.
        Rows of y before offsets[0] and from offsets[num_experts] on are 0, so x may have any number of rows to spare.
    bias: [num_experts, n], any float dtype.
    activation, out, backend: as for `w4a16_matmul`.

    Returns [num_tokens, n_out] in the dtype of x. On a GPU it is one launch: its programs count the tiles of every expert and share
    the k-steps of all of them evenly, however unevenly the rows are dealt (arXiv 2301.03598). Results repeat bit for bit. From some
    700 rows an expert on, on Hopper, weights are first rounded to the dtype of x, into a temporary of up to 256 MB, or one expert.

    Raises TypeError for a wrong dtype and ValueError for a wrong shape, device, activation or backend, before any work, and on the
    CPU for offsets that decrease or leave x. On a GPU such offsets give rows without meaning, and touch no other memory.

    >>> import torch
    >>> from evenshare.quant import ExpertWeights, grouped_w4a16_matmul, quantize
    >>> weights = ExpertWeights(quantize(torch.randn(4 * 64, 128), group_size=32), num_experts=4)
    >>> offsets = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)
    >>> grouped_w4a16_matmul(torch.randn(9, 128), weights, offsets, activation="silu_and_multiply").shape
    torch.Size([9, 32])
    """
    if not isinstance(weights, ExpertWeights):
        raise TypeError(f"weights: got {type(weights).__name__}, want ExpertWeights")
    if weights.weight.bits != 4:
        raise ValueError(f"weights: got {weights.weight.bits}-bit codes, want 4")
    check_x(x, weights.weight)
    if x.ndim != 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, want [num_tokens, {weights.k}]")
    n_out = check_epilogue(x, "x", weights.n, None, activation, None, out)
    _check_offsets(offsets, x, weights.num_experts)
    if bias is not None:
        _check_bias(bias, x, weights)
    target = select_target(x.device, backend)
    y = x.new_empty(x.shape[0], n_out) if out is None else out
    if y.numel() == 0:
        return y
    if target.backend == "cpu":
        _loop(x, weights, offsets.tolist(), bias, activation, y)
    else:
        from evenshare.quant import launch  # triton is not imported for the CPU backend

        launch.grouped_matmul(x, weights, offsets, bias, activation, y, target)
    return y


def _loop(
    x: torch.Tensor,
    weights: ExpertWeights,
    offsets: list[int],
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
) -> None:
    out[: offsets[0]] = 0
    out[offsets[-1] :] = 0
    for i, weight in enumerate(weights.experts):
        begin, end = offsets[i], offsets[i + 1]
        if begin < end:
            out[begin:end] = cpu.linear(x[begin:end], weight, None if bias is None else bias[i], activation, None)


def _check_offsets(offsets: torch.Tensor, x: torch.Tensor, num_experts: int) -> None:
    check_is_tensor(offsets=offsets)
    if offsets.dtype != torch.int32:
        raise TypeError(f"offsets: got {offsets.dtype}, want torch.int32")
    if offsets.shape != (num_experts + 1,):
        raise ValueError(f"offsets: got shape {tuple(offsets.shape)}, want [{num_experts + 1}], one more than experts")
    if offsets.device != x.device:
        raise ValueError(f"offsets: got device {offsets.device}, want that of x, {x.device}")
    if offsets.device.type == "cpu":
        steps = torch.diff(offsets, prepend=offsets.new_zeros(1), append=offsets.new_full((1,), x.shape[0]))
        if bool((steps < 0).any()):
            raise ValueError(
                f"offsets: got {offsets.tolist()}, want them not to decrease, from 0 to {x.shape[0]} rows of x"
            )


def _check_bias(bias: torch.Tensor, x: torch.Tensor, weights: ExpertWeights) -> None:
    check_is_tensor(bias=bias)
    if not bias.is_floating_point():
        raise TypeError(f"bias: got {bias.dtype}, want a floating-point tensor")
    if bias.shape != (weights.num_experts, weights.n):
        raise ValueError(f"bias: got shape {tuple(bias.shape)}, want [{weights.num_experts}, {weights.n}]")
    if bias.device != x.device:
        raise ValueError(f"bias: got device {bias.device}, want that of x, {x.device}")

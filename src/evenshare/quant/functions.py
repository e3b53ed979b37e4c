"""Public functions of the quantised house."""

from __future__ import annotations

from typing import TypeVar

import torch

from evenshare.device.checks import check_epilogue, check_is_tensor
from evenshare.device.target import select_target
from evenshare.quant import cpu
from evenshare.quant.experts import ExpertWeights
from evenshare.quant.weight import QuantizedWeight

Weight = TypeVar("Weight", QuantizedWeight, ExpertWeights)
ACTIVATION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def w4a16_matmul(
    x: torch.Tensor,
    weight: QuantizedWeight,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """y = activation(x Wᵀ + bias) + residual with a 4-bit weight, dequantised inside the kernel; sums in float32.

    x: float16, bfloat16 or float32 [..., k], any strides.
    weight: 4-bit `QuantizedWeight` [n, k] on the device of x. It is packed for the backend at the first call (or by `prepare`).
    bias: [n], any float dtype.
    activation: None, "relu", "gelu", "gelu_tanh" or "silu"; or "silu_and_multiply", "gelu_and_multiply" or
        "gelu_tanh_and_multiply": the rows of W are [gate | up], n / 2 of each,
        and y = activation(gate) * up has n_out = n / 2. Otherwise
        n_out = n.
    residual: [..., n_out], any float dtype and strides, added after the activation; it may be `out` itself.
    out: [..., n_out], dtype and device of x, any strides without overlap; returned. Must not share memory with x or bias.
    backend: None (by device), "cpu" or "triton".

    Returns [..., n_out] in the dtype of x; an empty x gives an empty result. On a GPU the weight is split along k by even shares
    (arXiv 2301.03598, 2402.00025) and results repeat bit for bit. On Hopper, codes and scales act exactly on 16-bit x of up to some
    700 rows; for more, weights are rounded to the dtype of x, into a temporary of up to 256 MB. On the CPU, bfloat16 rounds scales
    to bfloat16.

    Raises TypeError for a wrong dtype and ValueError for a wrong shape, device, activation or backend, before any work.

    >>> import torch
    >>> from evenshare.quant import quantize, w4a16_matmul
    >>> weight = quantize(torch.randn(64, 128), group_size=32)
    >>> w4a16_matmul(torch.randn(3, 128), weight, activation="silu").shape
    torch.Size([3, 64])
    """
    _check_weight(weight)
    if weight.bits != 4:
        raise ValueError(f"weight: got {weight.bits}-bit codes, want 4 (w8a16_matmul takes 8)")
    return _matmul(x, weight, bias, activation, residual, out, backend)


def w8a16_matmul(
    x: torch.Tensor,
    weight: QuantizedWeight,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """`w4a16_matmul` for 8-bit weights (GGUF Q8_0), grouped in the same way."""
    _check_weight(weight)
    if weight.bits != 8:
        raise ValueError(f"weight: got {weight.bits}-bit codes, want 8 (w4a16_matmul takes 4)")
    return _matmul(x, weight, bias, activation, residual, out, backend)


def _check_weight(weight: QuantizedWeight) -> None:
    if not isinstance(weight, QuantizedWeight):
        raise TypeError(f"weight: got {type(weight).__name__}, want a QuantizedWeight (see evenshare.quantize)")


def prepare(weight: Weight, dtype: torch.dtype, backend: str | None = None, *, activation: str | None = None) -> Weight:
    """Pack `weight`, a `QuantizedWeight` or `ExpertWeights`, now for activations of `dtype`, so that the first call does not have
    to. activation: that of the calls to come, because a gated weight is packed in an order of its own. Returns the weight."""
    if dtype not in ACTIVATION_DTYPES:
        raise TypeError(f"dtype: got {dtype}, want float32, float16 or bfloat16")
    if isinstance(weight, ExpertWeights):
        canonical, parts, num_experts = weight.weight, weight.experts, weight.num_experts
    else:
        canonical, parts, num_experts = weight, (weight,), None
    target = select_target(canonical.device, backend)
    if target.backend == "cpu":
        for part in parts:
            cpu.pack(part, dtype)
    else:
        from evenshare.quant import launch

        launch.pack(canonical, num_experts, dtype, activation, target)
    return weight


def _matmul(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    backend: str | None,
) -> torch.Tensor:
    check_x(x, weight)
    n_out = check_epilogue(x, "x", weight.n, bias, activation, residual, out)
    rows = x if x.ndim == 2 else x.reshape(-1, weight.k)
    if residual is not None and x.ndim != 2:
        residual = residual.reshape(rows.shape[0], n_out)
    if backend == "cpu" or (backend is None and not x.is_cuda):
        y = cpu.linear(rows, weight, bias, activation, residual)
    else:
        target = select_target(x.device, backend)
        from evenshare.quant import launch  # triton is not imported for the CPU backend

        y = out if out is not None and out.ndim == 2 else x.new_empty(rows.shape[0], n_out)
        if y.numel():
            launch.matmul(rows, weight, bias, activation, residual, y, target)
        if y is out:
            return y
    y = y if x.ndim == 2 else y.view(*x.shape[:-1], n_out)
    return y if out is None else out.copy_(y)


def check_x(x: torch.Tensor, weight: QuantizedWeight) -> None:
    check_is_tensor(x=x)
    if x.dtype not in ACTIVATION_DTYPES:
        raise TypeError(f"x: got {x.dtype}, want float32, float16 or bfloat16")
    if x.ndim == 0 or x.shape[-1] != weight.k:
        raise ValueError(f"x: got shape {tuple(x.shape)}, want [..., {weight.k}], the k of weight {weight.shape}")
    if x.device != weight.codes.device:
        raise ValueError(f"x: got device {x.device}, want that of weight, {weight.device}")

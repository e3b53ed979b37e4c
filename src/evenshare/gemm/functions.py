"""Public functions of the gemm house."""

from __future__ import annotations

import math

import torch

from evenshare.device.checks import check_epilogue, check_is_tensor
from evenshare.device.target import select_target
from evenshare.gemm import reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """y = activation(a b + bias) + residual, dealt to the GPU in even shares (Stream-K, arXiv 2301.03598).

    a: float32, float16 or bfloat16 [..., k], any strides; leading dims that are no view of one row dim are copied once.
    b: [k, n], dtype and device of a, any strides (a Linear's weight is passed as `weight.T`).
    bias: [n], any float dtype.
    activation: None, "relu", "gelu", "gelu_tanh" or "silu"; or "silu_and_multiply", "gelu_and_multiply" or
        "gelu_tanh_and_multiply": the n columns are [gate | up] and y = activation(gate) * up has n_out = n / 2. Otherwise
        n_out = n.
    residual: [..., n_out], any float dtype and strides, added after the activation; it may be `out` itself.
    out: [..., n_out], dtype and device of a, any strides without overlap; returned. Must not share memory with a, b or bias.
    backend: None (by device), "cpu" or "triton".

    Returns [..., n_out] in the dtype of a. On a GPU, products are summed in float32 (float32 inputs are not rounded to TF32), bias,
    activation and residual are applied to that sum, and the result is rounded once; it repeats bit for bit. k = 0 gives
    activation(bias) + residual; m = 0 or n = 0 gives an empty result.

    Raises TypeError for a wrong dtype and ValueError for a wrong shape, device, activation or backend, before any work.

    >>> import torch
    >>> from evenshare.gemm import matmul
    >>> matmul(torch.randn(3, 128), torch.randn(128, 64), activation="silu").shape
    torch.Size([3, 64])
    """
    _validate(a, b)
    n_out = check_epilogue(a, "a", b.shape[1], bias, activation, residual, out)
    target = select_target(a.device, backend)
    shape = (*a.shape[:-1], n_out)
    num_rows = math.prod(shape[:-1])
    rows = a if a.ndim == 2 else a.reshape(num_rows, b.shape[0])
    if residual is not None and a.ndim != 2:
        residual = residual.reshape(num_rows, n_out)
    if target.backend == "cpu":
        y = reference.matmul(rows, b, bias, activation, residual)
    else:
        from evenshare.gemm import launch

        y = out if out is not None and out.ndim == 2 else a.new_empty(num_rows, n_out)
        if y.numel():
            launch.matmul(rows, b, bias, activation, residual, y, target)
        if y is out:
            return out
    y = y if a.ndim == 2 else y.view(shape)
    return y if out is None else out.copy_(y)


def _validate(a: torch.Tensor, b: torch.Tensor) -> None:
    check_is_tensor(a=a, b=b)
    if a.dtype not in DTYPES:
        raise TypeError(f"a: got {a.dtype}, want float32, float16 or bfloat16")
    if b.dtype != a.dtype:
        raise TypeError(f"b: got {b.dtype}, want that of a, {a.dtype}")
    if b.ndim != 2:
        raise ValueError(f"b: got shape {tuple(b.shape)}, want [k, n]")
    if a.ndim == 0 or a.shape[-1] != b.shape[0]:
        raise ValueError(f"a: got shape {tuple(a.shape)}, want [..., {b.shape[0]}], the k of b {tuple(b.shape)}")
    if b.device != a.device:
        raise ValueError(f"b: got device {b.device}, want that of a, {a.device}")

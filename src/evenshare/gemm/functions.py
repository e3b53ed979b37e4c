"""Public functions of the gemm house."""

from __future__ import annotations

import math

import torch

from evenshare.device.activations import get_activation
from evenshare.device.checks import check_is_tensor
from evenshare.device.target import select_target
from evenshare.gemm import reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """y = activation(a b + bias), dealt to the GPU in even shares (Stream-K, arXiv 2301.03598).

    a: float32, float16 or bfloat16 [..., k], any strides; leading dims that are no view of one row dim are copied once.
    b: [k, n], dtype and device of a, any strides (a Linear's weight is passed as `weight.T`).
    bias: [n], any float dtype.
    activation: None, "relu", "gelu", "gelu_tanh" or "silu".
    out: [..., n], dtype and device of a, any strides without overlap; returned. Must not share memory with a, b or bias.
    backend: None (by device), "cpu" or "triton".

    Returns [..., n] in the dtype of a. On a GPU, products are summed in float32 (float32 inputs are not rounded to TF32), bias and
    activation are applied to that sum, and the result is rounded once; it repeats bit for bit. k = 0 gives activation(bias);
    m = 0 or n = 0 gives an empty result.

    Raises TypeError for a wrong dtype and ValueError for a wrong shape, device, activation or backend, before any work.

    >>> import torch
    >>> from evenshare.gemm import matmul
    >>> matmul(torch.randn(3, 128), torch.randn(128, 64), activation="silu").shape
    torch.Size([3, 64])
    """
    _validate(a, b, bias, activation, out)
    target = select_target(a.device, backend)
    k, n = b.shape
    shape = (*a.shape[:-1], n)
    rows = a if a.ndim == 2 else a.reshape(math.prod(shape[:-1]), k)
    if target.backend == "cpu":
        y = reference.matmul(rows, b, bias, activation)
    else:
        from evenshare.gemm import launch

        y = out if out is not None and out.ndim == 2 else a.new_empty(rows.shape[0], n)
        if y.numel():
            launch.matmul(rows, b, bias, activation, y, target)
        if y is out:
            return out
    y = y if a.ndim == 2 else y.view(shape)
    return y if out is None else out.copy_(y)


def _validate(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor | None,
) -> None:
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
    get_activation(activation)
    n = b.shape[1]
    if bias is not None:
        check_is_tensor(bias=bias)
        if not bias.is_floating_point():
            raise TypeError(f"bias: got {bias.dtype}, want a floating-point tensor")
        if bias.shape != (n,):
            raise ValueError(f"bias: got shape {tuple(bias.shape)}, want [{n}], the n of b {tuple(b.shape)}")
        if bias.device != a.device:
            raise ValueError(f"bias: got device {bias.device}, want that of a, {a.device}")
    if out is not None:
        check_is_tensor(out=out)
        want = (*a.shape[:-1], n)
        if out.dtype != a.dtype:
            raise TypeError(f"out: got {out.dtype}, want that of a, {a.dtype}")
        if out.shape != want:
            raise ValueError(f"out: got shape {tuple(out.shape)}, want {want}")
        if out.device != a.device:
            raise ValueError(f"out: got device {out.device}, want that of a, {a.device}")
        if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
            raise ValueError(f"out: got strides {out.stride()} for shape {want}, want elements that do not overlap")

"""Public functions of the gemm house."""

from __future__ import annotations

import math

import torch

from evenshare.device.checks import check_epilogue, check_is_tensor
from evenshare.device.target import select_target
from evenshare.gemm import reference
from evenshare.gemm.epilogue import Epilogue

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
PRECISIONS = ("ieee", "tf32")


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str = "ieee",
    backend: str | None = None,
) -> torch.Tensor:
    """y = activation(alpha a b + bias) + beta residual, dealt to the GPU in even shares (Stream-K, arXiv 2301.03598).

    a: float32, float16 or bfloat16 [..., k], any strides; leading dims that are no view of one row dim are copied once. With a
        batch of b, [batch, m, k].
    b: [k, n] or [batch, k, n], dtype and device of a, any strides (a Linear's weight is passed as `weight.T`).
    bias: [n], any float dtype.
    activation: None, "relu", "gelu", "gelu_tanh" or "silu"; or "silu_and_multiply", "gelu_and_multiply" or
        "gelu_tanh_and_multiply": the n columns are [gate | up] and y = activation(gate) * up has n_out = n / 2. Otherwise
        n_out = n.
    residual: [..., n_out], any float dtype and strides, added after the activation; it may be `out` itself, so that `out` is
        accumulated into.
    alpha, beta: numbers.
    out: [..., n_out] on the device of a, any strides without overlap; returned. Must not share memory with a, b or bias.
    out_dtype: float32, float16 or bfloat16, of y and `out`; None: that of a.
    precision: of float32 operands on a GPU: "ieee", or "tf32", rounded to 10 bits of mantissa for the tensor cores.
    backend: None (by device), "cpu" or "triton".

    Returns [..., n_out]. On a GPU, products are summed in float32, what follows the sum
    is applied to it, and the result is rounded once; it repeats bit for bit. k = 0 gives activation(bias) + beta residual; a
    product without elements is empty. The CPU rounds a product to the dtype of a first.

    Raises TypeError for a wrong dtype and ValueError for a wrong shape, device, activation or backend, before any work.

    >>> import torch
    >>> from evenshare.gemm import matmul
    >>> matmul(torch.randn(3, 128), torch.randn(128, 64), activation="silu").shape
    torch.Size([3, 64])
    """
    _validate(a, b)
    dtype = a.dtype if out_dtype is None else out_dtype
    if dtype not in DTYPES:
        raise TypeError(f"out_dtype: got {out_dtype}, want float32, float16 or bfloat16")
    n_out = check_epilogue(a, "a", b.shape[-1], bias, activation, residual, out, dtype)
    for name, number in (("alpha", alpha), ("beta", beta)):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"{name}: got {type(number).__name__}, want a number")
    if precision not in PRECISIONS:
        raise ValueError(f"precision: got {precision!r}, want one of {', '.join(PRECISIONS)}")
    target = select_target(a.device, backend)
    shape = (*a.shape[:-1], n_out)
    if b.ndim == 2:  # a batch of one, of rows
        rows = a.unsqueeze(0) if a.ndim == 2 else a.reshape(1, math.prod(shape[:-1]), b.shape[0])
        b = b.unsqueeze(0)
    else:
        rows = a
    in_place = out is not None and (out.ndim == 2 or rows is a)
    y = out if in_place and out is not None else a.new_empty(*rows.shape[:2], n_out, dtype=dtype)
    y = y.unsqueeze(0) if y.ndim == 2 else y
    epilogue = Epilogue(bias, activation, None if residual is None else residual.reshape(y.shape), alpha, beta)
    if target.backend == "cpu":
        y.copy_(reference.matmul(rows, b, epilogue, dtype))
    elif y.numel():
        from evenshare.gemm import launch

        launch.matmul(rows, b, epilogue, y, target, precision)
    if out is None:
        return y.view(shape)
    return out if in_place else out.copy_(y.view(shape))


def _validate(a: torch.Tensor, b: torch.Tensor) -> None:
    check_is_tensor(a=a, b=b)
    if a.dtype not in DTYPES:
        of_codes = ", or scaled_matmul" if a.dtype in FP8_DTYPES else ""
        raise TypeError(f"a: got {a.dtype}, want float32, float16 or bfloat16{of_codes}")
    if b.dtype != a.dtype:
        raise TypeError(f"b: got {b.dtype}, want that of a, {a.dtype}")
    if b.ndim not in (2, 3):
        raise ValueError(f"b: got shape {tuple(b.shape)}, want [k, n] or [batch, k, n]")
    if b.ndim == 3 and (a.ndim != 3 or a.shape[0] != b.shape[0]):
        raise ValueError(
            f"a: got shape {tuple(a.shape)}, want [{b.shape[0]}, m, {b.shape[1]}], the batch of b {tuple(b.shape)}"
        )
    if a.ndim == 0 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a: got shape {tuple(a.shape)}, want [..., {b.shape[-2]}], the k of b {tuple(b.shape)}")
    if b.device != a.device:
        raise ValueError(f"b: got device {b.device}, want that of a, {a.device}")

"""What every public function checks first."""

from __future__ import annotations

from typing import Any

import torch

from evenshare.device.activations import get_activation, is_gated


def check_is_tensor(**arguments: Any) -> None:
    """Raise TypeError naming the first argument that is no tensor."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, want a tensor")


def check_epilogue(
    x: torch.Tensor,
    name: str,
    n: int,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> int:
    """The columns of the output of a product of x [..., k], `name` in messages, with n columns: n, or n / 2 if gated.

    Raises TypeError or ValueError for an activation, bias, residual or out that does not fit.
    """
    # On the path of every CPU token: no tuple or string is built unless something is wrong.
    get_activation(activation)
    num_columns = n
    if is_gated(activation):
        if n % 2:
            raise ValueError(f"activation: got {activation!r} for n = {n}, want an even n: [gate | up]")
        num_columns = n // 2
    if bias is not None:
        check_is_tensor(bias=bias)
        if not bias.is_floating_point():
            raise TypeError(f"bias: got {bias.dtype}, want a floating-point tensor")
        if bias.shape != (n,):
            raise ValueError(f"bias: got shape {tuple(bias.shape)}, want [{n}], the n of the product")
        if bias.device != x.device:
            raise ValueError(f"bias: got device {bias.device}, want that of {name}, {x.device}")
    if residual is not None:
        check_is_tensor(residual=residual)
        if not residual.is_floating_point():
            raise TypeError(f"residual: got {residual.dtype}, want a floating-point tensor")
        if residual.shape != (want := (*x.shape[:-1], num_columns)):
            raise ValueError(f"residual: got shape {tuple(residual.shape)}, want {want}, that of the output")
        if residual.device != x.device:
            raise ValueError(f"residual: got device {residual.device}, want that of {name}, {x.device}")
    if out is not None:
        check_is_tensor(out=out)
        if out.dtype != (x.dtype if out_dtype is None else out_dtype):
            want_dtype = f"that of {name}, {x.dtype}" if out_dtype in (None, x.dtype) else str(out_dtype)
            raise TypeError(f"out: got {out.dtype}, want {want_dtype}")
        if out.shape != (want := (*x.shape[:-1], num_columns)):
            raise ValueError(f"out: got shape {tuple(out.shape)}, want {want}")
        if out.device != x.device:
            raise ValueError(f"out: got device {out.device}, want that of {name}, {x.device}")
        if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
            raise ValueError(f"out: got strides {out.stride()} for shape {want}, want elements that do not overlap")
    return num_columns

"""What happens to a finished float32 tile: bias, activation, one rounding. An activation is handed to a kernel as a constexpr;
`device.activations` has the same names in torch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

SQRT_HALF = tl.constexpr(0.7071067811865476)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def identity(y):
    return y


@triton.jit
def relu(y):
    return tl.where(y < 0.0, 0.0, y)  # a NaN stays one


@triton.jit
def gelu(y):
    return 0.5 * y * (1.0 + tl.erf(y * SQRT_HALF))


@triton.jit
def gelu_tanh(y):
    inner = SQRT_2_OVER_PI * (y + 0.044715 * y * y * y)
    return y * tl.sigmoid(2.0 * inner)  # 0.5 (1 + tanh(z)) = sigmoid(2 z)


@triton.jit
def silu(y):
    return y * tl.sigmoid(y)


@triton.jit
def store_tile(out_ptr, bias_ptr, acc, rows, columns, m, n, stride_out_m, stride_out_n,
               HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):  # fmt: skip
    """out[rows, columns] = ACTIVATION(acc + bias[columns]), rounded once; rows past m and columns past n are left alone."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    acc = ACTIVATION(acc)
    offsets = rows.to(tl.int64)[:, None] * stride_out_m + columns.to(tl.int64)[None, :] * stride_out_n
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


ACTIVATIONS: dict[str | None, Any] = {
    None: identity,
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
}


def get_activation(name: str | None) -> Any:
    """The jit function of `name`; ValueError for an unknown one."""
    if name not in ACTIVATIONS:
        names = ", ".join(str(known) for known in ACTIVATIONS)
        raise ValueError(f"activation: got {name!r}, want one of {names}")
    return ACTIVATIONS[name]

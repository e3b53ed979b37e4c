"""Activations on float32 accumulators, handed to a kernel as a constexpr. `device.activations` has the same names in torch."""

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

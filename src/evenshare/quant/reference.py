"""The product in plain torch: the tests' oracle, and the activations by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from evenshare.quant.weight import QuantizedWeight

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
}


def matmul(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """activation(x Wᵀ + bias), all computed in `dtype`: x [m, k] -> [m, n]."""
    y = x.to(dtype) @ weight.dequantize(torch.float32).to(dtype).T
    if bias is not None:
        y = y + bias.to(dtype)
    return y if activation is None else ACTIVATIONS[activation](y)

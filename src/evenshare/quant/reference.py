"""The product in plain torch: the tests' oracle."""

from __future__ import annotations

import torch

from evenshare.device.activations import get_activation
from evenshare.quant.weight import QuantizedWeight


def matmul(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """activation(x Wᵀ + bias) + residual, all computed in `dtype`: x [m, k] -> [m, n_out]."""
    y = x.to(dtype) @ weight.dequantize(torch.float32).to(dtype).T
    if bias is not None:
        y = y + bias.to(dtype)
    y = get_activation(activation)(y)
    return y if residual is None else y + residual.to(dtype)

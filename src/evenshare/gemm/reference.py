"""The product in plain torch: the CPU backend and, on float64 tensors, the tests' oracle."""

from __future__ import annotations

import torch

from evenshare.device.activations import get_activation


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(a [m, k] b [k, n] + bias [n]) + residual [m, n_out] in the dtype of a."""
    if bias is None:
        y = torch.mm(a, b)
    elif bias.dtype == a.dtype:
        y = torch.addmm(bias, a, b)  # one rounding for the sum and the bias
    else:
        y = torch.mm(a, b) + bias
    y = get_activation(activation)(y)
    return (y if residual is None else y + residual).to(a.dtype)

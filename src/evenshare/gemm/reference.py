"""The product in plain torch: the CPU backend and, on float64 tensors, the tests' oracle."""

from __future__ import annotations

import torch

from evenshare.device.activations import get_activation
from evenshare.gemm.epilogue import Epilogue


def matmul(
    a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """activation(alpha a [..., m, k] b [..., k, n] + bias) + beta residual in `dtype`, or that of a."""
    bias, activation, residual, alpha, beta = epilogue or Epilogue()
    if alpha != 1:
        y = torch.matmul(a, b) * alpha
        y = y if bias is None else y + bias
    elif bias is not None and bias.dtype == a.dtype and a.ndim == 2:
        y = torch.addmm(bias, a, b)  # one rounding for the sum and the bias
    else:
        y = torch.matmul(a, b)
        y = y if bias is None else y + bias
    y = get_activation(activation)(y)
    if residual is not None:
        y = y + (residual if beta == 1 else beta * residual)
    return y.to(dtype or a.dtype)

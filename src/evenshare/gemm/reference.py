"""The product in plain torch: the CPU backend and, on float64 tensors, the tests' oracle."""

from __future__ import annotations

import torch

from evenshare.device.activations import get_activation
from evenshare.gemm.epilogue import Epilogue

SCALE_BLOCK = 128  # of k, and of n in the scales of a matrix, that share a scale


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


def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    epilogue: Epilogue,
    dtype: torch.dtype,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`matmul` of fp8 codes a [m, k] and b [k, n], computed in compute_dtype.

    scale_a: [m or 1, blocks of k or 1]; scale_b: [blocks of k or 1, n, blocks of n or 1]; None: 1.
    """
    left, right = _dequantize(a.to(compute_dtype), scale_a), _dequantize(b.to(compute_dtype), scale_b)
    bias, residual = (None if t is None else t.to(compute_dtype) for t in (epilogue.bias, epilogue.residual))
    return matmul(left, right, epilogue._replace(bias=bias, residual=residual), dtype)


def _dequantize(codes: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return codes
    for dim, size in enumerate(codes.shape):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(SCALE_BLOCK, dim).narrow(dim, 0, size)
    return codes * scale

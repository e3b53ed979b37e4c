"""FlashInfer's norms."""

from __future__ import annotations

import torch

from evenshare.ops import add_rms_norm, layer_norm, rms_norm

Scale = float | torch.Tensor


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """input [..., d] / rms * weight [d]; see `evenshare.ops.rms_norm`."""
    return rms_norm(input, weight, eps, out=out)


def rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: Scale,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """out (fp8) = rmsnorm / scale, cut off at the type's largest value."""
    rms_norm(input, weight, eps, scale=scale, out=out)


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """residual += input; input = rmsnorm(residual); both in place."""
    add_rms_norm(input, residual, weight, eps, out=input)


def fused_add_rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: Scale,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """residual += input in place; out (fp8) = rmsnorm(residual) / scale."""
    add_rms_norm(input, residual, weight, eps, scale=scale, out=out)


def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """input / rms * (weight + 1)."""
    return rms_norm(input, weight, eps, weight_offset=1.0, out=out)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """residual += input; input = gemma_rmsnorm(residual); both in place."""
    add_rms_norm(input, residual, weight, eps, weight_offset=1.0, out=input)


def layernorm(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """(input - mean) / deviation * gemma + beta."""
    return layer_norm(input, gemma, beta, eps)

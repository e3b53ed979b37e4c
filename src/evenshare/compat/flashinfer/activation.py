"""FlashInfer's gated activations."""

from __future__ import annotations

import torch

from evenshare.ops import activate_and_multiply


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """silu(input[..., :d]) * input[..., d:]."""
    return activate_and_multiply(input, "silu", out=out)


def gelu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """gelu(input[..., :d]) * input[..., d:], with erf."""
    return activate_and_multiply(input, "gelu", out=out)


def gelu_tanh_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """gelu(input[..., :d]) * input[..., d:], in its tanh form."""
    return activate_and_multiply(input, "gelu_tanh", out=out)

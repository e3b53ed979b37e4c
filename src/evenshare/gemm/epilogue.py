"""What follows a product's sum."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Epilogue(NamedTuple):
    """y = activation(alpha a b + bias) + beta residual."""

    bias: torch.Tensor | None = None  # [n]
    activation: str | None = None
    residual: torch.Tensor | None = None  # shape of y
    alpha: float = 1.0
    beta: float = 1.0

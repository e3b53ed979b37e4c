"""Quantised layers as torch modules, and their place in a transformers model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from evenshare.quant import QuantizedWeight, cpu, w4a16_matmul, w8a16_matmul


class _HoldsWeight(nn.Module):
    """A module around a `QuantizedWeight`, which moves between devices with it. Its dtype never changes: codes are codes."""

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self.quantized = weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        # `fn` is whatever .to(), .cuda() or .half() apply to every tensor; what it does to an empty one tells the device.
        self.quantized = self.quantized.to(fn(self.quantized.codes[:0]).device)
        return self


class QuantLinear(_HoldsWeight):
    """y = x Wᵀ + b with 4- or 8-bit W [n, k]: `w4a16_matmul` or `w8a16_matmul` in the place of nn.Linear.

    forward: x [..., k], float32, float16 or bfloat16 -> [..., n] in x's dtype.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None = None, *, backend: str | None = None
    ) -> None:
        super().__init__(weight)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.out_features, self.in_features = weight.shape
        self.backend = backend
        self._matmul = w4a16_matmul if weight.bits == 4 else w8a16_matmul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._matmul(x, self.quantized, bias=self.bias, backend=self.backend)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """`forward` for x [m, k] without checks and hooks: on a CPU they cost as much as a small product (8 us)."""
        if self.bias is None and x.device.type == "cpu" and self.backend != "triton":
            return cpu.matmul(x, self.quantized)
        return self._matmul(x, self.quantized, bias=self.bias, backend=self.backend)

    def extra_repr(self) -> str:
        weight = self.quantized
        return f"in_features={weight.k}, out_features={weight.n}, bits={weight.bits}, group_size={weight.group_size}"


class QuantEmbedding(_HoldsWeight):
    """Embedding lookup in a quantised table [vocabulary, d]; only the rows asked for are dequantised, to `dtype`."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__(weight)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.dtype = dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.quantized.lookup(ids, self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.quantized.bits}"


def replace_linears(model: nn.Module, weights: Mapping[str, QuantizedWeight], *, backend: str | None = None) -> None:
    """Put a `QuantLinear` in the place of each nn.Linear named in `weights` (as in `model.named_modules()`), keeping its bias.

    The linear's own weight is dropped unread, so it may be on the meta device.
    Raises KeyError if there is no such module and ValueError if it is no linear of that shape.
    """
    for name, weight in weights.items():
        try:
            linear = model.get_submodule(name)
        except AttributeError as error:
            raise KeyError(f"weights[{name!r}]: the model has no module of that name") from error
        if not isinstance(linear, nn.Linear) or (linear.out_features, linear.in_features) != weight.shape:
            raise ValueError(
                f"weights[{name!r}]: got shape {weight.shape}, want that of a linear, but the model has {linear}"
            )
        bias = None if linear.bias is None else linear.bias.detach()
        model.set_submodule(name, QuantLinear(weight, bias, backend=backend))

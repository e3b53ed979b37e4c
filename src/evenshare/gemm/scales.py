"""What multiplies fp8 codes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from evenshare.gemm.reference import SCALE_BLOCK


@dataclass(frozen=True, eq=False)
class Scales:
    """What codes a [m, k] and b [k, n] are multiplied by: factor, and where there are some, a's scales and b's."""

    a: torch.Tensor | None  # float32 [m or 1, blocks of k or 1]
    b: torch.Tensor | None  # float32 [blocks of k or 1, n, blocks of n or 1]
    factor: float
    columns_per_scale: int  # of b: 1, or SCALE_BLOCK if they are of blocks

    @property
    def a_blocks(self) -> bool:
        """Whether those of a change along k."""
        return self.a is not None and self.a.shape[1] != 1

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Of a's scales and b's; 0 along a dimension that they do not change along."""
        return (*_strides(self.a), *_strides(self.b))


def _strides(scale: torch.Tensor | None) -> tuple[int, int]:
    if scale is None:
        return 0, 0
    return tuple(0 if size == 1 else stride for size, stride in zip(scale.shape, scale.stride(), strict=True))  # type: ignore[return-value]


def make_scales(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor | float, scale_b: torch.Tensor | float
) -> Scales:
    """Of a [..., k] b [k, n], as `scaled_matmul` takes them. Raises TypeError or ValueError for what does not fit."""
    k, n = b.shape
    k_blocks, n_blocks = -(-k // SCALE_BLOCK), -(-n // SCALE_BLOCK)
    factor = 1.0
    tensors: list[torch.Tensor | None] = []
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if isinstance(scale, torch.Tensor):
            if scale.dtype != torch.float32:
                raise TypeError(f"{name}: got {scale.dtype}, want torch.float32")
            if scale.device != a.device:
                raise ValueError(f"{name}: got device {scale.device}, want that of a, {a.device}")
            tensors.append(scale.reshape(1, 1) if scale.numel() == 1 else scale)
        elif isinstance(scale, bool) or not isinstance(scale, int | float):
            raise TypeError(f"{name}: got {type(scale).__name__}, want a number or a tensor")
        else:
            factor *= scale
            tensors.append(None)
    of_a, of_b = tensors
    if of_a is not None and of_a.numel() != 1:
        if of_a.ndim != a.ndim or of_a.shape[:-1] != a.shape[:-1] or of_a.shape[-1] not in (1, k_blocks):
            want = f"{(*a.shape[:-1], 1)} or {(*a.shape[:-1], k_blocks)}"
            raise ValueError(f"scale_a: got shape {tuple(of_a.shape)}, want one element, {want}")
        of_a = of_a.reshape(math.prod(a.shape[:-1]), of_a.shape[-1])
    columns_per_scale = 1
    if of_b is not None and of_b.numel() != 1 and of_b.shape != (1, n):
        if of_b.shape != (k_blocks, n_blocks):
            want = f"{(1, n)} or {(k_blocks, n_blocks)}"
            raise ValueError(f"scale_b: got shape {tuple(of_b.shape)}, want one element, {want}")
        columns_per_scale = SCALE_BLOCK
    return Scales(of_a, of_b, factor, columns_per_scale)

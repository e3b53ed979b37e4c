"""The canonical quantised weight: what every reader of a file format produces, and what every backend packs for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

GROUP_SIZES = (16, 32, 64, 128, 256)
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PER_CHANNEL = -1  # accepted wherever a group size is: one group per output row


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """Weight of a linear layer y = x Wᵀ, W [n, k], in `bits`-bit codes with a scale per group along k.

    codes: uint8. 4 bits: [n, ceil(k / 2)], low nibble first along k. 8 bits: [n, k].
    scales: float16, bfloat16 or float32 [n, num_groups], num_groups = ceil(k / group_size).
    k: number of columns of W.
    group_size: 16, 32, 64, 128, 256 or k; -1 means k.

    With q the unsigned code, the weight is one of
        (q - 2^(bits-1)) * scale    neither `zeros` nor `offsets` (symmetric);
        (q - zero) * scale          zeros: uint8 [n, num_groups];
        q * scale + offset          offsets: float [n, num_groups], dtype of scales. Float zero points are stored in this
                                    form, because zero = -offset / scale does not exist where the scale is 0.

    Scale and offset act in float32 whatever their dtype. Raises TypeError for a wrong dtype and ValueError for a wrong
    shape, device, group size or number of bits.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    k: int
    group_size: int
    bits: int = 4
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    # Packed forms, filled by the backends, one per (backend, activation dtype); no part of the value.
    packed: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.group_size == PER_CHANNEL:
            object.__setattr__(self, "group_size", self.k)
        if self.bits not in (4, 8):
            raise ValueError(f"bits: got {self.bits}, want 4 or 8")
        if self.k < 1:
            raise ValueError(f"k: got {self.k}, want at least 1")
        if self.group_size not in GROUP_SIZES and self.group_size != self.k:
            raise ValueError(f"group_size: got {self.group_size}, want one of {GROUP_SIZES}, k = {self.k} or -1")
        if self.zeros is not None and self.offsets is not None:
            raise ValueError("zeros, offsets: got both, want at most one")
        if self.scales.dtype not in SCALE_DTYPES:
            raise TypeError(f"scales: got {self.scales.dtype}, want float16, bfloat16 or float32")
        if self.codes.ndim != 2:
            raise ValueError(f"codes: got shape {tuple(self.codes.shape)}, want two dimensions")
        n = self.codes.shape[0]
        groups = (n, self.num_groups)
        self._check("codes", self.codes, torch.uint8, (n, self.k if self.bits == 8 else (self.k + 1) // 2))
        self._check("scales", self.scales, self.scales.dtype, groups)
        if self.zeros is not None:
            self._check("zeros", self.zeros, torch.uint8, groups)
        if self.offsets is not None:
            self._check("offsets", self.offsets, self.scales.dtype, groups)

    def _check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> None:
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: got {tensor.dtype}, want {dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, want {shape} for k = {self.k}, groups of {self.group_size}"
            )
        if tensor.device != self.codes.device:
            raise ValueError(f"{name}: got device {tensor.device}, want that of codes, {self.codes.device}")

    @property
    def n(self) -> int:
        return self.codes.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k) of the dequantised weight."""
        return self.codes.shape[0], self.k

    @property
    def num_groups(self) -> int:
        return -(-self.k // self.group_size)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the canonical tensors, packed forms not counted."""
        return sum(t.numel() * t.element_size() for t in self._tensors() if t is not None)

    def unpacked_codes(self) -> torch.Tensor:
        """The codes, one a byte: uint8 [n, k]."""
        if self.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(-2)[:, : self.k]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [n, k], computed in float32 and rounded once to `dtype`."""
        n, k = self.shape
        aligned = k % self.group_size == 0
        weight = self.unpacked_codes().to(torch.float32)
        weight = weight.view(n, self.num_groups, self.group_size) if aligned else weight

        def spread(per_group: torch.Tensor) -> torch.Tensor:
            per_group = per_group.to(torch.float32)[:, :, None]
            return per_group if aligned else per_group.expand(-1, -1, self.group_size).flatten(1)[:, :k]

        if self.offsets is not None:
            weight.mul_(spread(self.scales)).add_(spread(self.offsets))
        elif self.zeros is not None:
            weight.sub_(spread(self.zeros)).mul_(spread(self.scales))
        else:
            weight.sub_(1 << (self.bits - 1)).mul_(spread(self.scales))
        return weight.view(n, k).to(dtype)

    def lookup(self, indices: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Embedding lookup: rows `indices` (integer, any shape), dequantised: [*indices.shape, k]. Only those rows are read."""
        return self.take_rows(indices.reshape(-1)).dequantize(dtype).view(*indices.shape, self.k)

    def take_rows(self, index: torch.Tensor) -> QuantizedWeight:
        """The weight W[index], index an integer tensor [n']: a selection or a permutation of the output rows."""
        if index.dtype.is_floating_point or index.dtype == torch.bool or index.ndim != 1:
            raise TypeError(f"index: got {index.dtype} {tuple(index.shape)}, want an integer tensor of one dimension")
        return self._map(lambda tensor: tensor.index_select(0, index))

    def narrow(self, start: int, stop: int) -> QuantizedWeight:
        """The weight W[start:stop], sharing memory."""
        if not 0 <= start <= stop <= self.n:
            raise ValueError(f"start, stop: got {start}, {stop}, want 0 <= start <= stop <= n = {self.n}")
        return self._map(lambda tensor: tensor[start:stop])

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same weight on `device`; packed forms do not travel."""
        device = torch.device(device)
        return self if device == self.device else self._map(lambda tensor: tensor.to(device))

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.codes, self.scales, self.zeros, self.offsets

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedWeight:
        return QuantizedWeight(
            function(self.codes),
            function(self.scales),
            self.k,
            self.group_size,
            self.bits,
            None if self.zeros is None else function(self.zeros),
            None if self.offsets is None else function(self.offsets),
        )


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight of the rows of all, in order: fuses linear layers that read the same input (q, k, v; gate, up).

    Raises ValueError unless all agree in k, group size, bits, zero-point form, dtype of the scales and device.
    """
    if not weights:
        raise ValueError("weights: got an empty sequence, want at least one")

    def form(weight: QuantizedWeight) -> tuple[Any, ...]:
        zero_form = "offsets" if weight.offsets is not None else "zeros" if weight.zeros is not None else "symmetric"
        return weight.k, weight.group_size, weight.bits, zero_form, weight.scales.dtype, weight.device

    first = weights[0]
    for i, weight in enumerate(weights):
        if form(weight) != form(first):
            raise ValueError(
                f"weights[{i}]: got (k, group_size, bits, zeros, scales, device) = {form(weight)}, want {form(first)}"
            )

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(weight, name) for weight in weights])

    return QuantizedWeight(
        joined("codes"),
        joined("scales"),
        first.k,
        first.group_size,
        first.bits,
        joined("zeros") if first.zeros is not None else None,
        joined("offsets") if first.offsets is not None else None,
    )

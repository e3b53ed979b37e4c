"""The canonical quantised weight: what every reader of a file format produces, and what every backend packs for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from evenshare.quant.encodings import CODEBOOKS, ENCODINGS, INTEGER

GROUP_SIZES = (16, 32, 64, 128, 256)
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
UNIT = GROUP_SIZES[0]  # what uneven groups are padded to
PER_CHANNEL = -1  # accepted wherever a group size is: one group per output row


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """Weight of a linear layer y = x Wᵀ, W [n, k], in `bits`-bit codes with a scale per group along k.

    codes: uint8. 4 bits: [n, ceil(stored_k / 2)], low nibble first along k. 8 bits: [n, stored_k].
    scales: float16, bfloat16 or float32 [n, num_groups], num_groups = ceil(stored_k / group_size).
    k: number of columns of W.
    group_size: 16, 32, 64, 128, 256 or stored_k; -1 means stored_k.
    encoding: "integer", or "e2m1" or "nf4": 4-bit codes that number the values of a table.
    permutation: None, or int32 [stored_k]: the stored column j is column permutation[j] of W, so y = x[:, permutation] storedᵀ;
        -1 is a padding column, where x counts as 0. At most once each; a column of W that is missing is 0. This is how groups
        whose columns are not neighbours (act-order) are stored side by side (see `order_by_group`). Without one, stored_k = k.

    With q the unsigned code, the weight is one of
        (q - 2^(bits-1)) * scale    neither `zeros` nor `offsets` (symmetric);
        (q - zero) * scale          zeros: uint8 [n, num_groups];
        q * scale + offset          offsets: float [n, num_groups], dtype of scales. Float zero points are stored in this
                                    form, because zero = -offset / scale does not exist where the scale is 0;
        table[q] * scale            encodings other than "integer".

    Scale and offset act in float32 whatever their dtype. Raises TypeError for a wrong dtype and ValueError for a wrong
    shape, device, group size, number of bits or encoding, and on the CPU for a permutation out of range or with a repeated
    column (on a GPU that is not looked at: it would wait for the device).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    k: int
    group_size: int
    bits: int = 4
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    encoding: str = INTEGER
    permutation: torch.Tensor | None = None
    # Packed forms, filled by the backends, one per (backend, activation dtype); no part of the value.
    packed: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits: got {self.bits}, want 4 or 8")
        if self.k < 1:
            raise ValueError(f"k: got {self.k}, want at least 1")
        if self.permutation is not None:
            self._check_permutation(self.permutation)
        if self.group_size == PER_CHANNEL:
            object.__setattr__(self, "group_size", self.stored_k)
        if self.group_size not in GROUP_SIZES and self.group_size != self.stored_k:
            raise ValueError(f"group_size: got {self.group_size}, want one of {GROUP_SIZES}, k = {self.stored_k} or -1")
        if self.encoding not in ENCODINGS:
            raise ValueError(f"encoding: got {self.encoding!r}, want one of {', '.join(ENCODINGS)}")
        if self.encoding != INTEGER and self.bits != 4:
            raise ValueError(f"bits: got {self.bits}, want 4 for the encoding {self.encoding!r}")
        if self.encoding != INTEGER and not (self.zeros is None and self.offsets is None):
            raise ValueError(f"zeros, offsets: got one, want none for the encoding {self.encoding!r}")
        if self.zeros is not None and self.offsets is not None:
            raise ValueError("zeros, offsets: got both, want at most one")
        if self.scales.dtype not in SCALE_DTYPES:
            raise TypeError(f"scales: got {self.scales.dtype}, want float16, bfloat16 or float32")
        if self.codes.ndim != 2:
            raise ValueError(f"codes: got shape {tuple(self.codes.shape)}, want two dimensions")
        n = self.codes.shape[0]
        groups = (n, self.num_groups)
        self._check(
            "codes", self.codes, torch.uint8, (n, self.stored_k if self.bits == 8 else (self.stored_k + 1) // 2)
        )
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
                f"{name}: got shape {tuple(tensor.shape)}, want {shape} for k = {self.stored_k}, groups of {self.group_size}"
            )
        if tensor.device != self.codes.device:
            raise ValueError(f"{name}: got device {tensor.device}, want that of codes, {self.codes.device}")

    def _check_permutation(self, permutation: torch.Tensor) -> None:
        if permutation.dtype != torch.int32:
            raise TypeError(f"permutation: got {permutation.dtype}, want torch.int32")
        if permutation.ndim != 1 or permutation.numel() == 0:
            raise ValueError(
                f"permutation: got shape {tuple(permutation.shape)}, want [stored_k] with stored_k at least 1"
            )
        if permutation.device != self.codes.device:
            raise ValueError(f"permutation: got device {permutation.device}, want that of codes, {self.codes.device}")
        if permutation.device.type == "cpu":
            low, high = (int(bound) for bound in permutation.aminmax())
            if low < -1 or high >= self.k:
                raise ValueError(
                    f"permutation: got values from {low} to {high}, want -1 or a column below k = {self.k}"
                )
            if int(torch.bincount(permutation + 1, minlength=2)[1:].max()) > 1:
                raise ValueError("permutation: got a column more than once, want each at most once")

    @property
    def n(self) -> int:
        return self.codes.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k) of the dequantised weight."""
        return self.codes.shape[0], self.k

    @property
    def stored_k(self) -> int:
        """Columns that are stored, padding included: k unless there is a permutation."""
        return self.k if self.permutation is None else self.permutation.shape[0]

    @property
    def num_groups(self) -> int:
        return -(-self.stored_k // self.group_size)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the canonical tensors, packed forms not counted."""
        return sum(t.numel() * t.element_size() for t in self._tensors() if t is not None)

    def unpacked_codes(self) -> torch.Tensor:
        """The codes, one a byte: uint8 [n, stored_k]."""
        if self.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(-2)[:, : self.stored_k]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [n, k], its columns in their own order, computed in float32 and rounded once to `dtype`."""
        n, k = self.n, self.stored_k
        aligned = k % self.group_size == 0
        codes = self.unpacked_codes()
        if self.encoding == INTEGER:
            weight = codes.to(torch.float32)
        else:
            weight = torch.tensor(CODEBOOKS[self.encoding], device=codes.device)[codes.int()]
        weight = weight.view(n, self.num_groups, self.group_size) if aligned else weight

        def spread(per_group: torch.Tensor) -> torch.Tensor:
            per_group = per_group.to(torch.float32)[:, :, None]
            return per_group if aligned else per_group.expand(-1, -1, self.group_size).flatten(1)[:, :k]

        if self.encoding != INTEGER:
            weight.mul_(spread(self.scales))
        elif self.offsets is not None:
            weight.mul_(spread(self.scales)).add_(spread(self.offsets))
        elif self.zeros is not None:
            weight.sub_(spread(self.zeros)).mul_(spread(self.scales))
        else:
            weight.sub_(1 << (self.bits - 1)).mul_(spread(self.scales))
        return self._in_order(weight.view(n, k)).to(dtype)

    def _in_order(self, stored: torch.Tensor) -> torch.Tensor:
        """[n, stored_k] -> [n, k]. All padding goes to one more column, which is dropped."""
        if self.permutation is None:
            return stored
        columns = self.permutation.long()
        ordered = stored.new_zeros(self.n, self.k + 1)
        return ordered.index_copy_(1, torch.where(columns < 0, self.k, columns), stored)[:, : self.k].contiguous()

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [m, k] -> [m, stored_k]: its columns in the order of the stored ones, zeros for padding."""
        # -1 is the last column, one of zeros.
        return x if self.permutation is None else torch.nn.functional.pad(x, (0, 1))[:, self.permutation]

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
        if device == self.device:
            return self
        permutation = None if self.permutation is None else self.permutation.to(device)
        return self._map(lambda tensor: tensor.to(device), permutation)

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.codes, self.scales, self.zeros, self.offsets, self.permutation

    def _map(
        self, function: Callable[[torch.Tensor], torch.Tensor], permutation: torch.Tensor | None = None
    ) -> QuantizedWeight:
        """`function` of the tensors that have rows; the permutation stays unless another is given."""
        return QuantizedWeight(
            function(self.codes),
            function(self.scales),
            self.k,
            self.group_size,
            self.bits,
            None if self.zeros is None else function(self.zeros),
            None if self.offsets is None else function(self.offsets),
            self.encoding,
            self.permutation if permutation is None else permutation,
        )


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight of the rows of all, in order: fuses linear layers that read the same input (q, k, v; gate, up).

    Raises ValueError unless all agree in k, group size, bits, zero-point form, dtype of the scales, device, encoding and
    permutation.
    """
    if not weights:
        raise ValueError("weights: got an empty sequence, want at least one")

    def form(weight: QuantizedWeight) -> tuple[Any, ...]:
        zero_form = "offsets" if weight.offsets is not None else "zeros" if weight.zeros is not None else "symmetric"
        return weight.k, weight.group_size, weight.bits, zero_form, weight.scales.dtype, weight.device, weight.encoding

    first = weights[0]
    for i, weight in enumerate(weights):
        if form(weight) != form(first):
            raise ValueError(
                f"weights[{i}]: got (k, group_size, bits, zeros, scales, device, encoding) = {form(weight)}, "
                f"want {form(first)}"
            )
        if not _same(weight.permutation, first.permutation):
            raise ValueError(f"weights[{i}]: got another permutation than weights[0], want equal ones or none")

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
        first.encoding,
        first.permutation,
    )


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def order_by_group(g_idx: torch.Tensor, num_groups: int, group_size: int) -> tuple[torch.Tensor, int, torch.Tensor]:
    """How to store columns whose groups are given one by one (act-order), so that each group's columns are neighbours.

    g_idx: integer [k], the group of each column, in any order; a shard may hold any part of a group.

    Returns (permutation int32 [stored_k], group size of the stored weight, int64 [stored groups]: the group in 0..num_groups-1
    that each stored group's scale comes from). Where all groups with any column have group_size of them (the last one perhaps
    fewer, or the only one any number) the permutation is a stable sort. Otherwise each group is padded with -1 to a multiple
    of 16 and stored in groups of 16. Columns keep their order within a group, and groups theirs; a group without any column
    is left out.

    Raises TypeError for a g_idx that holds no integers, ValueError for another shape than [k] or a group out of range.
    """
    if g_idx.dtype.is_floating_point or g_idx.dtype == torch.bool:
        raise TypeError(f"g_idx: got {g_idx.dtype}, want integers")
    if g_idx.ndim != 1 or g_idx.numel() == 0:
        raise ValueError(f"g_idx: got shape {tuple(g_idx.shape)}, want [k] with k at least 1")
    g_idx = g_idx.long()
    low, high = (int(bound) for bound in g_idx.aminmax())
    if low < 0 or high >= num_groups:
        raise ValueError(f"g_idx: got groups from {low} to {high}, want 0 to num_groups - 1 = {num_groups - 1}")
    order = torch.argsort(g_idx, stable=True)
    counts = torch.bincount(g_idx)
    groups = counts.nonzero()[:, 0]
    counts = counts[groups]
    if groups.numel() == 1:
        return order.int(), g_idx.numel(), groups
    if bool((counts[:-1] == group_size).all()) and int(counts[-1]) <= group_size:
        return order.int(), group_size, groups
    padded = (counts + UNIT - 1) // UNIT * UNIT
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)  # how far padding moves a group's columns
    permutation = torch.full((int(padded.sum()),), -1, dtype=torch.int32, device=g_idx.device)
    permutation[torch.arange(g_idx.numel(), device=g_idx.device) + shift.repeat_interleave(counts)] = order.int()
    return permutation, UNIT, groups.repeat_interleave(padded // UNIT)

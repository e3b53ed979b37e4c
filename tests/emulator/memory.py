"""Shared memory: bytes behind the layouts' swizzles, so that a buffer seen as another type or shape holds what the chip's does."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from tests.emulator.values import BITS, TORCH_DTYPES, Scalar, Tensor, unwrap

POISON = 0xFF  # NaN of every float type
PIECE = 16  # bytes that a swizzle moves as one


@lru_cache(maxsize=256)
def _offsets(layout: Any, shape: tuple[int, ...], element_bytes: int) -> torch.Tensor:
    """Element offsets of a buffer [..., rows, columns] of this layout."""
    numel = 1
    for size in shape:
        numel *= size
    plain = torch.arange(numel).view(shape)
    if not isinstance(layout, gl.NVMMASharedLayout) or not layout.swizzle_byte_width:
        return plain
    # Panels as wide as the swizzle lie one after the other; in a panel row r, piece p is where p xor f(r) would be.
    width = layout.swizzle_byte_width
    *_, rows, columns = shape
    panel = width // element_bytes
    if columns % panel:
        raise ValueError(f"columns: got {columns} of {element_bytes} bytes, want whole swizzles of {width} bytes")
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    step = 128 // width
    inner = (c % panel) * element_bytes ^ (r // step % (width // PIECE)) * PIECE
    within = (c // panel * rows + r) * panel + inner // element_bytes
    first = torch.arange(numel // (rows * columns)).view(*shape[:-2], 1, 1) * (rows * columns)
    return first + within


class Allocation:
    """The bytes of one buffer, and which of them a fence has yet to show to TMA and wgmma."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes = torch.full((num_bytes,), POISON, dtype=torch.uint8)
        self.unfenced = torch.zeros(num_bytes, dtype=torch.bool)


class Buffer:
    """A shared memory descriptor."""

    def __init__(self, allocation: Allocation, dtype: Any, offsets: torch.Tensor) -> None:
        self.allocation, self.dtype, self.offsets = allocation, dtype, offsets
        self._view = allocation.bytes.view(BITS[self.element_bytes])

    @classmethod
    def allocate(cls, dtype: Any, shape: list[int], layout: Any) -> Buffer:
        offsets = _offsets(layout, tuple(shape), dtype.primitive_bitwidth // 8)
        return cls(Allocation(offsets.numel() * dtype.primitive_bitwidth // 8), dtype, offsets)

    @property
    def element_bytes(self) -> int:
        return int(self.dtype.primitive_bitwidth) // 8

    @property
    def shape(self) -> list[int]:
        return list(self.offsets.shape)

    @property
    def key(self) -> tuple[int, int]:
        """Which mbarrier this is."""
        return id(self.allocation), int(self.offsets.reshape(-1)[0])

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Buffer:
        offsets = _offsets(layout, tuple(shape), dtype.primitive_bitwidth // 8)
        if offsets.numel() * dtype.primitive_bitwidth // 8 > self.allocation.bytes.numel():
            raise ValueError(f"shape: got {shape} of {dtype}, want at most {self.allocation.bytes.numel()} bytes")
        return Buffer(self.allocation, dtype, offsets)

    def index(self, i: Any) -> Buffer:
        position = int(i)
        if not 0 <= position < self.offsets.shape[0]:
            raise IndexError(f"buffer {position} of {self.offsets.shape[0]}")
        return Buffer(self.allocation, self.dtype, self.offsets[position])

    def slice(self, start: Any, length: int, dim: int = 0) -> Buffer:
        return Buffer(self.allocation, self.dtype, self.offsets.narrow(dim, int(start), length))

    def permute(self, order: list[int]) -> Buffer:
        return Buffer(self.allocation, self.dtype, self.offsets.permute(order))

    def load(self, layout: Any = None) -> Tensor:
        return Tensor(self._view[self.offsets].view(TORCH_DTYPES[self.dtype]), layout)

    def store(self, value: Any) -> None:
        self.write(unwrap(value))
        self._mark(True)

    def write(self, data: Any) -> None:
        """Without a trace: what TMA does. The type has to be the buffer's own."""
        if isinstance(data, Scalar) or not isinstance(data, torch.Tensor):
            raise TypeError(f"value: got {data!r}, want a tensor")
        if data.dtype != TORCH_DTYPES[self.dtype] or list(data.shape) != self.shape:
            raise TypeError(f"value: got {data.dtype} {list(data.shape)}, want {self.dtype} {self.shape}")
        self._view[self.offsets] = data.contiguous().view(self._view.dtype)

    def copied(self, data: torch.Tensor) -> None:
        """What cp.async does: a write that needs a fence before wgmma."""
        self.write(data)
        self._mark(True)

    def poison(self) -> None:
        self._view[self.offsets] = -1 if self._view.dtype != torch.uint8 else POISON

    def read_by_wgmma(self) -> torch.Tensor:
        return self._read_fenced("wgmma")

    def read_by_tma(self) -> torch.Tensor:
        return self._read_fenced("TMA")

    def _read_fenced(self, reader: str) -> torch.Tensor:
        size = self.element_bytes
        if self.allocation.unfenced.view(-1, size)[:, 0][self.offsets].any():
            raise RuntimeError(f"{reader} reads what was written without fence_async_shared() after it")
        return self.load().data

    def _mark(self, value: bool) -> None:
        self.allocation.unfenced.view(-1, self.element_bytes)[self.offsets] = value

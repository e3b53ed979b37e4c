"""Scalars, register tensors and pointers of an emulated kernel."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl

TORCH_DTYPES = {
    gl.int1: torch.bool, gl.int8: torch.int8, gl.int16: torch.int16, gl.int32: torch.int32, gl.int64: torch.int64,
    gl.uint8: torch.uint8, gl.float16: torch.float16, gl.bfloat16: torch.bfloat16, gl.float32: torch.float32,
    gl.float64: torch.float64, gl.float8e4nv: torch.float8_e4m3fn, gl.float8e5: torch.float8_e5m2,
}  # fmt: skip
GLUON_DTYPES = {value: key for key, value in TORCH_DTYPES.items()}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of as many bytes
INT32 = range(-(2**31), 2**31)
COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}


def _divide(a: int, b: int) -> int:
    """As the hardware: towards zero."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _remainder(a: int, b: int) -> int:
    return a - b * _divide(a, b)


class Scalar:
    """A number with its type. A plain Python number takes the other operand's type, or is an int32 or float32."""

    __slots__ = ("dtype", "value")

    def __init__(self, value: Any, dtype: Any = None) -> None:
        if dtype is None:
            if isinstance(value, bool):
                dtype = gl.int1
            elif isinstance(value, int):
                dtype = gl.int32 if value in INT32 else gl.int64
            else:
                dtype = gl.float32
        if dtype == gl.int32 and value not in INT32:
            raise OverflowError(f"int32 scalar: {value}")
        self.value, self.dtype = float(np.float32(value)) if dtype == gl.float32 else value, dtype

    def _binary(self, other: Any, function: Callable[[Any, Any], Any], compare: bool = False) -> Any:
        if isinstance(other, (Tensor, Pointer)):
            return NotImplemented
        o = other.value if isinstance(other, Scalar) else other
        result = function(self.value, o)
        if compare:
            return Scalar(bool(result))
        types = {self.dtype, other.dtype if isinstance(other, Scalar) else None} - {None, gl.int1}
        if isinstance(result, float):
            return Scalar(result)
        if isinstance(result, bool):
            return Scalar(result)
        return Scalar(result, gl.int64 if gl.int64 in types else gl.int32)

    def __index__(self) -> int:
        return int(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __hash__(self) -> int:
        return hash(self.value)

    def __neg__(self) -> Scalar:
        return Scalar(-self.value, self.dtype)

    def __invert__(self) -> Scalar:
        return Scalar(not self.value if self.dtype == gl.int1 else ~self.value, self.dtype)

    def to(self, dtype: Any, bitcast: bool = False) -> Scalar:
        if bitcast:
            value = torch.tensor(self.value, dtype=TORCH_DTYPES[self.dtype]).view(TORCH_DTYPES[dtype]).item()
        else:
            value = torch.tensor(self.value).to(TORCH_DTYPES[dtype]).item()
        return Scalar(value, dtype)


def _scalar_operators() -> None:
    plain: dict[str, Callable[[Any, Any], Any]] = {
        "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv, "floordiv": _divide,
        "mod": _remainder, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "lshift": operator.lshift,
        "rshift": operator.rshift,
    }  # fmt: skip
    for name, function in plain.items():
        setattr(Scalar, f"__{name}__", lambda a, b, f=function: a._binary(b, f))
        setattr(Scalar, f"__r{name}__", lambda a, b, f=function: a._binary(b, lambda x, y: f(y, x)))
    for name, function in COMPARISONS.items():
        setattr(Scalar, f"__{name}__", lambda a, b, f=function: a._binary(b, f, compare=True))


_scalar_operators()


class Tensor:
    """A tensor in registers. Operators are torch's, but integers divide towards zero and overflow of int32 is an error."""

    __slots__ = ("data", "layout")

    def __init__(self, data: torch.Tensor, layout: Any = None) -> None:
        self.data, self.layout = data, layout

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> Any:
        return GLUON_DTYPES[self.data.dtype]

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=self.layout, shape=self.shape)

    def _binary(self, other: Any, function: Callable[[Any, Any], torch.Tensor], reverse: bool = False) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        operand = unwrap(other)
        if isinstance(other, Scalar) and other.dtype == gl.int64 and self.data.dtype == torch.int32:
            operand = torch.tensor(other.value)[None]  # a dimension, so that torch lets it widen the result
        elif isinstance(operand, float) and not self.data.dtype.is_floating_point:
            operand = torch.tensor([operand], dtype=torch.float32)
        a, b = (operand, self.data) if reverse else (self.data, operand)
        result = function(a, b)
        if result.dtype == torch.int32 and function in (operator.add, operator.sub, operator.mul):
            wide = function(*(x.long() if isinstance(x, torch.Tensor) else x for x in (a, b)))
            if not torch.equal(wide, result.long()):
                raise OverflowError(f"int32 tensor: {wide.min().item()} to {wide.max().item()}")
        return Tensor(result, self.layout)

    def __neg__(self) -> Tensor:
        return Tensor(-self.data, self.layout)

    def __invert__(self) -> Tensor:
        return Tensor(~self.data, self.layout)

    def __bool__(self) -> bool:
        raise TypeError("a tensor has no truth value")

    __hash__ = None  # type: ignore[assignment]

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        wanted = TORCH_DTYPES[dtype]
        if bitcast:
            return Tensor(self.data.contiguous().view(wanted), self.layout)
        return Tensor(self.data.to(wanted), self.layout)

    def expand_dims(self, axis: int) -> Tensor:
        return Tensor(self.data.unsqueeze(axis))


def _truncate(a: Any, b: Any) -> torch.Tensor:
    return torch.div(_as_tensor(a, b), b, rounding_mode="trunc")


def _fmod(a: Any, b: Any) -> torch.Tensor:
    return torch.fmod(_as_tensor(a, b), b)


def _as_tensor(a: Any, like: Any) -> torch.Tensor:
    return a if isinstance(a, torch.Tensor) else torch.full_like(like, a)


def _tensor_operators() -> None:
    plain: dict[str, Callable[[Any, Any], Any]] = {
        "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv, "floordiv": _truncate,
        "mod": _fmod, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "lshift": operator.lshift,
        "rshift": operator.rshift,
    }  # fmt: skip
    for name, function in plain.items():
        setattr(Tensor, f"__{name}__", lambda a, b, f=function: a._binary(b, f))
        setattr(Tensor, f"__r{name}__", lambda a, b, f=function: a._binary(b, f, reverse=True))
    for name, function in COMPARISONS.items():
        setattr(Tensor, f"__{name}__", lambda a, b, f=function: a._binary(b, f))


_tensor_operators()


class Pointer:
    """An address, or a tensor of addresses: elements from the start of a torch storage."""

    __slots__ = ("memory", "offset")

    def __init__(self, memory: torch.Tensor, offset: Any) -> None:
        self.memory, self.offset = memory, offset

    @staticmethod
    def to_tensor(tensor: torch.Tensor) -> Pointer:
        memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return Pointer(memory, Scalar(tensor.storage_offset(), gl.int64))

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=GLUON_DTYPES[self.memory.dtype], is_ptr=lambda: True)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + other)

    __radd__ = __add__

    def expand_dims(self, axis: int) -> Pointer:
        return Pointer(self.memory, self.offset.expand_dims(axis))

    def _checked(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(offsets, which are used) of the same shape, those used within the storage."""
        offsets = unwrap(self.offset)
        offsets = offsets.long() if isinstance(offsets, torch.Tensor) else torch.tensor(offsets)
        used = torch.ones_like(offsets, dtype=torch.bool) if mask is None else torch.as_tensor(unwrap(mask))
        offsets, used = torch.broadcast_tensors(offsets, used)
        wrong = used & ((offsets < 0) | (offsets >= self.memory.numel()))
        if wrong.any():
            raise IndexError(f"elements {offsets[wrong][:4].tolist()} of a storage of {self.memory.numel()}")
        return offsets, used

    def load(self, mask: Any = None, other: Any = None) -> Any:
        """What is masked and has no `other` is NaN or the largest integer."""
        offsets, used = self._checked(mask)
        data = (
            _bits(self.memory)[torch.where(used, offsets, 0)]
            if self.memory.numel()
            else _bits(self.memory).new_zeros(offsets.shape)
        )
        data = data.view(self.memory.dtype)
        if not used.all():
            floating = data.dtype.is_floating_point
            rest = (math.nan if floating else torch.iinfo(data.dtype).max) if other is None else unwrap(other)
            data = torch.where(used, data.float() if floating else data, rest).to(data.dtype)
        return Tensor(data) if offsets.dim() else Scalar(data.item(), GLUON_DTYPES[data.dtype])

    def store(self, value: Any, mask: Any = None) -> None:
        offsets, used = self._checked(mask)
        data = unwrap(value)
        data = (
            data.to(self.memory.dtype)
            if isinstance(data, torch.Tensor)
            else torch.tensor(data, dtype=self.memory.dtype)
        )
        data = data.expand(offsets.shape)
        _bits(self.memory)[offsets[used]] = _bits(data.contiguous())[used]


def _bits(data: torch.Tensor) -> torch.Tensor:
    return data.view(BITS[data.element_size()]) if data.dtype != torch.bool else data


def unwrap(value: Any) -> Any:
    """The torch tensor or Python number inside."""
    if isinstance(value, Tensor):
        return value.data
    return value.value if isinstance(value, Scalar) else value


def wrap_argument(value: Any) -> Any:
    """A kernel's argument as the kernel sees it."""
    if isinstance(value, torch.Tensor):
        return Pointer.to_tensor(value)
    return Scalar(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value

"""Symbols printed as the source of device functions, and source loaded as jit functions, one for each text.

A program's tensors reach the kernel as one flat tuple: of each tensor its pointer, then size and stride of every dimension.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import re
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from evenshare._cache import cache_dir
from evenshare.attention.variants.symbolic import Load, Operand, Symbol

INT32_MAX = 2**31 - 1
_CASTS = {
    ("bool", "int"): "{}.to(tl.int32)",
    ("bool", "float"): "{}.to(tl.float32)",
    ("int", "float"): "{}.to(tl.float32)",
    ("int", "bool"): "{} != 0",
    ("float", "int"): "{}.to(tl.int32)",
    ("float", "bool"): "{} != 0",
}
# Of device.arithmetic and device.vectors: what generated code calls.
HELPERS = {
    "arithmetic": (
        "cos_approx",
        "floor_divide",
        "from_end",
        "inside",
        "remainder",
        "sin_approx",
        "tanh",
        "tanh_approx",
    ),
    "vectors": ("element", "row_max", "row_mean", "row_min", "row_sum"),
}
_PARAMETERS = ("score", "b", "h", "q_idx", "kv_idx", "args", "x", "rows", "valid", "d", "D", "AXIS")
_RESERVED = (*_PARAMETERS, *(name for names in HELPERS.values() for name in names), "tl", "triton", "float")

Layout = tuple[Any, ...]


def layout_of(tensor: torch.Tensor) -> Layout:
    """Equal for tensors that are the same to a kernel, such as two views."""
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()


class Printer:
    """Prints device functions and notes the tensors they read, in the order of their arguments."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names  # of tensors, by id
        self.tensors: list[torch.Tensor] = []
        self._places: dict[Layout, tuple[str, int]] = {}  # of tensors: name and first argument
        self._next = 0

    def function(self, name: str, parameters: Sequence[str], result: Operand) -> str:
        """Source of the jit function of these parameters that returns the result, in fp32."""
        body = _Body(self)
        value = body.text(result, "float")
        lines = [*body.prologue(), *body.lines, f"return {value}"]
        return f"@triton.jit\ndef {name}({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in lines)

    def place(self, tensor: torch.Tensor) -> tuple[str, int]:
        key = layout_of(tensor)
        if key not in self._places:
            taken = {*_RESERVED, *(name for name, _ in self._places.values())}
            base = re.sub(r"\W", "_", self.names.get(id(tensor), "table"))
            base += "_" * bool(re.fullmatch(r"t\d+", base))  # the operations' names
            numbered = (base, *(f"{base}_{number}" for number in range(1, len(taken) + 1)))
            name = next(name for name in numbered if name not in taken)
            self._places[key] = name, self._next
            self._next += 1 + 2 * tensor.dim()
            self.tensors.append(tensor)
        return self._places[key]


class _Body:
    """The lines of one function: a name for every operation, the same one for the same text."""

    def __init__(self, printer: Printer) -> None:
        self.printer = printer
        self.lines: list[str] = []
        self._names: dict[str, str] = {}  # by right-hand side
        self._done: dict[int, str] = {}  # by id of the symbol, which its user holds
        self._tables: dict[str, torch.Tensor] = {}  # by name

    def text(self, operand: Operand, kind: str) -> str:
        """The operand as a name or a literal of this kind."""
        if not isinstance(operand, Symbol):
            return _literal(operand, kind)
        cast = _CASTS.get((operand.kind, kind))
        name = self._name_of(operand)
        return self._assign(cast.format(name)) if cast else name

    def prologue(self) -> list[str]:
        """Lines that take the tensors of this function out of `args`."""
        lines = []
        for tensor in self._tables.values():
            name, first = self.printer.place(tensor)
            dims = ", ".join(":" * tensor.dim())
            lines.append(f"{name} = args[{first}]  # {str(tensor.dtype).removeprefix('torch.')}[{dims}]")
        return lines

    def _name_of(self, symbol: Symbol) -> str:
        # Operands first, and without recursion: chains of operations may be long.
        pending = [symbol]
        while pending:
            last = pending[-1]
            if id(last) in self._done:
                pending.pop()
                continue
            missing = [o for o, _ in last.operands if isinstance(o, Symbol) and id(o) not in self._done]
            if missing:
                pending += missing[::-1]
                continue
            pending.pop()
            if isinstance(last, Load):
                self._done[id(last)] = self._load(last)
            elif last.operands:
                texts = (self.text(operand, kind) for operand, kind in last.operands)
                self._done[id(last)] = self._assign(last.template.format(*texts))
            else:
                self._done[id(last)] = last.template
        return self._done[id(symbol)]

    def _load(self, load: Load) -> str:
        tensor = load.tensor
        name, first = self.printer.place(tensor)
        self._tables[name] = tensor
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        pointer, mask = name, []
        for dim, index in enumerate(load.indices):
            size, stride = f"args[{first + 1 + 2 * dim}]", f"args[{first + 2 + 2 * dim}]"
            at = self.text(index, "int")
            if not isinstance(index, Symbol):  # inside, or the trace had refused it
                at = at if index >= 0 else f"({size} - {-index})"
            elif index.count:
                mask.append(f"({at} < {size})")
            else:
                at = self._assign(f"from_end({at}, {size})")
                mask.append(f"inside({at}, {size})")
            wide = f"tl.cast({at}, tl.int64)" if span > INT32_MAX else at
            pointer += f" + {wide} * {stride}"
        guard = f", mask={' & '.join(mask)}, other=0" if mask else ""
        loaded = self._assign(f"tl.load({pointer}{guard})")
        if tensor.dtype == torch.bool:  # whose bytes the kernel gets
            return self._assign(f"{loaded} != 0")
        if tensor.dtype.is_floating_point:
            return loaded if tensor.dtype == torch.float32 else self._assign(f"{loaded}.to(tl.float32)")
        return loaded if tensor.dtype.itemsize >= 4 else self._assign(f"{loaded}.to(tl.int32)")

    def _assign(self, value: str) -> str:
        if value.isidentifier():
            return value
        if value not in self._names:
            self._names[value] = f"t{len(self._names)}"
            self.lines.append(f"{self._names[value]} = {value}")
        return self._names[value]


def _literal(value: bool | int | float, kind: str) -> str:
    if kind == "bool":
        return repr(bool(value))
    if kind == "int":
        return repr(int(value))
    return repr(float(value)) if math.isfinite(value) else f'float("{float(value)}")'


_lock = threading.Lock()


@cache
def _loaded(text: str) -> ModuleType:
    # The name tells one text's functions from another's: Triton's own cache goes by it.
    name = f"evenshare_variant_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        path = _written(cache_dir() / "variants" / f"{name}.py", text)
    except OSError:  # a home that cannot be written
        path = _written(Path(tempfile.mkdtemp(prefix="evenshare-")) / f"{name}.py", text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where inspect, and so Triton, looks a function's file up
    spec.loader.exec_module(module)
    return module


def load(text: str) -> ModuleType:
    """The module of this text, from a file in the cache directory; the same object for the same text."""
    with _lock:
        return _loaded(text)


def _written(path: Path, text: str) -> Path:
    """The file, whole at any time for whoever else reads it."""
    content = text.encode()
    if not path.is_file() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".py")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    return path

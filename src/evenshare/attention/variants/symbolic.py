"""Symbols: what a variant's functions are called with once, so that the operations they apply can be printed as source.

A `Symbol` is a number that a kernel will know: a score, an index, what an operation makes of them. A `Table` is a captured tensor
of which some dimensions have been indexed; with all of them indexed it is a `Load`. A transform's x and d are vectors, of a number
for each dim of a head: what is made of them is a vector too, and a `Reduction` of one is a number again.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

KINDS = ("bool", "int", "float")  # each holds the ones before it
TABLE_DTYPES = {
    torch.bool: "bool",
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), "int"),
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), "float"),
}
# Frames in here are no user's: the tracer, and torch's helpers such as and_masks.
_INTERNAL = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_USERS = {os.path.join(os.path.dirname(__file__), name) for name in ("masks.py", "scores.py", "transforms.py")}


# Requests, heads, keys and dims are counted from 0, and so is what these make of counts: no such index is one from a tensor's end.
_COUNTS = ("b", "h", "kv_idx", "d")
_COUNT_OF_COUNTS = (
    *("{0} + {1}", "{0} * {1}", "{0} // {1}", "{0} % {1}", "{0} & {1}", "{0} ^ {1}", "{0} >> {1}"),
    "tl.where({0}, {1}, {2})",
)


class VariantError(ValueError):
    """A variant's function does what cannot become a device function; the text says what, and shows the line."""


class Symbol:
    """A traced number: `template` filled with the texts of its operands, each cast to the kind that stands beside it."""

    def __init__(self, kind: str, template: str, operands: tuple[tuple[Operand, str], ...] = ()) -> None:
        self.kind, self.template, self.operands = kind, template, operands
        self.dtype = {"bool": torch.bool, "int": torch.int32, "float": torch.float32}[kind]
        self.shape = torch.Size(())
        self.vector: bool = any(isinstance(operand, Symbol) and operand.vector for operand, _ in operands)
        self.count: bool = kind == "int" and (
            all(is_count(operand) for operand, kind in operands if kind == "int")
            if template in _COUNT_OF_COUNTS
            else template in _COUNTS
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.where:
            args = (args[1], args[0], *args[2:])
        return _apply(getattr(function, "__name__", str(function)), *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Method(name, self)

    def __bool__(self) -> NoReturn:
        fail("`if`, `and`, `or`, `not` or `while` on a traced value; want torch.where, &, | and ~")

    def rebuilt(self, operands: tuple[Operand, ...]) -> Symbol:
        """The same operation of other operands."""
        kinds = (kind for _, kind in self.operands)
        return Symbol(self.kind, self.template, tuple(zip(operands, kinds, strict=True)))

    def __iter__(self) -> NoReturn:
        fail("a loop over a traced value")

    def __len__(self) -> NoReturn:
        fail("len() of a traced value, which is one number")

    def __float__(self) -> NoReturn:
        fail("float() of a traced value, or a function of `math` applied to one; want torch's function")

    def __int__(self) -> NoReturn:
        fail("int() of a traced value; want .int()")

    def __index__(self) -> NoReturn:
        fail("a traced value as an index of a Python sequence; want a tensor")

    __hash__ = object.__hash__  # __eq__ is an operation


class Load(Symbol):
    """The element of a captured tensor at `indices`, one for each dimension."""

    def __init__(self, tensor: torch.Tensor, indices: tuple[Operand, ...]) -> None:
        super().__init__(TABLE_DTYPES[tensor.dtype], "", tuple((index, "int") for index in indices))
        self.tensor, self.indices = tensor, indices

    def rebuilt(self, operands: tuple[Operand, ...]) -> Symbol:
        return Load(self.tensor, operands)


class Row(Symbol):
    """One of the two vectors that a transform gets: x, in memory or not, and d, the numbers from 0 on."""

    def __init__(self, name: str, in_memory: bool) -> None:
        super().__init__("float" if name == "x" else "int", name)
        self.vector, self.in_memory = True, in_memory


class Reduction(Symbol):
    """A number that a kernel makes of a whole vector."""

    def __init__(self, function: str, vector: Operand) -> None:
        super().__init__("float", f"{function}({{0}}, d, D, AXIS)", ((vector, "float"),))
        self.vector = False


class Table:
    """A captured tensor whose first dimensions have been indexed, but not the last ones."""

    def __init__(self, tensor: torch.Tensor, indices: tuple[Operand, ...] = ()) -> None:
        self.tensor, self.indices = tensor, indices

    def __getitem__(self, index: Any) -> Any:
        return _apply("getitem", self, index)


Operand = Symbol | bool | int | float


def is_count(operand: Operand) -> bool:
    """Whether this is known to be an integer of 0 or more."""
    return operand.count if isinstance(operand, Symbol) else isinstance(operand, int) and operand >= 0


class _Method:
    """A method of a symbol, before its call; anything else that is done with it is refused."""

    def __init__(self, name: str, owner: Symbol) -> None:
        self._name, self._owner = name, owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name == "where" and args:  # whose condition comes first elsewhere
            return _apply("where", args[0], self._owner, *args[1:], **kwargs)
        return _apply(self._name, self._owner, *args, **kwargs)

    def __getattr__(self, name: str) -> NoReturn:
        fail(f"the attribute {self._name} of a traced value")


def _operator(name: str, reflected: bool = False) -> Callable[..., Any]:
    def method(self: Symbol, *others: Any) -> Any:
        return _apply(name, *others, self) if reflected else _apply(name, self, *others)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(Symbol, f"__{_name}__", _operator(_name))
    setattr(Symbol, f"__r{_name}__", _operator(_name, reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", "getitem", "matmul"):
    setattr(Symbol, f"__{_name}__", _operator(_name))


def _apply(name: str, *args: Any, **kwargs: Any) -> Any:
    from evenshare.attention.variants.operations import apply

    return apply(name, args, kwargs)


class CapturedTensors(TorchFunctionMode):
    """Keeps functions from computing with captured tensors alone: the result would be that of today's values.

    Views are tables too, and an element becomes a symbol with the first operation.
    """

    _READS = (
        "item",
        "tolist",
        "numpy",
        "equal",
        "allclose",
        *(f"__{x}__" for x in ("bool", "int", "float", "index", "contains")),
    )
    _WRITES = (
        "__setitem__",
        *(f"__i{x}__" for x in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")),
    )

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", str(function))
        flat = [x for arg in (*args, *kwargs.values()) for x in _parts(arg)]
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        if not tensors or any(isinstance(x, Symbol | Table) for x in flat):
            return function(*args, **kwargs)
        if name == "__getitem__" and len(tensors) > 1:  # torch would ask an element for its value
            return _apply("getitem", *args)
        writes = (
            name == "__setitem__"
            or (name.endswith("_") and not name.endswith("__"))
            or name.startswith("__i")
            or "out" in kwargs
        )
        if not writes or name in ("__index__", "__int__", "__invert__"):
            result = function(*args, **kwargs)
            storages = {t.untyped_storage().data_ptr() for t in tensors}
            computed = any(
                x.untyped_storage().data_ptr() not in storages for x in _parts(result) if isinstance(x, torch.Tensor)
            )
            if computed and all(t.dim() == 0 for t in tensors):
                return _apply(name, *args, **kwargs)
            if not computed and name not in self._READS:
                return result
        plain = name.strip("_") if name.startswith("__") else name
        fail(
            f"the operation {plain} on captured tensors alone, which would not follow their values; "
            "want it outside the function"
        )


def _parts(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def user_line() -> tuple[str, str]:
    """("file:line", the line) of the innermost frame that is neither torch's nor the tracer's; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file in _USERS or not (file.startswith(_INTERNAL) or file.startswith("<frozen")):
            return f"{file}:{frame.f_lineno}", linecache.getline(file, frame.f_lineno).strip()
        frame = frame.f_back
    return "", ""


def fail(text: str) -> NoReturn:
    """Raise VariantError with the user's line."""
    place, line = user_line()
    raise VariantError(f"{text}\n  {place}: {line}" if place else text)


def tensor_names(function: Any) -> dict[int, str]:
    """id -> name of the tensors that a function refers to, and those that functions captured by it do."""
    names: dict[int, str] = {}
    seen: set[int] = set()

    def visit(candidate: Any) -> None:
        if id(candidate) in seen:
            return
        seen.add(id(candidate))
        owner = getattr(candidate, "__self__", candidate)
        scope = dict(vars(owner)) if hasattr(owner, "__dict__") else {}
        candidate = getattr(candidate, "__func__", candidate)
        if inspect.isfunction(candidate):
            found = inspect.getclosurevars(candidate)
            scope |= {**found.globals, **found.nonlocals}
        for name, value in scope.items():
            if isinstance(value, torch.Tensor):
                names.setdefault(id(value), name)
            elif inspect.isroutine(value):
                visit(value)
            elif isinstance(value, tuple | list):  # the masks of and_masks
                for item in filter(inspect.isroutine, value):
                    visit(item)

    visit(function)
    return names

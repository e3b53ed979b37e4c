"""Names that programs import from FlashInfer and that evenshare has nothing behind: importable, and clear when used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

JIT_HINT = (
    "evenshare compiles when a kernel is first called; a variant is a Python function (variant=evenshare.Variant(...))"
)


def missing(module: str, names: tuple[str, ...], hint: str, prefixes: tuple[str, ...] = ()) -> Callable[[str], Any]:
    """The `__getattr__` of a module with these names, and all that begin with a prefix: classes that raise when called."""

    def getattr_(name: str) -> Any:
        if name not in names and not (prefixes and name.startswith(prefixes)):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{module.rsplit('.', 1)[-1]}.{name}: got a call, want none: {hint}")

        return type(name, (), {"__new__": refuse, "__doc__": f"Not in evenshare: {hint}."})

    return getattr_

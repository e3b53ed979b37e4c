"""Lazy attributes for packages, so that `import evenshare` touches neither torch nor triton, and kernels compile without torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def attach(package: str, exports: dict[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """Return (`__getattr__`, `__all__`) of a package whose public names live in submodules: {name: submodule};
    a name that is its own submodule stands for that module."""

    def getattr_(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{exports[name]}")
        return module if name == exports[name] else getattr(module, name)

    return getattr_, sorted(exports)

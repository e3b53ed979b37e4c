"""`import flashinfer.decode` once sys.modules["flashinfer"] is this package: the same module, not a second copy of its file."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ALIAS = "flashinfer."


class AliasFinder(MetaPathFinder, Loader):
    """Finds flashinfer.X as PACKAGE.X while the module called flashinfer is PACKAGE."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = sys.modules.get(self.package)
        if not fullname.startswith(ALIAS) or package is None or sys.modules.get(ALIAS[:-1]) is not package:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> None:
        """The default one, which exec_module replaces."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        sys.modules[name] = importlib.import_module(f"{self.package}.{name.removeprefix(ALIAS)}")


def install(package: str) -> None:
    """Once; it answers for nothing before the user has put the package in flashinfer's place."""
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder(package))

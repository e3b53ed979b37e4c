"""What a package promises before anything is computed: a light import, names that exist, metadata that agrees with itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import evenshare

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_importing_is_quick_and_loads_neither_torch_nor_triton() -> None:
    code = "import time; begin = time.perf_counter(); import evenshare, sys; took = time.perf_counter() - begin\n"
    took, loaded = run(code + "print(took, bool({'torch', 'triton', 'numpy'} & set(sys.modules)))").split()
    assert float(took) < 1
    assert loaded == "False"


def test_no_public_name_touches_cuda() -> None:
    code = "import evenshare; [getattr(evenshare, name) for name in evenshare.__all__]; import torch; "
    assert run(code + "print(torch.cuda.is_initialized())") == "False\n"


def test_the_version_is_the_project_s() -> None:
    assert PROJECT["project"]["version"] == evenshare.__version__


def test_files_beside_the_code_are_found() -> None:
    folder = files("evenshare") / "report" / "assets"
    assert sorted(file.name for file in folder.iterdir()) == ["page.css", "page.html", "page.js"]
    assert (files("evenshare") / "py.typed").is_file()


def test_the_core_needs_torch_triton_and_numpy_only() -> None:
    names = [re.match(r"[\w-]+", need)[0] for need in PROJECT["project"]["dependencies"]]  # type: ignore[index]
    assert names == ["torch", "triton", "numpy"]


def test_every_dependency_is_pinned() -> None:
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    extras = PROJECT["project"]["optional-dependencies"]
    needs = PROJECT["project"]["dependencies"] + [need for extra in extras.values() for need in extra]
    names = {re.match(r"[\w-]+", need)[0].lower() for need in needs}  # type: ignore[index]
    assert names - {"evenshare"} <= pinned


def test_the_source_distribution_has_what_its_tests_and_links_need() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"src", "tests", "benchmarks", "docs", "examples", "constraints.txt"} <= set(included)

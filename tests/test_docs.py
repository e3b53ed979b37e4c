"""Every Python block of README.md and docs/ runs as it stands, from the top of its page to the bottom; and what its tables say
of errors is so."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.policy_table import make_table
from benchmarks.results import read_reports

ROOT = Path(__file__).parents[1]
REFUSAL = re.compile(r"^\| `([^`]+)` \| `(\w+Error: [^`]+)` \|", re.MULTILINE)  # a call and its error, with ... as …
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def python_blocks(page: Path) -> list[str]:
    return PYTHON.findall(page.read_text())


def check_refusals(text: str, names: dict[str, Any]) -> None:
    """Every call that a table of this text refuses, with the names of the blocks above it."""
    for call, said in REFUSAL.findall(text):
        with pytest.raises(Exception) as caught:
            eval(call, dict(names))
        error = f"{caught.type.__name__}: {caught.value}"
        assert re.fullmatch(".*".join(map(re.escape, said.split("…"))), error, re.DOTALL), f"{call}: {error}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_blocks_run(page: Path) -> None:
    names: dict[str, Any] = {}
    end = 0
    for number, found in enumerate(PYTHON.finditer(page.read_text())):
        check_refusals(page.read_text()[end : found.start()], names)
        exec(compile(found[1], f"{page.name}, block {number}", "exec"), names)
        end = found.end()
    check_refusals(page.read_text()[end:], names)


def test_readme_has_an_example() -> None:
    assert python_blocks(PAGES[0])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_files_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize(
    "package",
    [
        "",
        ".attention",
        ".attention.sparse",
        ".attention.variants",
        ".compat.transformers",
        ".distributed",
        ".gemm",
        ".generate",
        ".ops",
        ".quant",
        ".schedule",
    ],
)
def test_the_api_reference_has_every_public_name(package: str) -> None:
    listed = re.findall(r"^\.\. auto\w+:: [\w.]+\.(\w+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    missing = set(importlib.import_module(f"evenshare{package}").__all__) - set(listed)
    assert not missing, f"docs/api.md: lacks {sorted(missing)} of evenshare{package}"


def test_the_table_of_policies_is_the_results_file_s() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    for file in sorted((ROOT / "benchmarks" / "results").glob("policies-*.json")):
        for report in read_reports(file):
            assert make_table(report) in page, (
                f"docs/performance.md: want what benchmarks.policy_table prints for {file}"
            )

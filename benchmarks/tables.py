"""The tables there are: one module each, in the order in which `python -m benchmarks --all` runs them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Table:
    """A module of this folder that measures and writes a report of its own name."""

    name: str
    gpus: int = 1  # that it needs; more than one: a process for each

    @property
    def about(self) -> str:
        """The first paragraph of the module's docstring, read without importing it."""
        text = (Path(__file__).parent / f"{self.name}.py").read_text()
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")


# The longest last: what a time budget leaves out is then one table and not many.
TABLES = (
    Table("gemm"),
    Table("attention_prefill"),
    Table("attention_decode"),
    Table("attention_mixed"),
    Table("mla"),
    Table("plan"),
    Table("w4a16"),
    Table("moe"),
    Table("splitk"),
    Table("policies"),
    Table("cascade"),
    Table("sparse"),
    Table("variants"),
    Table("generate", gpus=0),
    Table("distributed", gpus=2),
    Table("gemm_corpus"),
)

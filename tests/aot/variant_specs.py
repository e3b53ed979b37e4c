"""The portable attention kernel with a variant, whose source lies beside this file: tracing wants torch, compiling does not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCE = Path(__file__).with_name("variant_source.txt")  # test_specs.py says of what, and that it is up to date
# document ids int32 [B, S], slopes fp32 [Hq], sinks bf16 [Hq]: pointer, then size and stride of each dimension.
ARGUMENTS = ("*i32", "i32", "i32", "i32", "1", "*fp32", "i32", "1", "*bf16", "i32", "1")


def load_source() -> ModuleType:
    spec = importlib.util.spec_from_loader("variant_source", SourceFileLoader("variant_source", str(SOURCE)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def variant_specs(attention: Iterator[Any]) -> Iterator[Any]:
    """For few rows and for many, of 16 bits and of 32; with and without softmax."""
    source = load_source()
    # Name of the spec that one is made from: known spills, softmax.
    cases = {"bf16 D=128 16x128": (40, True), "bf16 D=128 128x64": (66, True), "fp32 D=128 16x32": (4, False)}
    for spec in attention:
        if (found := cases.get(spec.name.removeprefix("attention "))) is not None:
            known_spills, softmax = found
            constants = {name: value for name, value in spec.constants.items() if name != "variant_args"}
            constants |= {"VARIANT": source.modify, "SINK": source.sink if softmax else None, "BASE_2": False}
            constants |= {"SOFTMAX": softmax, "HAS_LSE": softmax}
            yield replace(
                spec,
                name=f"{spec.name} variant",
                constants=constants,
                types=spec.types | {"variant_args": ARGUMENTS},
                known_spills=known_spills,
            )

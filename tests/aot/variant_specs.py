"""The portable attention kernel with variants, whose sources lie beside this file: tracing wants torch, compiling does not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

# Variant -> types of what it captures: of each tensor the pointer, then size and stride of each dimension. test_variant_specs.py
# makes the variants and says whether their sources and these are up to date.
ARGUMENTS = {
    "capped_alibi": ("*i32", "i32", "i32", "i32", "1", "*fp32", "i32", "1", "*bf16", "i32", "1"),
    "operations": (
        *("*fp32", "i32", "1", "*fp32", "i32", "i32", "i32", "1", "*fp32", "*i64", "i32", "1", "*i64"),
        *("*fp32", "*fp32", "*fp32", "*fp32", "*fp32", "i32", "1", "*fp32", "i32", "1", "i32", "i32"),
    ),
    "transforms": ("*bf16", "i32", "1", "*i32", "i32", "1", "*fp32", "i32", "1", "*fp32", "i32", "i32", "i32", "1"),
}
# Spec that one is made from, variant, known spills, softmax: for few rows and for many, of 16 bits and of 32.
CASES = (
    ("bf16 D=128 16x128", "capped_alibi", 40, True),
    ("bf16 D=128 128x64", "capped_alibi", 66, True),
    ("fp32 D=128 16x32", "capped_alibi", 4, False),
    ("fp32 D=128 16x32", "operations", 62, True),
    ("bf16 D=128 16x128", "transforms", 0, True),
    ("bf16 D=128 128x64", "transforms", 190, True),
    ("fp32 D=128 16x32", "transforms", 0, True),
    ("bf16 D=256 16x64", "transforms", 0, True),
)
INT8_SPILLS = 420  # codes are unpacked in registers
# Block m, block n, warps, stages of what transforms keys (attention.tiles).
TILES = {
    "bf16 D=128 16x128": (16, 32, 8, 4),
    "bf16 D=128 128x64": (64, 32, 8, 2),
    "fp32 D=128 16x32": (16, 16, 8, 2),
    "bf16 D=256 16x64": (16, 16, 8, 2),
}


def source_of(variant: str) -> Path:
    return Path(__file__).with_name(f"variant_{variant}.txt")


def load(variant: str) -> ModuleType:
    name = f"variant_{variant}"
    spec = importlib.util.spec_from_loader(name, SourceFileLoader(name, str(source_of(variant))))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def variant_specs(attention: Iterator[Any]) -> Iterator[Any]:
    plain = {spec.name.removeprefix("attention "): spec for spec in attention}
    for name, variant, known_spills, softmax in CASES:
        spec, module = plain[name], load(variant)
        constants = {name: value for name, value in spec.constants.items() if name != "variant_args"}
        constants |= {"VARIANT": module.modify, "SINK": getattr(module, "sink", None) if softmax else None}
        constants |= {name.upper(): getattr(module, name, None) for name in ("query", "key", "value", "output")}
        constants |= {"BASE_2": False, "SOFTMAX": softmax, "HAS_LSE": softmax}
        num_warps = spec.num_warps
        if constants["KEY"] is not None:
            *blocks, num_warps, stages = TILES[name]
            constants |= {"BLOCK_M": blocks[0], "BLOCK_N": blocks[1], "NUM_STAGES": stages}
        made = replace(
            spec,
            name=f"{spec.name} variant {variant}",
            num_warps=num_warps,
            constants=constants,
            types=spec.types | {"variant_args": ARGUMENTS[variant]},
            known_spills=known_spills,
        )
        yield made
        if constants["KEY"] is not None:  # of integers, too
            codes = dict.fromkeys(("k_ptr", "v_ptr"), "*i8")
            block_m = 32 if spec.types["out_ptr"] == "*fp32" else constants["BLOCK_M"]
            yield replace(
                made,
                name=f"{made.name} int8 keys",
                types=made.types | codes,
                constants=constants | {"BLOCK_M": block_m},
                known_spills=INT8_SPILLS,
            )

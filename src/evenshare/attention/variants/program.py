"""From a variant's functions to the text of its device functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from evenshare.attention.variants.operands import operand_of
from evenshare.attention.variants.source import HELPERS, Printer
from evenshare.attention.variants.symbolic import (
    CapturedTensors,
    Load,
    Operand,
    Row,
    Symbol,
    Table,
    VariantError,
    tensor_names,
)

Function = Callable[..., Any]
# Transforms, and what the position of their vector is called. Of an output the other elements are not in memory.
TRANSFORMS = {"query": "q_idx", "key": "kv_idx", "value": "kv_idx", "output": "q_idx"}
_HEADER = '''"""{title}"""

import triton
import triton.language as tl
'''


def program(
    score_mod: Function | None,
    mask_mod: Function | None,
    transforms: Mapping[str, Function],
    sinks: torch.Tensor | None,
    softmax: bool,
) -> tuple[str, list[torch.Tensor]]:
    """(source of `modify` and of what else there is: `rescore`, `sink` and the transforms by name, the tensors they read).

    modify(score, b, h, q_idx, kv_idx, args): the new score, -inf or 0 if hidden. rescore: without the mask, where there are both.
    sink(h, args). query(x, rows, valid, b, h, q_idx, d, args, D, AXIS) and its like: x fp32, vectors of D numbers along AXIS, 0
    where not `valid` or past D; rows: pointers to their first elements.
    """
    functions = {"score_mod": score_mod, "mask_mod": mask_mod, **transforms}
    given = {name: function for name, function in functions.items() if function is not None}
    names = {key: name for function in given.values() for key, name in tensor_names(function).items()}
    if sinks is not None:
        names[id(sinks)] = "sinks"
    printer = Printer(names)
    positions = ("b", "h", "q_idx", "kv_idx")
    parameters = ("score", *positions, "args")
    score = _score(score_mod, positions)
    masked = score if mask_mod is None else _masked(mask_mod, positions, score, float("-inf") if softmax else 0.0)
    printed = [printer.function("modify", parameters, masked)]
    if score_mod is not None and mask_mod is not None:
        printed.append(printer.function("rescore", parameters, score))
    if sinks is not None:
        printed.append(printer.function("sink", ("h", "args"), Load(sinks, (Symbol("int", "h"),))))
    for name, function in transforms.items():
        place = ("b", "h", TRANSFORMS[name], "d")
        changed = _traced(function, ("x", *place), in_memory=name != "output")
        result = Symbol("float", "tl.where(valid & (d < D), {0}, 0.0)", ((changed, "float"),))
        constants = ("D: tl.constexpr", "AXIS: tl.constexpr")
        printed.append(printer.function(name, ("x", "rows", "valid", *place, "args", *constants), result))
    made_of = [
        f"{name} {getattr(function, '__qualname__', type(function).__qualname__)}" for name, function in given.items()
    ]
    title = "Generated from " + (" and ".join([*made_of, *(["sinks"] if sinks is not None else [])]) or "nothing")
    text = "\n\n" + "\n\n".join(printed)
    imports = []
    for module, helpers in HELPERS.items():
        used = [helper for helper in helpers if re.search(rf"\b{helper}\(", text)]
        imports += [f"from evenshare.device.{module} import {', '.join(used)}\n"] if used else []
    header = _HEADER.format(title=re.sub(r'["\\]', "'", title))
    return header + ("\n" if imports else "") + "".join(imports) + text, printer.tensors


def _score(score_mod: Function | None, positions: tuple[str, ...]) -> Operand:
    score = Symbol("float", "score")
    if score_mod is None:
        return score
    # A score that does not depend on the one given has not its shape yet; adding 0 changes no other.
    given = _traced(score_mod, ("score", *positions))
    if _uses_score(given):
        return given
    return Symbol("float", "{0} + tl.zeros_like({1})", ((given, "float"), (score, "float")))


def _masked(mask_mod: Function, positions: tuple[str, ...], score: Operand, hidden: float) -> Operand:
    mask = _traced(mask_mod, positions)
    return Symbol("float", "tl.where({0}, {1}, {2})", ((mask, "bool"), (score, "float"), (hidden, "float")))


def _traced(function: Function, names: tuple[str, ...], in_memory: bool = True) -> Operand:
    """What `function` makes of arguments of these names: the score, a vector x and its dims d, or integers."""

    def symbol(name: str) -> Symbol:
        if name in ("x", "d"):
            return Row(name, in_memory)
        return Symbol("float" if name == "score" else "int", name)

    with CapturedTensors():
        result = function(*map(symbol, names))
    if not isinstance(result, Symbol | Table | torch.Tensor | bool | int | float):
        code = getattr(function, "__code__", None)
        place = f"\n  {code.co_filename}:{code.co_firstlineno}" if code else ""
        raise VariantError(
            f"{function}: got a {type(result).__name__} returned, want a traced value or a number{place}"
        )
    return operand_of(result, "return")


def _uses_score(operand: Operand) -> bool:
    seen: set[int] = set()
    pending = [operand]
    while pending:
        current = pending.pop()
        if not isinstance(current, Symbol) or id(current) in seen:
            continue
        seen.add(id(current))
        if current.template == "score":
            return True
        pending += [operand for operand, _ in current.operands]
    return False

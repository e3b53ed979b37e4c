"""The table of operations that a variant's functions may use: torch's name -> how it is printed.

Numbers are bool, int (32 bits, or 64 where a table holds such) or float (fp32), promoted as torch promotes them; integer // and %
round down. A template's arguments are its operands' texts, names or literals, cast to the kind that it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from evenshare.attention.variants.operands import (
    element,
    indexed,
    kind_of,
    kind_of_dtype,
    operand_of,
    promoted,
)
from evenshare.attention.variants.symbolic import KINDS, Operand, Reduction, Symbol, Table, fail, is_count

Rule = Callable[..., Any]
MAX_POWER = 8  # up to which a power is printed as products


def elementwise(template: str, takes: str | None = None, gives: str | None = None, least: str = "bool") -> Rule:
    """Rule of a function of as many operands as the template names. takes: their kind; None: promoted, at least `least`."""
    count = 1 + max(i for i in range(3) if f"{{{i}}}" in template)

    def rule(name: str, *args: Any, inplace: bool = False) -> Symbol:
        if inplace:
            fail(f"{name}: got inplace=True, want it out of place")
        if len(args) != count:
            fail(f"{name}: got {len(args)} arguments, want {count}")
        operands = [operand_of(arg, name) for arg in args]
        kind = takes or max(promoted(*operands), least, key=KINDS.index)
        return Symbol(gives or kind, template, tuple((operand, kind) for operand in operands))

    return rule


def _by_kind(template: str, of_bools: str) -> Rule:
    """Two operands, with another template if both are bools."""
    plain, logical = elementwise(template, least="int"), elementwise(of_bools)

    def rule(name: str, a: Any, b: Any, *, alpha: Any = 1) -> Symbol:
        a, b = operand_of(a, name), operand_of(b, name)
        if not (isinstance(alpha, int | float) and alpha == 1):
            fail(f"{name}: got alpha={alpha!r}, want it multiplied out")
        return (logical if promoted(a, b) == "bool" else plain)(name, a, b)

    return rule


def _logical(symbol: str, neutral: bool) -> Rule:
    """& or |, where torch's and_masks and or_masks begin with a constant."""
    plain = elementwise(f"{{0}} {symbol} {{1}}")

    def rule(name: str, a: Any, b: Any) -> Operand:
        a, b = operand_of(a, name), operand_of(b, name)
        return b if a is neutral else a if b is neutral else plain(name, a, b)

    return rule


def _refuse_bools(name: str, *operands: Operand) -> None:
    if any(isinstance(operand, Symbol) and operand.kind == "bool" for operand in operands):
        fail(f"{name} of a bool, which torch does not define; want ~, ^ or .int()")


def _sub(name: str, a: Any, b: Any) -> Symbol:
    a, b = operand_of(a, name), operand_of(b, name)
    _refuse_bools(name, a, b)
    return elementwise("{0} - {1}")(name, a, b)


def _neg(name: str, x: Any) -> Symbol:
    _refuse_bools(name, operand_of(x, name))
    return elementwise("-{0}", least="int")(name, x)


def _div(name: str, a: Any, b: Any, *, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode not in (None, "floor"):
        fail(f"{name}: got rounding_mode={rounding_mode!r}, want None or 'floor'")
    return _floor_divide(name, a, b) if rounding_mode else elementwise("{0} / {1}", takes="float")(name, a, b)


def _floor_divide(name: str, a: Any, b: Any) -> Symbol:
    a, b = operand_of(a, name), operand_of(b, name)
    rounded = "{0} // {1}" if is_count(a) and is_count(b) else "floor_divide({0}, {1})"
    return elementwise("tl.floor({0} / {1})" if promoted(a, b) == "float" else rounded, least="int")(name, a, b)


def _remainder(name: str, a: Any, b: Any) -> Symbol:
    a, b = operand_of(a, name), operand_of(b, name)
    return elementwise("{0} % {1}" if is_count(a) and is_count(b) else "remainder({0}, {1})", least="int")(name, a, b)


def _pow(name: str, a: Any, b: Any) -> Symbol:
    base, exponent = operand_of(a, name), operand_of(b, name)
    if not isinstance(base, Symbol) and base > 0 and promoted(base, exponent) == "float":
        return elementwise(f"tl.exp2({{0}} * {math.log2(base)!r})", takes="float")(name, exponent)
    if not isinstance(exponent, Symbol) and exponent == 0.5:
        return elementwise("tl.sqrt({0})", takes="float")(name, base)
    if not isinstance(exponent, Symbol) and exponent == int(exponent) and 1 <= exponent <= MAX_POWER:
        kind = max(promoted(base, exponent), "int", key=KINDS.index)
        return elementwise(" * ".join(["{0}"] * int(exponent)), takes=kind)(name, base)
    fail(f"{name}: want an exponent of 0.5 or 1 to {MAX_POWER}, or a float above 0 as the base")


def _where(name: str, condition: Any, a: Any, b: Any) -> Symbol:
    condition, a, b = (operand_of(x, name) for x in (condition, a, b))
    kind = promoted(a, b)
    return Symbol(kind, "tl.where({0}, {1}, {2})", ((condition, "bool"), (a, kind), (b, kind)))


def _clamp(name: str, x: Any, min: Any = None, max: Any = None) -> Any:
    for bound, function in ((min, "maximum"), (max, "minimum")):
        if bound is not None:
            x = elementwise(f"tl.{function}({{0}}, {{1}})", least="int")(name, x, bound)
    return x


def _cast(kind: str) -> Rule:
    return elementwise("{0}", takes=kind)


def _to(name: str, x: Any, dtype: Any = None, *, copy: bool = False, non_blocking: bool = False) -> Any:
    return _cast(kind_of_dtype(dtype, name))(name, x)


def _filled(value: int | None) -> Rule:
    """new_ones, zeros_like and the like: a number of Python."""

    def rule(name: str, x: Any, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
        number = args[-1] if value is None and args else _.get("fill_value", value)
        if not isinstance(number, bool | int | float):
            fail(f"{name}: got {number!r}, want a number to fill with")
        kind = kind_of(operand_of(x, name)) if dtype is None else kind_of_dtype(dtype, name)
        return {"bool": bool, "int": int, "float": float}[kind](number)

    return rule


def _getitem(name: str, x: Any, index: Any) -> Any:
    if isinstance(x, Symbol) and x.vector:
        return element(x, operand_of(index, name), name)
    if not isinstance(x, torch.Tensor | Table):
        fail("an index of a traced value, which is one number")
    table = Table(x) if isinstance(x, torch.Tensor) else x
    return indexed(table, index if isinstance(index, tuple) else (index,), name)


def _reduction(function: str) -> Rule:
    def rule(name: str, x: Any, dim: Any = -1, keepdim: bool = False) -> Symbol:
        operand = operand_of(x, name)
        if not (isinstance(operand, Symbol) and operand.vector):
            fail(f"{name} of a single number, want a vector, such as the x of a transform")
        if dim not in (-1, 0, None, (-1,), [-1]):
            fail(f"{name}: got dim={dim!r}, want the only one, -1")
        return Reduction(function, operand)

    return rule


_float_functions = {
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "log1p": "tl.log(1.0 + {0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "tanh": "tanh({0})",
    **{f"{name}_approx": f"{name}_approx({{0}})" for name in ("cos", "sin", "tanh")},  # of evenshare.attention.variants
    "sigmoid": "tl.sigmoid({0})",
    "silu": "{0} * tl.sigmoid({0})",
    "reciprocal": "1.0 / {0}",
    "softplus": "tl.maximum({0}, 0.0) + tl.log(1.0 + tl.exp(-tl.abs({0})))",
}
_comparisons = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_bitwise = {"and": "&", "or": "|", "xor": "^"}

RULES: dict[str, Rule] = {
    **{name: elementwise(template, takes="float") for name, template in _float_functions.items()},
    **{name: elementwise(f"{{0}} {symbol} {{1}}", gives="bool") for name, symbol in _comparisons.items()},
    "and": _logical("&", True),
    "or": _logical("|", False),
    "xor": elementwise("{0} ^ {1}"),
    **{f"logical_{name}": elementwise(f"{{0}} {symbol} {{1}}", takes="bool") for name, symbol in _bitwise.items()},
    "logical_not": elementwise("{0} == 0", takes="bool"),
    "invert": lambda name, x: elementwise("{0} == 0" if kind_of(operand_of(x, name)) == "bool" else "~{0}")(name, x),
    "lshift": elementwise("{0} << {1}", takes="int"),
    "rshift": elementwise("{0} >> {1}", takes="int"),
    "add": _by_kind("{0} + {1}", "{0} | {1}"),
    "mul": _by_kind("{0} * {1}", "{0} & {1}"),
    "sub": _sub,
    "rsub": lambda name, a, b: _sub(name, b, a),
    "div": _div,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "pow": _pow,
    "square": lambda name, x: _pow(name, x, 2),
    "neg": _neg,
    "pos": elementwise("{0}"),
    "abs": elementwise("tl.abs({0})", least="int"),
    "floor": elementwise("tl.floor({0})", takes="float"),
    "ceil": elementwise("tl.ceil({0})", takes="float"),
    "relu": elementwise("tl.maximum({0}, 0)", least="int"),
    "minimum": elementwise("tl.minimum({0}, {1})", least="int"),
    "maximum": elementwise("tl.maximum({0}, {1})", least="int"),
    "clamp": _clamp,
    "where": _where,
    "masked_fill": lambda name, x, mask, value: _where(name, mask, value, x),
    "isnan": elementwise("{0} != {0}", takes="float", gives="bool"),
    "isinf": elementwise('tl.abs({0}) == float("inf")', takes="float", gives="bool"),
    "to": _to,
    "type": _to,
    "float": _cast("float"),
    "int": _cast("int"),
    "long": _cast("int"),
    "bool": _cast("bool"),
    "getitem": _getitem,
    "sum": _reduction("row_sum"),
    "mean": _reduction("row_mean"),
    "amax": _reduction("row_max"),
    "amin": _reduction("row_min"),
    "new_ones": _filled(1),
    "new_zeros": _filled(0),
    "new_full": _filled(None),
    "ones_like": _filled(1),
    "zeros_like": _filled(0),
    "full_like": _filled(None),
}
ALIASES = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "subtract": "sub",
    "multiply": "mul",
    "negative": "neg",
    "absolute": "abs",
    "clip": "clamp",
    "min": "minimum",
    "max": "maximum",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "bitwise_not": "invert",
    "bitwise_left_shift": "lshift",
    "bitwise_right_shift": "rshift",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "not_equal": "ne",
    "expit": "sigmoid",
}


def apply(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The symbol that torch's operation `name` makes of these. Raises VariantError for one outside the table."""
    plain = name.strip("_") if name.startswith("__") else name
    known = ALIASES.get(plain, plain)
    rule = RULES.get(known)
    if rule is None:
        in_place = plain.rstrip("_") in RULES and plain.endswith("_")
        hint = f"it works in place, want {plain.rstrip('_')}" if in_place else "want one of docs/variants.md"
        fail(f"the operation {plain} is not in the table of those that become device code; {hint}")
    try:
        return rule(plain, *args, **kwargs)
    except TypeError as error:
        fail(f"the operation {plain}: {error}")

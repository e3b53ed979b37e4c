"""What the arguments of a variant's operations are: numbers, elements of captured tensors and of vectors."""

from __future__ import annotations

from typing import Any

import torch

from evenshare.attention.variants.symbolic import (
    KINDS,
    TABLE_DTYPES,
    Load,
    Operand,
    Row,
    Symbol,
    Table,
    fail,
    is_count,
)


def kind_of(operand: Operand) -> str:
    if isinstance(operand, Symbol):
        return operand.kind
    return "bool" if isinstance(operand, bool) else "int" if isinstance(operand, int) else "float"


def kind_of_dtype(dtype: Any, name: str) -> str:
    if dtype not in TABLE_DTYPES:
        fail(f"{name}: got dtype {dtype}, want one of {', '.join(str(d).removeprefix('torch.') for d in TABLE_DTYPES)}")
    return TABLE_DTYPES[dtype]


def operand_of(value: Any, name: str) -> Operand:
    """A number or a symbol; a captured tensor without dimensions is one."""
    if isinstance(value, torch.Tensor):
        value = indexed(Table(value), (), name)
    if isinstance(value, Table):
        missing = value.tensor.dim() - len(value.indices)
        fail(
            f"{name}: got a captured tensor of shape {tuple(value.tensor.shape)} with {missing} dimensions not indexed"
        )
    if isinstance(value, Symbol | bool | int | float):
        return value
    fail(f"{name}: got an argument of type {type(value).__name__}, want traced values, tensors and numbers")


def promoted(*operands: Operand) -> str:
    return max(map(kind_of, operands), key=KINDS.index)


def indexed(table: Table, indices: tuple[Any, ...], name: str) -> Any:
    """The table with more of its dimensions indexed; a `Load` once all are."""
    tensor = table.tensor
    kind_of_dtype(tensor.dtype, "a captured tensor")
    operands: list[Operand] = []
    for index in indices:
        if index is Ellipsis or index is None or isinstance(index, slice):
            fail(f"{name}: got {index!r} in an index, want numbers, one for each dimension")
        operand = operand_of(index, name)
        if kind_of(operand) != "int":
            fail(f"{name}: got an index of kind {kind_of(operand)}, want integers (torch.where chooses by a bool)")
        size = (
            tensor.shape[len(table.indices) + len(operands)] if len(table.indices) + len(operands) < tensor.dim() else 0
        )
        if not isinstance(operand, Symbol) and not -size <= operand < size:
            fail(f"{name}: got index {operand} of a dimension of size {size}, tensor of shape {tuple(tensor.shape)}")
        operands.append(operand)
    known = (*table.indices, *operands)
    if len(known) > tensor.dim():
        fail(f"{name}: got {len(known)} indices of a tensor of shape {tuple(tensor.shape)}")
    return Load(tensor, known) if len(known) == tensor.dim() else Table(tensor, known)


def element(vector: Symbol, index: Operand, name: str) -> Operand:
    """Elements of a vector, one or as many as the index has: what it is made of, taken there."""
    if kind_of(index) != "int":
        fail(f"{name}: got an index of kind {kind_of(index)}, want integers")
    if isinstance(index, Row):
        return vector
    if not is_count(index):  # from the end, as what is computed with d must know
        index = Symbol("int", "from_end({0}, D)", ((index, "int"),)) if isinstance(index, Symbol) else _from_end(index)
    done: dict[int, Operand] = {}
    pending = [vector]
    while pending:  # without recursion, as chains of operations may be long
        last = pending[-1]
        parts = [part for part, _ in last.operands]
        missing = [p for p in parts if isinstance(p, Symbol) and p.vector and id(p) not in done]
        if missing:
            pending += missing
            continue
        pending.pop()
        if not isinstance(last, Row):
            done[id(last)] = last.rebuilt(tuple(done.get(id(p), p) for p in parts))
        elif last.kind == "int":
            done[id(last)] = index
        elif last.in_memory:
            done[id(last)] = Symbol("float", "element(rows, {0}, valid, D)", ((index, "int"),))
        else:
            fail("an index of the output, of which a kernel reaches no other element")
    return done[id(vector)]


def _from_end(index: bool | int | float) -> Symbol:
    return Symbol("int", f"(D - {-int(index)})")

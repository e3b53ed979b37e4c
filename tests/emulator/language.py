"""Gluon's names as an emulated kernel sees them."""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from tests.emulator.assembly import INSTRUCTIONS
from tests.emulator.machine import Machine, MBarrier
from tests.emulator.memory import Buffer
from tests.emulator.values import TORCH_DTYPES, Pointer, Scalar, Tensor, unwrap, wrap_argument

_current = threading.local()  # roles are threads: each one is told its machine


def _machine() -> Machine:
    return _current.machine


class Product:
    """A wgmma under way. Its operands in shared memory are read when it is done, its registers when it was issued."""

    def __init__(self, a: Any, b: Buffer, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.value: Tensor | None = None

    def finish(self) -> Tensor:
        if self.value is None:
            a = self.a.read_by_wgmma() if isinstance(self.a, Buffer) else self.a.data
            product = a.float() @ self.b.read_by_wgmma().float()
            acc = self.acc.finish() if isinstance(self.acc, Product) else self.acc
            if product.shape != acc.data.shape:
                raise ValueError(f"acc: got {acc.shape}, want {list(product.shape)}")
            self.value = Tensor(acc.data + product if self.use_acc else product)
        return self.value


class _Descriptor:
    """A TMA descriptor: boxes of a tensor, zero outside of it."""

    def __init__(self, host: Any) -> None:
        self.base, self.shape, self.strides, self.box = (
            host.base,
            list(host.shape),
            list(host.strides),
            list(host.block_shape),
        )
        self.dtype = Pointer.to_tensor(host.base).dtype.element_ty
        size = host.base.element_size()
        if (
            host.base.data_ptr() % 16
            or any(stride * size % 16 for stride in self.strides[:-1])
            or self.strides[-1] != 1
        ):
            raise ValueError(
                f"strides: got {self.strides} of {size} bytes at {host.base.data_ptr()}, want what TMA takes"
            )

    def read(self, coordinates: list[int]) -> torch.Tensor:
        data = torch.zeros(self.box, dtype=self.base.dtype)
        begins = [max(c, 0) for c in coordinates]
        ends = [min(c + b, s) for c, b, s in zip(coordinates, self.box, self.shape, strict=True)]
        if all(begin < end for begin, end in zip(begins, ends, strict=True)):
            view = self.base.as_strided(self.shape, self.strides, self.base.storage_offset())
            inside = tuple(slice(b, e) for b, e in zip(begins, ends, strict=True))
            at = tuple(slice(b - c, e - c) for b, e, c in zip(begins, ends, coordinates, strict=True))
            data[at] = view[inside]
        return data

    def write(self, coordinates: list[int], data: torch.Tensor) -> None:
        ends = [min(c + b, s) for c, b, s in zip(coordinates, self.box, self.shape, strict=True)]
        inside = tuple(slice(c, e) for c, e in zip(coordinates, ends, strict=True))
        view = self.base.as_strided(self.shape, self.strides, self.base.storage_offset())
        at = tuple(slice(0, max(e - c, 0)) for c, e in zip(coordinates, ends, strict=True))
        view[inside] = data.reshape(self.box)[at]


def _box_to_shared(
    descriptor: _Descriptor, coordinates: list[Any], bar: Buffer, buffer: Buffer, pred: bool = True
) -> None:
    machine = _machine()
    barrier, at = machine.barrier(bar), [int(c) for c in coordinates]
    buffer.poison()

    def copy() -> None:
        buffer.write(descriptor.read(at).reshape(buffer.shape))
        barrier.receive(buffer.offsets.numel() * buffer.element_bytes)

    machine.under_way.append(copy)
    machine.maybe_switch()


def _shared_to_box(descriptor: _Descriptor, coordinates: list[Any], buffer: Buffer) -> None:
    """The buffer is read when the copy is done: at the latest when its role waits for it."""
    at, role = [int(c) for c in coordinates], _machine().role
    role.stores.append(lambda: descriptor.write(at, buffer.read_by_tma()))
    _machine().maybe_switch()


def _store_wait(left: int) -> None:
    _machine().role.finish_stores(left)


def _copy_to_shared(buffer: Buffer, pointers: Pointer, mask: Any = None) -> None:
    buffer.poison()
    _machine().role.copy(lambda: buffer.copied(pointers.load(mask, 0).data))


def _arrive_after_copies(bar: Buffer, increment_count: bool = True) -> None:
    if increment_count:
        raise NotImplementedError("mbarrier_arrive: want increment_count=False")
    machine = _machine()
    role, barrier, number = machine.role, machine.barrier(bar), machine.role.num_copies

    def arrive() -> None:
        role.finish_copies(number)
        barrier.arrive(32 * role.num_warps)

    machine.under_way.append(arrive)


def _commit_group() -> None:
    role = _machine().role
    role.groups.append(role.num_copies)


def _wait_group(left: int) -> None:
    role = _machine().role
    if len(role.groups) > left:
        role.finish_copies(role.groups[len(role.groups) - left - 1])


def _init(bar: Buffer, count: int) -> None:
    _machine().barriers[bar.key] = MBarrier(int(count))


def _arrive(bar: Buffer, count: int = 1) -> None:
    _machine().barrier(bar).arrive(int(count))
    _machine().maybe_switch()


def _wait(bar: Buffer, phase: Any) -> None:
    barrier, parity = _machine().barrier(bar), int(phase)
    _machine().wait(lambda: barrier.passed(parity), f"parity {parity} of a barrier of {barrier.count}")


def _warpgroup_mma(a: Any, b: Buffer, acc: Any, *, use_acc: Any = True, is_async: bool = False) -> Any:
    product = Product(a, b, acc, bool(use_acc))
    if not is_async:
        return product.finish()
    machine = _machine()
    machine.role.products.append(product)
    if machine.random.random() < machine.promptness:
        product.finish()
    return product


def _warpgroup_mma_wait(left: int, deps: tuple[Any, ...]) -> Any:
    role = _machine().role
    number = len(role.products) - left
    for product in role.products[:number]:
        product.finish()
    del role.products[: max(number, 0)]
    done = [dep.value if isinstance(dep, Product) and dep.value is not None else dep for dep in deps]
    return done[0] if len(done) == 1 else tuple(done)


def _specialize(parts: list[tuple[Any, tuple[Any, ...]]], num_warps: list[int], num_registers: list[int]) -> None:
    machine = _machine()
    warps = [machine.main.num_warps, *num_warps]

    def body(function: Any, arguments: tuple[Any, ...]) -> Callable[[], None]:
        def run() -> None:
            _current.machine = machine
            function(*arguments)

        return run

    bodies = [
        (f"{function.__name__} {number}", warps[number], body(function, arguments))
        for number, (function, arguments) in enumerate(parts)
    ]
    machine.specialize(bodies)


def _range(*bounds: Any) -> Iterator[Scalar]:
    return map(Scalar, range(*(int(b) for b in bounds)))


def _data(value: Any, like: Any = None) -> torch.Tensor:
    data = unwrap(value)
    return data if isinstance(data, torch.Tensor) else torch.as_tensor(data)


def _elementwise(function: Callable[..., Any], *values: Any) -> Any:
    """A function of numbers or tensors; of numbers alone it gives a number."""
    if any(isinstance(value, Tensor) for value in values):
        return Tensor(function(*(_data(value) for value in values)))
    scalars = [value if isinstance(value, Scalar) else Scalar(value) for value in values]
    dtype = next((s.dtype for s in scalars if s.dtype in (gl.int64, gl.float32)), scalars[-1].dtype)
    return Scalar(function(*(torch.tensor(s.value) for s in scalars)).item(), dtype)


def _where(condition: Any, x: Any, y: Any) -> Any:
    if not isinstance(condition, Tensor) and not isinstance(x, Tensor) and not isinstance(y, Tensor):
        return x if condition else y
    a, b = unwrap(x), unwrap(y)
    tensor = a if isinstance(a, torch.Tensor) else b if isinstance(b, torch.Tensor) else None
    result = torch.where(_data(condition).bool(), a, b)
    return Tensor(result.to(tensor.dtype) if tensor is not None and tensor.is_floating_point() else result)


def _extreme(function: Callable[..., torch.Tensor], worst: float) -> Callable[[Tensor, int], Any]:
    def reduce(value: Tensor, axis: int) -> Any:
        data = value.data
        if not data.is_floating_point():
            return _reduced(function(data, axis))
        nan = torch.isnan(data)  # the hardware's maximum takes the other operand
        result = function(torch.where(nan, worst, data), axis)
        return _reduced(torch.where(nan.all(axis), torch.nan, result).to(data.dtype))

    return reduce


def _reduced(data: torch.Tensor) -> Any:
    return Tensor(data) if data.dim() else Scalar(data.item())


def _atomic(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def atomic(pointer: Pointer, value: Any, mask: Any = None, sem: str | None = None, scope: str | None = None) -> Any:
        if not isinstance(pointer.offset, Scalar):
            raise NotImplementedError("atomics on tensors of addresses")
        old = pointer.load()
        pointer.store(function(old, value))
        return old

    return atomic


def _assembly(text: str, constraints: str, arguments: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    key = " ".join(text.split())
    if key not in INSTRUCTIONS:
        raise NotImplementedError(f"inline_asm_elementwise: tests/emulator/assembly.py does not know {key!r}")
    result = INSTRUCTIONS[key](*(_data(a) for a in arguments))
    if isinstance(result, tuple):  # registers of 16 bits may come as such
        return tuple(Tensor(value.view(TORCH_DTYPES[kind])) for value, kind in zip(result, dtype, strict=True))
    return Tensor(result)


def _tick() -> Scalar:
    machine = _machine()
    machine.clock += 1
    return Scalar(machine.clock, gl.int64)


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    pointer.store(value, mask)


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Buffer:
    buffer = Buffer.allocate(dtype, list(shape), layout)
    _machine().allocations.append(buffer.allocation)
    return buffer


def _full(shape: list[int], value: Any, dtype: Any, layout: Any = None) -> Tensor:
    return Tensor(torch.full(list(shape), unwrap(value)).to(TORCH_DTYPES[dtype]), layout)


def _split(value: Tensor) -> tuple[Tensor, Tensor]:
    first, second = value.data.unbind(-1)
    return Tensor(first), Tensor(second)


FUNCTIONS: dict[str, Any] = {
    "program_id": lambda axis: Scalar(_machine().program[axis]),
    "static_range": lambda *bounds: range(*(int(b) for b in bounds)),
    "load": lambda pointer, mask=None, other=None, eviction_policy=None: pointer.load(mask, other),
    "store": _store,
    "atomic_add": _atomic(lambda old, value: old + value),
    "atomic_or": _atomic(lambda old, value: old | value),
    "arange": lambda start, end, layout=None: Tensor(torch.arange(start, end, dtype=torch.int32), layout),
    "full": _full,
    "zeros": lambda shape, dtype, layout=None: _full(shape, 0, dtype, layout),
    "zeros_like": lambda value: Tensor(torch.zeros_like(value.data)),
    "convert_layout": lambda value, layout, assert_trivial=False: Tensor(value.data, layout),
    "cast": lambda value, dtype, bitcast=False: value.to(dtype, bitcast),
    "expand_dims": lambda value, axis: value.expand_dims(axis),
    "reshape": lambda value, shape: Tensor(value.data.reshape(list(shape))),
    "permute": lambda value, order: Tensor(value.data.permute(order)),
    "join": lambda a, b: Tensor(torch.stack((a.data, b.data), -1)),
    "split": _split,
    "where": _where,
    "minimum": lambda a, b: _elementwise(lambda x, y: torch.fmin(x, y), a, b),
    "maximum": lambda a, b: _elementwise(lambda x, y: torch.fmax(x, y), a, b),
    "exp2": lambda value: _elementwise(torch.exp2, value),
    "log2": lambda value: _elementwise(torch.log2, value),
    "abs": lambda value: _elementwise(torch.abs, value),
    "sigmoid": lambda value: _elementwise(torch.sigmoid, value),
    "erf": lambda value: _elementwise(torch.erf, value),
    "max": _extreme(torch.amax, float("-inf")),
    "min": _extreme(torch.amin, float("inf")),
    "sum": lambda value, axis: _reduced(value.data.sum(axis, dtype=value.data.dtype)),
    "inline_asm_elementwise": _assembly,
    "allocate_shared_memory": _allocate,
    "barrier": lambda: _machine().maybe_switch(),
    "thread_barrier": lambda: _machine().maybe_switch(),
    "warp_specialize": _specialize,
    "fence_async_shared": lambda: _machine().fence(),
    "mma_v2": lambda a, b, acc: Tensor(acc.data + a.data.float() @ b.data.float(), acc.layout),
    "warpgroup_mma": _warpgroup_mma,
    "warpgroup_mma_wait": _warpgroup_mma_wait,
    "globaltimer": _tick,
    "smid": lambda: Scalar(0),
    "gdc_wait": lambda: None,
    "gdc_launch_dependents": lambda: None,
}  # fmt: skip


class _Language:
    """`gl` or `tl`: functions from above, types and layouts from the real one."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name in FUNCTIONS:
            return FUNCTIONS[name]
        found = getattr(self._real, name)
        if isinstance(found, types.FunctionType):
            raise NotImplementedError(f"the emulator has no {name}")
        return found


MODULES: dict[Any, Any] = {
    gl: _Language(gl),
    triton.language: _Language(triton.language),
    hopper.mbarrier: SimpleNamespace(
        init=_init, arrive=_arrive, wait=_wait, MBarrierLayout=hopper.mbarrier.MBarrierLayout,
        expect=lambda bar, num_bytes: _machine().barrier(bar).expect(int(num_bytes)),
    ),
    hopper.tma: SimpleNamespace(
        async_copy_global_to_shared=_box_to_shared, async_copy_shared_to_global=_shared_to_box, store_wait=_store_wait
    ),
    hopper.async_copy: SimpleNamespace(
        async_copy_global_to_shared=_copy_to_shared, mbarrier_arrive=_arrive_after_copies,
        commit_group=_commit_group, wait_group=_wait_group,
    ),
}  # fmt: skip
_emulated: dict[Any, Any] = {}


def _is_kernel(value: Any) -> bool:
    return hasattr(value, "fn") and isinstance(value.fn, types.FunctionType) and hasattr(value, "__getitem__")


def _emulate(function: types.FunctionType) -> types.FunctionType:
    """The same code over other names."""
    if function not in _emulated:
        names: dict[str, Any] = {}
        emulated = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        _emulated[function] = emulated
        names.update({name: _translate(value) for name, value in function.__globals__.items()}, range=_range)
    return _emulated[function]


def _translate(value: Any) -> Any:
    if isinstance(value, types.ModuleType):
        return MODULES.get(value, value)
    if isinstance(value, (gl.constexpr, triton.language.constexpr)):
        return value.value
    if _is_kernel(value):
        return _emulate(value.fn)
    if callable(value) and getattr(value, "__module__", "").startswith("triton.") and value is not gluon.jit:
        return FUNCTIONS.get(getattr(value, "__name__", ""), value)
    return value


class Emulated:
    """`kernel[grid](*arguments, **constants)` on CPU tensors. Programs run one after the other, from a random first."""

    seeds: Iterator[int] = itertools.count()

    def __init__(self, kernel: Any) -> None:
        self.function = _emulate(kernel.fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int = 4, launch_pdl: bool = False, **constants: Any) -> None:
            names = self.function.__code__.co_varnames[: self.function.__code__.co_argcount]
            if "num_warps" in names:
                constants["num_warps"] = num_warps
            constants = {name: _translate(value) for name, value in constants.items()}
            values = [_Descriptor(a) if hasattr(a, "block_shape") else wrap_argument(a) for a in arguments]
            seed = next(self.seeds)
            programs = list(itertools.product(*(range(n) for n in (*grid, 1, 1)[:3])))
            first = seed % max(len(programs), 1)
            for program in programs[first:] + programs[:first]:
                _current.machine = Machine(program, num_warps, seed * 1_000_003 + hash(program))
                self.function(*values, **constants)

        return launch

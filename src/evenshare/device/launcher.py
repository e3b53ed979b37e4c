"""Kernel launches without Triton's binder.

`kernel[grid](...)` binds, specialises and looks up its arguments anew at every call: 31 us on the host for 24 arguments, as long as
a small decode step takes on the GPU. A `Launcher` does that once per specialisation. `bind` takes the arguments that stay (a plan's
arrays, sizes, strides) and works out their part of the key; a call then pays for the tensors it is given: dtype, device and
alignment are the rest of the key, and the C launcher gets addresses, which it need not ask the driver about.

What a later change of Triton's compile options or of a kernel's globals would do to `kernel[grid]`, it does not do here.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MAX_TENSOR_MAPS = 1024  # K and V of 512 layers
Launch = Callable[..., None]


@dataclass(frozen=True, eq=False)
class Box:
    """The TMA descriptor that a kernel takes in place of a tensor: all but the tensor's address, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any  # gluon's NVMMASharedLayout

    def describe(self, base: torch.Tensor) -> Any:
        """Triton's own descriptor object. Raises AssertionError for what TMA does not take."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(base, list(self.shape), list(self.strides), list(self.block_shape), self.layout)


class Launcher:
    """A kernel with its constexprs and options; its first `num_dynamic` parameters change from call to call."""

    def __init__(self, kernel: Any, num_dynamic: int, constants: Mapping[str, Any]) -> None:
        self.kernel, self.num_dynamic, self.constants = kernel, num_dynamic, dict(constants)
        self.compiled: dict[Hashable, _Compiled] = {}
        self.params = kernel.params if isinstance(kernel, JITFunction) else []
        # How Triton specialises on each static argument: (const pointer, on its value at all, on divisibility by 16).
        self.rules = [
            (param.is_const, not param.do_not_specialize, not param.do_not_specialize_on_alignment)
            for param in self.params[num_dynamic:]
        ]

    def bind(
        self,
        device: torch.device,
        grid: tuple[int, ...],
        static: tuple[Any, ...],
        boxes: Mapping[int, Box] | None = None,
    ) -> Launch:
        """A callable of the first `num_dynamic` arguments, tensors on `device` or None, that launches on the current stream.

        static: the runtime arguments after those: numbers, None, tensors, tuples of these, Triton's TMA descriptors. boxes: the
        dynamic parameters that the kernel takes as TMA descriptors.
        """
        bound = _Bound(self, device, grid, static, boxes or {})
        fast = device.type == "cuda" and isinstance(self.kernel, JITFunction)
        return bound if fast else bound.launch_ordinarily


@lru_cache(maxsize=512)
def get_launcher(kernel: Any, num_dynamic: int, **constants: Any) -> Launcher:
    """One launcher, and so one set of compiled kernels, for all who launch `kernel` with these constants."""
    return Launcher(kernel, num_dynamic, constants)


class _Bound:
    """A launch of which everything but the dynamic arguments is known."""

    def __init__(
        self,
        launcher: Launcher,
        device: torch.device,
        grid: tuple[int, ...],
        static: tuple[Any, ...],
        boxes: Mapping[int, Box],
    ) -> None:
        self._launcher, self._device, self._static = launcher, device.index, static
        self._grid = (*grid, 1, 1)[:3]
        # (which descriptor, which argument, box), from the back: a descriptor becomes several arguments.
        self._boxes = [(number, i, boxes[i]) for number, i in enumerate(sorted(boxes))][::-1]
        self._found: dict[Hashable, tuple[_Compiled, tuple[Any, ...]]] = {}

    def __call__(self, *dynamic: torch.Tensor | None) -> None:
        active = driver.active
        if active.get_current_device() != self._device:
            with torch.cuda.device(self._device):  # the tensors' GPU, not the current one
                self(*dynamic)
            return
        key: list[Hashable] = []
        arguments: list[Any] = []
        for tensor in dynamic:
            if tensor is None:
                key.append(None)
                arguments.append(None)
            else:
                address = tensor.data_ptr()
                key += (tensor.dtype, tensor.get_device(), address % 16 == 0)
                arguments.append(address)
        found = self._found.get(tuple(key))
        if found is None or _hooks_set():
            self._launch_unknown(tuple(key), dynamic)
            return
        compiled, tail = found
        for number, i, box in self._boxes:
            arguments[i : i + 1] = compiled.expand_box(number, box, arguments[i], dynamic[i])
        compiled.launch(*self._grid, active.get_current_stream(self._device), (*arguments, *tail))

    def _launch_unknown(self, key: tuple[Hashable, ...], dynamic: tuple[torch.Tensor | None, ...]) -> None:
        launcher = self._launcher
        if _hooks_set():  # a profiler wants to see this launch
            self.launch_ordinarily(*dynamic)
            return
        full_key = (key, self._static_key())
        compiled = launcher.compiled.get(full_key)
        if compiled is not None:
            self._found[key] = compiled, self._tail(compiled)
            self(*dynamic)
            return
        kernel = self.launch_ordinarily(*dynamic)
        # Scratch memory is allocated anew for every launch, so kernels that want it stay with Triton's own way.
        if isinstance(kernel, CompiledKernel) and not kernel.run.global_scratch_size + kernel.run.profile_scratch_size:
            compiled = launcher.compiled[full_key] = _Compiled(kernel)
            self._found[key] = compiled, self._tail(compiled)

    def launch_ordinarily(self, *dynamic: torch.Tensor | None) -> Any:
        """Through Triton's binder, or its interpreter. Returns the compiled kernel."""
        arguments: list[Any] = list(dynamic)
        for _, i, box in self._boxes:
            arguments[i] = box.describe(arguments[i])
        return self._launcher.kernel[self._grid](*arguments, *self._static, **self._launcher.constants)

    def _static_key(self) -> tuple[Hashable, ...]:
        """What Triton specialises on in the arguments that stay, by its own function."""
        boxes = [(i, box.block_shape, box.layout) for _, i, box in self._boxes]
        arguments = zip(self._static, self._launcher.rules, strict=False)  # constexprs have rules as well
        return (*boxes, *[native_specialize_impl(BaseBackend, argument, *rule) for argument, rule in arguments])

    def _tail(self, compiled: _Compiled) -> tuple[Any, ...]:
        """The arguments after the dynamic ones as the C launcher takes them; it skips those of constexprs."""
        tail: list[Any] = []
        number = len(self._boxes)
        for argument in self._static:
            if argument is None or isinstance(argument, (int, float, tuple, torch.Tensor)):
                tail.append(_plain(argument))
            else:
                tail += compiled.expand(number, argument)
                number += 1
        num_constants = len(self._launcher.params) - self._launcher.num_dynamic - len(self._static)
        return (*tail, *(None,) * num_constants)


class _Compiled:
    """A compiled kernel behind its C launcher. Triton's versions differ here and nowhere else."""

    def __init__(self, kernel: CompiledKernel) -> None:
        run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
        flags = run.launch_cooperative_grid, run.launch_pdl
        launch = run.launch
        if inspect.isfunction(launch):  # Triton's wrapper, which builds the tensor maps anew at every launch
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        # None: no launch metadata, hooks or scratch.
        if hasattr(run, "kernel_signature"):  # from 3.7 on: one launcher for all kernels, which is told the signature

            def launch_with(x: int, y: int, z: int, stream: int, arguments: tuple[Any, ...]) -> None:
                launch(x, y, z, stream, function, *flags, metadata, None, None, None, None, None, *signature, arguments)

            signature = run.arg_annotations, run.kernel_signature
        else:  # 3.6: a launcher per signature

            def launch_with(x: int, y: int, z: int, stream: int, arguments: tuple[Any, ...]) -> None:
                launch(x, y, z, stream, function, *flags, None, None, metadata, None, None, None, *arguments)

        self.launch: Launch = launch_with
        self._kernel = kernel
        self._maps: OrderedDict[tuple[int, Box], list[Any]] = OrderedDict()

    def expand_box(self, number: int, box: Box, address: int, base: torch.Tensor | None) -> list[Any]:
        """The tensor map and its extents, as the kernel takes them. A map holds no memory: it is an address and its geometry."""
        key = (address, box)
        found = self._maps.get(key)
        if found is None:
            assert base is not None
            found = self._maps[key] = self.expand(number, box.describe(base))
            if len(self._maps) > MAX_TENSOR_MAPS:
                self._maps.popitem(last=False)
        else:
            self._maps.move_to_end(key)
        return found

    def expand(self, number: int, descriptor: Any) -> list[Any]:
        """Arguments that stand for the kernel's descriptor `number`."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        metadata = self._kernel.metadata.tensordesc_meta
        arguments = make_tensordesc_arg(descriptor, metadata[number] if metadata else None)
        return [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]


def _plain(argument: Any) -> Any:
    """An argument, or a tuple of such, with addresses in place of tensors."""
    if isinstance(argument, tuple):
        return tuple(map(_plain, argument))
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def _hooks_set() -> bool:
    """True if somebody, a profiler for one, wants to hear of every launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

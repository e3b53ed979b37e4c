"""Runs Gluon kernels for Hopper on the CPU: their roles, barriers, asynchronous copies and products, tile by tile in torch.

Triton's interpreter does not take Gluon. Here a kernel's Python code runs as it is, with other objects behind the
names it uses (`language`): values are torch tensors (`values`), shared memory is bytes behind the layouts' swizzles
(`memory`), and roles are threads of which one runs at a time, in an order drawn from a seed (`machine`). What is
asynchronous on the chip happens late here, early, or in between, by the same seed, so a buffer that is read before it
is full or written before it is read gives NaN, and a role that waits for ever is an error that says who waits for
what. Reads and writes outside a tensor's storage, int32 overflow, a product of bytes written without a fence and one
more arrival at a barrier than it counts are errors as well.

What it does not see: threads and warps inside a role (a missing `barrier()`), layouts (compiling checks those), registers, speed.
"""

from tests.emulator.language import Emulated

__all__ = ["Emulated"]

"""Elementwise functions as torch defines them, for kernels and for the code that is generated from variants.

They ask for no layout, so Gluon kernels take them too.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # Triton's interpreter has no assembly


@triton.jit
def tanh(x):
    """For small |x| the odd series, whose error is below 4e-7 of x at 0.25; 1 - exp loses digits there."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(square < 0.0625, series, tl.where(x < 0, -far, far))


@triton.jit
def tanh_approx(x):
    """One instruction of sm_75 and newer, whose relative error is below 2^-10.9 (PTX ISA, tanh.approx.f32)."""
    if INTERPRETED:
        y = tanh(x)
    else:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def sin_approx(x):
    """One instruction, whose absolute error is below 2^-20.5 between -pi and pi (PTX ISA, sin.approx.f32)."""
    if INTERPRETED:
        y = tl.sin(x)
    else:
        y = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def cos_approx(x):
    """As `sin_approx` (PTX ISA, cos.approx.f32)."""
    if INTERPRETED:
        y = tl.cos(x)
    else:
        y = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def floor_divide(a, b):
    """Integers, rounded down; the machine's division rounds to zero."""
    quotient = a // b
    remainder = a - quotient * b
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def remainder(a, b):
    """Of numbers of either kind, with the sign of b."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def from_end(index, size):
    """An index as torch reads it: a negative one counts from the end."""
    return tl.where(index < 0, index + size, index)


@triton.jit
def inside(index, size):
    return (index >= 0) & (index < size)

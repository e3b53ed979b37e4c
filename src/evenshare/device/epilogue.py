"""What happens to a finished float32 tile: bias, activation, residual, one rounding. An activation is handed to a kernel as a
constexpr; `device.activations` has the same names in torch.

Gated: the product has the columns [gate | up], n of each, and the output is ACTIVATION(gate) * up, n columns. A tile computes
BLOCK_N / 2 gate columns and the up columns that belong to them, side by side, so that one program has both. Weights need no other
order for it: loads stay vectors, the halves of a tile lie in registers of the same thread, and kernels differ only in
`tile_columns`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

SQRT_HALF = tl.constexpr(0.7071067811865476)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def identity(y):
    return y


@triton.jit
def relu(y):
    return tl.where(y < 0.0, 0.0, y)  # a NaN stays one


@triton.jit
def gelu(y):
    return 0.5 * y * (1.0 + tl.erf(y * SQRT_HALF))


@triton.jit
def gelu_tanh(y):
    inner = SQRT_2_OVER_PI * (y + 0.044715 * y * y * y)
    return y * tl.sigmoid(2.0 * inner)  # 0.5 (1 + tanh(z)) = sigmoid(2 z)


@triton.jit
def silu(y):
    return y * tl.sigmoid(y)


@triton.jit
def tile_columns(tile_n, n, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """The BLOCK_N columns of the product that column tile `tile_n` computes; n: columns of the output."""
    inner = tl.arange(0, BLOCK_N)
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        columns = tile_n * HALF + inner + (inner // HALF) * (n - HALF)
    else:
        columns = tile_n * BLOCK_N + inner
    return columns


@triton.jit
def store_tile(out_ptr, bias_ptr, residual_ptr, acc, rows, tile_n, m, n,
               stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
               ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, beta=1.0):  # fmt: skip
    """out[rows, its columns] = ACTIVATION(acc + bias) + beta residual, rounded once; rows past m and columns past n are left alone.

    bias_ptr, residual_ptr: None if there is none. The residual may be the output itself: each element is read by who writes it.
    """
    if bias_ptr is not None:
        columns = tile_columns(tile_n, n, BLOCK_N, GATED)
        acc += tl.load(bias_ptr + columns, mask=columns < (2 * n if GATED else n), other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_N // 2]), [0, 2, 1]))
        y = ACTIVATION(gate) * up
    else:
        y = ACTIVATION(acc)
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    at = tile_n * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < m)[:, None] & (at < n)[None, :]
    rows = rows.to(tl.int64)[:, None]
    at = at.to(tl.int64)[None, :]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + rows * stride_residual_m + at * stride_residual_n, mask=mask, other=0.0)
        y += beta * residual.to(tl.float32)
    tl.store(out_ptr + rows * stride_out_m + at * stride_out_n, y.to(out_ptr.dtype.element_ty), mask=mask)


ACTIVATIONS: dict[str | None, Any] = {
    None: identity,
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
    "silu_and_multiply": silu,
    "gelu_and_multiply": gelu,
    "gelu_tanh_and_multiply": gelu_tanh,
}


def get_activation(name: str | None) -> Any:
    """The jit function of `name`, of a gated one what it does to the gate; ValueError for an unknown one."""
    if name not in ACTIVATIONS:
        names = ", ".join(str(known) for known in ACTIVATIONS)
        raise ValueError(f"activation: got {name!r}, want one of {names}")
    return ACTIVATIONS[name]

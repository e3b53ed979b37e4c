"""The output side of the 4-bit products for Hopper: bias, activation and residual of a tile whose rows are those of W."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def store_rows(out_ptr, bias_ptr, residual_ptr, acc, row, end_row, token, m, n, stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
               ACTIVATION: gl.constexpr, GATED: gl.constexpr):  # fmt: skip
    """As `device.epilogue.store_tile`, transposed: acc [rows of W from `row` on, tokens]; end_row, unless None: the first not to store.

    Of a gated weight each 16 rows are 8 of the gate and the 8 of up that belong to them."""
    if bias_ptr is not None:
        rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
        if GATED:
            rows = rows // 16 * 8 + rows % 8 + (rows // 8 % 2) * n
            acc += gl.load(bias_ptr + rows, mask=rows < 2 * n, other=0.0).to(gl.float32).expand_dims(1)
        else:
            acc += gl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(gl.float32).expand_dims(1)
    if GATED:
        halves = gl.permute(gl.reshape(acc, [acc.shape[0] // 16, 2, 8, acc.shape[1]]), [0, 2, 3, 1])
        gate, up = gl.split(halves)
        y = gl.reshape(ACTIVATION(gate) * up, [acc.shape[0] // 2, acc.shape[1]])
    else:
        y = ACTIVATION(acc)
    layout: gl.constexpr = y.type.layout
    RATIO: gl.constexpr = acc.shape[0] // y.shape[0]
    at = row // RATIO + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, layout))
    tokens = token + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, layout))
    mask = (at < n).expand_dims(1) & (tokens < m).expand_dims(0)
    if end_row is not None:
        mask = mask & (at < end_row // RATIO).expand_dims(1)
    at = at.to(gl.int64).expand_dims(1)
    tokens = tokens.to(gl.int64).expand_dims(0)
    if residual_ptr is not None:
        y += gl.load(residual_ptr + tokens * stride_residual_m + at * stride_residual_n, mask=mask, other=0.0).to(
            gl.float32
        )
    gl.store(out_ptr + tokens * stride_out_m + at * stride_out_n, y.to(out_ptr.dtype.element_ty), mask=mask)

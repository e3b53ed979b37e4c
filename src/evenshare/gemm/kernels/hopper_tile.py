"""What the Hopper products do alike: the walk over tiles and the ring, and what follows the sum."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from evenshare.device.gluon import barrier, halves

COLUMNS_AT_ONCE = gl.constexpr(64)  # of a tile in what follows the sum: 128 bytes of 16-bit numbers, the widest swizzle
# Row tiles that neighbouring workers take before the next column tile: they share the rows' and the columns' loads through L2.
GROUP_M = gl.constexpr(8)


@gluon.jit
def coordinates(tile, tiles_m, tiles_n):
    width = GROUP_M * tiles_n
    first_m = tile // width * GROUP_M
    group_m = gl.minimum(tiles_m - first_m, GROUP_M)
    within = tile % width
    return first_m + within % group_m, within // group_m


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    """The stage before. Not carried through the loop: of two values that begin it equal, Triton takes one to stay as it was."""
    return gl.where(stage == 0, STAGES, stage) - 1


@gluon.jit
def parts_of_64(x):
    """x [rows, up to 256] -> a tuple of [rows, 64 or fewer]: what an epilogue handles at a time without running out of registers."""
    if x.shape[1] <= COLUMNS_AT_ONCE:
        parts = (x,)
    else:
        left, right = halves(x)
        if x.shape[1] == 2 * COLUMNS_AT_ONCE:
            parts = (left, right)
        else:
            a, b = halves(left)
            c, d = halves(right)
            parts = (a, b, c, d)
    return parts


@gluon.jit
def _finish(x, row_scale, column_scale_ptr, stride_scale, bias_ptr, at, first, n):
    """x times the scales of its rows and columns, and their bias."""
    x *= row_scale
    if column_scale_ptr is not None:
        columns = (first + at).to(gl.int64) * stride_scale
        x *= gl.load(column_scale_ptr + columns, mask=at < n, other=0.0).expand_dims(0)
    if bias_ptr is not None:
        x += gl.load(bias_ptr + first + at, mask=at < n, other=0.0).to(gl.float32).expand_dims(0)
    return x


@gluon.jit
def store_columns(out, out_ptr, row_scale_ptr, stride_row_scale, column_scale_ptr, stride_column_scale, bias_ptr, residual_ptr,
                  out_buf, parts, ups, alpha, beta, row, column, m, n, stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                  ACTIVATION: gl.constexpr, GATED: gl.constexpr, COLUMNS: gl.constexpr):  # fmt: skip
    """As `device.epilogue.store_tile`, for the COLUMNS columns of out from `column` on, in parts of 64 or fewer; ups: if GATED, those that
    they are multiplied by. Scales of the product's rows and columns, and the bias, may be None."""
    if out is not None:
        tma.store_wait(0)  # the tile before has left the buffer
        barrier()
    layout: gl.constexpr = parts[0].type.layout
    WIDTH: gl.constexpr = parts[0].shape[1]
    rows = row + gl.arange(0, parts[0].shape[0], layout=gl.SliceLayout(1, layout))
    row_scale = alpha
    if row_scale_ptr is not None:
        at = rows.to(gl.int64) * stride_row_scale
        row_scale = alpha * gl.load(row_scale_ptr + at, mask=rows < m, other=0.0).expand_dims(1)
    for part in gl.static_range(COLUMNS // WIDTH):
        at = column + part * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
        y = ACTIVATION(_finish(parts[part], row_scale, column_scale_ptr, stride_column_scale, bias_ptr, at, 0, n))
        if GATED:
            y *= _finish(ups[part], row_scale, column_scale_ptr, stride_column_scale, bias_ptr, at, n, n)
        mask = (rows < m).expand_dims(1) & (at < n).expand_dims(0)
        row_offsets = rows.to(gl.int64).expand_dims(1)
        columns = at.to(gl.int64).expand_dims(0)
        if residual_ptr is not None:
            offsets = row_offsets * stride_residual_m + columns * stride_residual_n
            y += beta * gl.load(residual_ptr + offsets, mask=mask, other=0.0).to(gl.float32)
        if out is not None:
            out_buf.slice(part * WIDTH, WIDTH, 1).store(y.to(out.dtype))
        else:
            offsets = row_offsets * stride_out_m + columns * stride_out_n
            gl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)
    if out is not None:
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(out, [row, column], out_buf)

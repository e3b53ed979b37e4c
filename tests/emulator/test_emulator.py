"""The emulator finds the faults that it is there for, and takes right programs for right, in whatever order they run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tests.emulator import Emulated
from tests.emulator.machine import Deadlock
from tests.emulator.memory import Buffer

BLOCK = gl.constexpr(16)


@gluon.jit
def _write(x_ptr, buf, full, empty, num_blocks, COUNT: gl.constexpr, AWAITS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    n = gl.arange(0, BLOCK, layout=layout)
    for i in range(num_blocks):
        if AWAITS:
            mbarrier.wait(empty, (i & 1) ^ 1)
        async_copy.async_copy_global_to_shared(buf, x_ptr + i * BLOCK + n)
        async_copy.mbarrier_arrive(full, increment_count=False)
        if COUNT > 1:
            mbarrier.arrive(full, count=COUNT - 1)


@gluon.jit
def _read(out_ptr, buf, full, empty, num_blocks, AWAITS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    n = gl.arange(0, BLOCK, layout=layout)
    for i in range(num_blocks):
        if AWAITS:
            mbarrier.wait(full, i & 1)
        gl.store(out_ptr + i * BLOCK + n, buf.load(layout) * 2.0)
        mbarrier.arrive(empty, count=1)


@gluon.jit
def double(x_ptr, out_ptr, num_blocks, ARRIVALS: gl.constexpr, COUNT: gl.constexpr, WRITER_AWAITS: gl.constexpr,
           READER_AWAITS: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Blocks of 16 through one buffer."""
    buf = gl.allocate_shared_memory(gl.float32, [BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=ARRIVALS)
    mbarrier.init(empty, count=1)
    gl.warp_specialize(
        [
            (_read, (out_ptr, buf, full, empty, num_blocks, READER_AWAITS)),
            (_write, (x_ptr, buf, full, empty, num_blocks, COUNT, WRITER_AWAITS)),
        ],
        [1],
        [40],
    )


def run_double(x: torch.Tensor, **changes: Any) -> torch.Tensor:
    out = torch.full_like(x, torch.nan)
    constants = {"ARRIVALS": 32, "COUNT": 1, "WRITER_AWAITS": True, "READER_AWAITS": True}
    Emulated(double)[(1,)](x, out, x.numel() // 16, **constants | changes)
    return out


@pytest.fixture(params=range(6), autouse=True)
def _orders(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emulated, "seeds", itertools.count(1000 * request.param))


def fails_in_some_order(x: torch.Tensor, **changes: Any) -> bool:
    """It gives wrong numbers or stops with an error."""
    try:
        return any(not torch.equal(run_double(x, **changes), 2 * x) for _ in range(20))
    except RuntimeError:
        return True


def test_a_right_pipeline() -> None:
    x = torch.randn(160)
    for _ in range(20):
        assert torch.equal(run_double(x), 2 * x)


def test_reading_before_it_is_there() -> None:
    assert fails_in_some_order(torch.randn(160), READER_AWAITS=False)


def test_writing_before_it_was_read() -> None:
    assert fails_in_some_order(torch.randn(160), WRITER_AWAITS=False)


def test_waiting_for_ever() -> None:
    with pytest.raises(Deadlock, match=r"_read 0 waits for parity 0 of a barrier of 33; _write 1 waits for"):
        run_double(torch.randn(32), ARRIVALS=33)


def test_an_arrival_too_many() -> None:
    with pytest.raises(RuntimeError, match="1 arrivals more than the 32"):
        run_double(torch.randn(32), COUNT=2)


def test_an_address_outside() -> None:
    out = torch.zeros(16)
    with pytest.raises(IndexError, match="of a storage of 16"):
        Emulated(double)[(1,)](torch.randn(32), out, 2, ARRIVALS=32, COUNT=1, WRITER_AWAITS=True, READER_AWAITS=True)


@gluon.jit
def multiply(a_ptr, b_ptr, out_ptr, FENCED: gl.constexpr, EARLY: gl.constexpr, num_warps: gl.constexpr):
    """[64, 64] products; EARLY writes over b before the product is done."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, layout)).expand_dims(1)
    n = gl.arange(0, 64, layout=gl.SliceLayout(0, layout)).expand_dims(0)
    offsets = m * 64 + n
    a = gl.allocate_shared_memory(gl.float16, [64, 64], shared)
    b = gl.allocate_shared_memory(gl.float16, [64, 64], shared)
    a.store(gl.load(a_ptr + offsets))
    b.store(gl.load(b_ptr + offsets))
    if FENCED:
        fence_async_shared()
    product = warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, sums), is_async=True)
    if EARLY:
        b.store(gl.zeros([64, 64], gl.float16, layout))
        fence_async_shared()
    product = warpgroup_mma_wait(0, (product,))
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, sums)).expand_dims(1)
    n = gl.arange(0, 64, layout=gl.SliceLayout(0, sums)).expand_dims(0)
    gl.store(out_ptr + (m * 64 + n), product)


def run_multiply(a: torch.Tensor, b: torch.Tensor, fenced: bool = True, early: bool = False) -> torch.Tensor:
    out = torch.empty(64, 64)
    Emulated(multiply)[(1,)](a, b, out, FENCED=fenced, EARLY=early)
    return out


def test_a_product() -> None:
    a, b = torch.randn(2, 64, 64, dtype=torch.float16)
    assert torch.equal(run_multiply(a, b), a.float() @ b.float())


def test_a_product_of_what_was_not_fenced() -> None:
    with pytest.raises(RuntimeError, match="without fence_async_shared"):
        run_multiply(*torch.randn(2, 64, 64, dtype=torch.float16), fenced=False)


def test_a_product_whose_operand_is_overwritten() -> None:
    a, b = torch.randn(2, 64, 64, dtype=torch.float16)
    assert any(not torch.equal(run_multiply(a, b, early=True), a.float() @ b.float()) for _ in range(20))


@gluon.jit
def arithmetic(out_ptr, a, b, num_warps: gl.constexpr):
    gl.store(out_ptr, a // b)
    gl.store(out_ptr + 1, a % b)
    gl.store(out_ptr + 2, gl.where(a > b, a * b, b))


def test_integers() -> None:
    out = torch.zeros(3, dtype=torch.int64)
    Emulated(arithmetic)[(1,)](out, -7, 2)
    assert out.tolist() == [-3, -1, 2], "division is towards zero"
    with pytest.raises(OverflowError, match="int32"):
        Emulated(arithmetic)[(1,)](out, 1 << 20, 1 << 15)
    Emulated(arithmetic)[(1,)](out, 1 << 40, 3)
    assert out[2] == 3 << 40


@pytest.mark.parametrize("width", [32, 64, 128])
def test_swizzles_keep_what_they_hold(width: int) -> None:
    """Panels [.., rows, width] and the wide buffer [.., rows, columns] are the same bytes, in any type."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=16, rank=2)
    columns = width // 2
    panels = Buffer.allocate(gl.float16, [2 * 3, 16, columns], layout)
    wide = panels._reinterpret(gl.float16, [3, 16, 2 * columns], layout)
    values = torch.randn(16, 2 * columns, dtype=torch.float16)
    wide.index(1).write(values)
    assert torch.equal(panels.index(2).load().data, values[:, :columns])
    assert torch.equal(panels.index(3).load().data, values[:, columns:])
    bytes_layout = gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8, rank=2)
    codes = panels._reinterpret(gl.float8e4nv, [3, 16, 4 * columns], bytes_layout)
    assert torch.equal(codes.index(1).load().data.view(torch.int16), values.view(torch.int16))
    assert wide.offsets.unique().numel() == wide.offsets.numel()

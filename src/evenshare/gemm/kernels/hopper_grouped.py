"""Grouped GEMM for Hopper (sm_90): the roles of hopper_matmul.py over the row tiles of all groups, which `row_tiles` has written down.

How many tiles there are is read on the device, so is whether the last of them are cut. A tile's rows may end within it: TMA loads the
next group's with them, whose products nobody stores, and writes whole tiles alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from evenshare.device.gluon import halves, next_stage
from evenshare.device.groups import deal
from evenshare.device.partials import arrive, merge, store_partial
from evenshare.device.segments import next_segment, partial_slot, share_begin
from evenshare.gemm.kernels.hopper_tile import coordinates, parts_of_64, stage_before, store_columns

PANEL = gl.constexpr(64)  # 16-bit numbers of the widest swizzle, 128 bytes; and the k of a step
CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # of a consumer


@gluon.jit
def _produce(a, b, table_ptr, n, worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail, a_bufs, b_bufs, full, empty,
             GATED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """One warp. Of a gated product a tile takes half its columns from each half of a group's."""
    PARTS: gl.constexpr = 2 if GATED else 1
    COLUMNS: gl.constexpr = BLOCK_N // PARTS
    stage = 0
    phase = 1
    tile = worker
    position = share_begin(worker, tail, num_workers)
    share_end = gl.minimum(share_begin(worker + 1, tail, num_workers), tail)  # there are more workers than shares
    while (tile < num_whole) | (position < share_end):
        current, begin, end, _s, tile, position = next_segment(
            tile, position, share_end, iters_per_tile, num_whole, num_workers
        )
        tile_m, tile_n = coordinates(current, tiles_m, tiles_n)
        row = gl.load(table_ptr + tile_m * 4 + 1)
        column = gl.load(table_ptr + tile_m * 4) * (n * PARTS) + tile_n * COLUMNS
        for step in range(begin, end):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, (CONSUMERS * ROWS + BLOCK_N) * PANEL * 2)
            for i in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(
                    a, [row + i * ROWS, step * PANEL], bar, a_bufs.index(stage * CONSUMERS + i)
                )
            for part in gl.static_range(PARTS):
                tma.async_copy_global_to_shared(
                    b, [column + part * n, step * PANEL], bar, b_bufs.index(stage * PARTS + part)
                )
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _consume(number: gl.constexpr, out, out_ptr, bias_ptr, table_ptr, partials_ptr, counters_ptr, n, stride_out_m, stride_out_n,
             worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail, a_bufs, b_bufs, out_bufs, full, empty,
             ACTIVATION: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    COLUMNS: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    SLOT: gl.constexpr = CONSUMERS * ROWS * BLOCK_N
    AT_ONCE: gl.constexpr = 2 if BLOCK_N == 256 else 4
    stage = 0
    phase = 0
    tile = worker
    own_begin = share_begin(worker, tail, num_workers)  # with it, `partial_slot` of this worker needs no division
    position = own_begin
    share_end = gl.minimum(share_begin(worker + 1, tail, num_workers), tail)
    while (tile < num_whole) | (position < share_end):
        current, begin, end, split_tile, tile, position = next_segment(
            tile, position, share_end, iters_per_tile, num_whole, num_workers
        )
        tile_m, tile_n = coordinates(current, tiles_m, tiles_n)
        # Needed after the sum; they arrive meanwhile.
        group = gl.load(table_ptr + tile_m * 4)
        row = gl.load(table_ptr + tile_m * 4 + 1) + number * ROWS
        row_end = gl.load(table_ptr + tile_m * 4 + 2)
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
        for step in range(begin, end):
            mbarrier.wait(full.index(stage), phase)
            left = a_bufs.index(stage * CONSUMERS + number)
            token = warpgroup_mma(left, b_bufs.index(stage).permute([1, 0]), acc, use_acc=step > begin, is_async=True)
            acc = warpgroup_mma_wait(1, (token,))
            if step > begin:
                mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
            stage, phase = next_stage(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, (acc,))
        if begin < end:
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
        complete = end - begin == iters_per_tile
        if not complete:
            tile_begin = split_tile * iters_per_tile
            slot = (worker * 2 + (own_begin < tile_begin).to(gl.int32)).to(gl.int64)
            own_partials_ptr = partials_ptr + number * ROWS * BLOCK_N  # of this consumer's rows
            store_partial(own_partials_ptr + slot * SLOT, acc)
            counter_ptr = counters_ptr + split_tile * CONSUMERS + number
            complete, first, last = arrive(counter_ptr, tile_begin, iters_per_tile, tail, num_workers)
            if complete:
                first_slot = partial_slot(first, tile_begin, tail, num_workers)
                acc = merge(acc, own_partials_ptr, first, last, first_slot, SLOT, AT_ONCE)
        if complete:
            if GATED:
                gate, up = halves(acc)
                parts = parts_of_64(gate)
                ups = parts_of_64(up)
            else:
                parts = parts_of_64(acc)
                ups = parts
            bias = bias_ptr
            if bias_ptr is not None:
                bias = bias_ptr + group.to(gl.int64) * (2 * n if GATED else n)
            if out is not None:
                if row + ROWS <= row_end:
                    store_columns(out, None, None, 0, None, 0, bias, None, out_bufs.index(number), parts, ups, 1.0, 1.0, row, tile_n * COLUMNS,
                                  row_end, n, stride_out_m, stride_out_n, 0, 0, ACTIVATION, GATED, COLUMNS)  # fmt: skip
                else:
                    store_columns(None, out_ptr, None, 0, None, 0, bias, None, None, parts, ups, 1.0, 1.0, row, tile_n * COLUMNS,
                                  row_end, n, stride_out_m, stride_out_n, 0, 0, ACTIVATION, GATED, COLUMNS)  # fmt: skip
            else:
                store_columns(None, out_ptr, None, 0, None, 0, bias, None, None, parts, ups, 1.0, 1.0, row, tile_n * COLUMNS,
                              row_end, n, stride_out_m, stride_out_n, 0, 0, ACTIVATION, GATED, COLUMNS)  # fmt: skip
    if out is not None:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["max_workers", "iters_per_tile", "min_steps", "cut_steps"])
def grouped_matmul(a, b, out, out_ptr, bias_ptr, table_ptr, partials_ptr, counters_ptr, n, stride_out_m, stride_out_n,
                   max_workers, iters_per_tile, min_steps, cut_steps,
                   ACTIVATION: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """One of max_workers workers. n: columns of out, of which each group of b has twice as many if GATED. bias [groups, columns of b].

    A share has min_steps k-steps at least; the last tiles are cut where that saves more than cut_steps. TMA descriptors: a, of [m, k] in
    boxes [64, 64]; b, of [groups * columns, k] in boxes [columns of a tile, or half if GATED, 64]; out, of [m, n] in boxes [64, columns of
    a tile], or None.
    """
    COLUMNS: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    element: gl.constexpr = a.dtype
    a_bufs = gl.allocate_shared_memory(element, [STAGES * CONSUMERS, ROWS, PANEL], swizzled)
    b_panels = gl.allocate_shared_memory(element, [STAGES * BLOCK_N // COLUMNS, COLUMNS, PANEL], swizzled)
    b_bufs = b_panels._reinterpret(element, [STAGES, BLOCK_N, PANEL], swizzled)
    out_bufs = a_bufs
    if out is not None:
        out_bufs = gl.allocate_shared_memory(out.dtype, [CONSUMERS, ROWS, COLUMNS], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # the kernel before, which may write what this one reads or use the same workspace, ends here
    worker = gl.program_id(0)
    tiles_m = gl.load(table_ptr + 3)
    tiles_n = (n + COLUMNS - 1) // COLUMNS
    num_tiles = tiles_m * tiles_n
    num_workers, num_whole = deal(num_tiles, iters_per_tile, min_steps, max_workers)
    even_steps = (num_tiles.to(gl.int64) * iters_per_tile // num_workers).to(gl.int32)
    most_steps = (num_tiles + num_workers - 1) // num_workers * iters_per_tile
    num_whole = gl.where(most_steps <= even_steps + cut_steps, num_tiles, num_whole)
    tail = (num_tiles - num_whole) * iters_per_tile
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (FIRST, out, out_ptr, bias_ptr, table_ptr, partials_ptr, counters_ptr, n, stride_out_m, stride_out_n,
                        worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail, a_bufs, b_bufs, out_bufs, full, empty,
                        ACTIVATION, GATED, BLOCK_N, STAGES)),
            (_consume, (SECOND, out, out_ptr, bias_ptr, table_ptr, partials_ptr, counters_ptr, n, stride_out_m, stride_out_n,
                        worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail, a_bufs, b_bufs, out_bufs, full, empty,
                        ACTIVATION, GATED, BLOCK_N, STAGES)),
            (_produce, (a, b, table_ptr, n, worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail,
                        a_bufs, b_panels, full, empty, GATED, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip

"""Stream-K GEMM of fp8 codes and their scales for Hopper (sm_90): the walk and the roles of hopper_matmul.py.

The tensor cores sum fp8 products with some 14 bits of mantissa, so a consumer takes their sums over every step of 128 of k into float32
registers (arXiv 2412.19437, section 3.3.2), and multiplies them by the step's scales on the way where these change along k. Sums and
what they are added to do not both fit for 256 columns: a tile of those has two parts, one product after the other. While one consumer
adds, the other one multiplies. A gated tile has two parts as well, the gate's columns and those of up.

wgmma takes fp8 operands whose k is contiguous and no others.
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

from evenshare.device.gluon import next_stage
from evenshare.device.partials import arrive, merge, store_partial
from evenshare.device.segments import next_segment, partial_slot, share_begin
from evenshare.gemm.kernels.hopper_tile import coordinates, parts_of_64, store_columns

PANEL = gl.constexpr(128)  # fp8 numbers of the widest swizzle; the k of a step, and what shares a scale


@gluon.jit
def _produce(a, b, n, worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail, a_bufs, b_bufs, full, empty,
             GATED: gl.constexpr, CONSUMERS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """One warp."""
    ROWS: gl.constexpr = a_bufs.shape[1]
    WIDTH: gl.constexpr = b_bufs.shape[1]
    stage = 0
    phase = 1
    tile = worker
    position = share_begin(worker, tail, num_workers)
    share_end = share_begin(worker + 1, tail, num_workers)
    while (tile < num_whole) | (position < share_end):
        current, begin, end, _s, tile, position = next_segment(
            tile, position, share_end, iters_per_tile, num_whole, num_workers
        )
        tile_m, tile_n = coordinates(current, tiles_m, tiles_n)
        for step in range(begin, end):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, (CONSUMERS * ROWS + PARTS * WIDTH) * PANEL)
            for i in gl.static_range(CONSUMERS):
                row = (tile_m * CONSUMERS + i) * ROWS
                tma.async_copy_global_to_shared(a, [row, step * PANEL], bar, a_bufs.index(stage * CONSUMERS + i))
            for part in gl.static_range(PARTS):
                column = tile_n * WIDTH + part * n if GATED else (tile_n * PARTS + part) * WIDTH
                tma.async_copy_global_to_shared(b, [column, step * PANEL], bar, b_bufs.index(stage * PARTS + part))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _consume(number: gl.constexpr, out, out_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, partials_ptr, counters_ptr, alpha, m, n,
             stride_scale_a_m, stride_scale_a_k, stride_scale_b_k, stride_scale_b_n,
             stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
             worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail, a_bufs, b_bufs, out_bufs, full, empty,
             A_BLOCKS: gl.constexpr, B_BLOCKS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
             CONSUMERS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Four warps: 64 rows of every tile."""
    ROWS: gl.constexpr = a_bufs.shape[1]
    WIDTH: gl.constexpr = b_bufs.shape[1]
    PART: gl.constexpr = ROWS * WIDTH
    SLOT: gl.constexpr = CONSUMERS * PARTS * PART
    COLUMNS: gl.constexpr = WIDTH if GATED else PARTS * WIDTH  # of out
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    inner = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns_b = 2 * n if GATED else n
    stage = 0
    phase = 0
    tile = worker
    own_begin = share_begin(worker, tail, num_workers)  # with it, `partial_slot` of this worker needs no division
    position = own_begin
    share_end = share_begin(worker + 1, tail, num_workers)
    while (tile < num_whole) | (position < share_end):
        current, begin, end, split_tile, tile, position = next_segment(
            tile, position, share_end, iters_per_tile, num_whole, num_workers
        )
        tile_m, tile_n = coordinates(current, tiles_m, tiles_n)
        row = (tile_m * CONSUMERS + number) * ROWS
        rows = row + inner
        # Of each part: its first column of b, and the block of columns that it lies in.
        first_column = tile_n * COLUMNS
        second_column = first_column + (n if GATED else WIDTH)
        first_block = gl.minimum(first_column, columns_b - 1) // PANEL
        second_block = gl.minimum(second_column, columns_b - 1) // PANEL
        first_acc = gl.zeros([ROWS, WIDTH], gl.float32, layout)
        second_acc = first_acc
        for step in range(begin, end):
            first_scale = 1.0
            second_scale = 1.0
            if B_BLOCKS:
                scale_b_ptrs = scale_b_ptr + step.to(gl.int64) * stride_scale_b_k
                first_scale = gl.load(scale_b_ptrs + first_block.to(gl.int64) * stride_scale_b_n)
                if PARTS == 2:
                    second_scale = gl.load(scale_b_ptrs + second_block.to(gl.int64) * stride_scale_b_n)
            if A_BLOCKS:
                at = rows.to(gl.int64) * stride_scale_a_m + step.to(gl.int64) * stride_scale_a_k
                scale_a = gl.load(scale_a_ptr + at, mask=rows < m, other=0.0).expand_dims(1)
                first_scale = scale_a * first_scale
                second_scale = scale_a * second_scale
            mbarrier.wait(full.index(stage), phase)
            left = a_bufs.index(stage * CONSUMERS + number)
            right = b_bufs.index(stage * PARTS).permute([1, 0])
            product = warpgroup_mma(left, right, first_acc, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, (product,))
            if PARTS == 1:
                mbarrier.arrive(empty.index(stage), count=1)
            first_acc += product * first_scale
            if PARTS == 2:
                right = b_bufs.index(stage * PARTS + 1).permute([1, 0])
                product = warpgroup_mma(left, right, product, use_acc=False, is_async=True)
                product = warpgroup_mma_wait(0, (product,))
                mbarrier.arrive(empty.index(stage), count=1)
                second_acc += product * second_scale
            stage, phase = next_stage(stage, phase, STAGES)
        complete = end - begin == iters_per_tile
        if not complete:
            tile_begin = split_tile * iters_per_tile
            slot = (worker * 2 + (own_begin < tile_begin).to(gl.int32)).to(gl.int64)
            own_partials_ptr = partials_ptr + number * PARTS * PART
            store_partial(own_partials_ptr + slot * SLOT, first_acc)
            if PARTS == 2:
                store_partial(own_partials_ptr + PART + slot * SLOT, second_acc)
            counter_ptr = counters_ptr + split_tile * CONSUMERS + number
            complete, first, last = arrive(counter_ptr, tile_begin, iters_per_tile, tail, num_workers)
            if complete:
                first_slot = partial_slot(first, tile_begin, tail, num_workers)
                first_acc = merge(first_acc, own_partials_ptr, first, last, first_slot, SLOT, 2)
                if PARTS == 2:
                    second_acc = merge(second_acc, own_partials_ptr + PART, first, last, first_slot, SLOT, 2)
        if complete:
            parts = parts_of_64(first_acc)
            ups = parts
            if GATED:
                ups = parts_of_64(second_acc)
            elif PARTS == 2:
                parts = parts + parts_of_64(second_acc)
            store_columns(out, out_ptr, None if A_BLOCKS else scale_a_ptr, stride_scale_a_m, None if B_BLOCKS else scale_b_ptr,
                          stride_scale_b_n, bias_ptr, residual_ptr, out_bufs.index(number), parts, ups, alpha, 1.0, row, first_column, m, n, stride_out_m, stride_out_n, stride_residual_m, stride_residual_n, ACTIVATION, GATED, COLUMNS)  # fmt: skip
    if out is not None:
        tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        *("alpha", "m", "stride_scale_a_m", "stride_scale_a_k", "stride_scale_b_k", "stride_scale_b_n"),
        *("num_workers", "num_tiles", "iters_per_tile", "num_whole"),
    ]
)
def scaled_matmul(a, b, out, out_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, partials_ptr, counters_ptr, alpha, m, n,
                  stride_scale_a_m, stride_scale_a_k, stride_scale_b_k, stride_scale_b_n,
                  stride_out_m, stride_out_n, stride_residual_m, stride_residual_n, num_workers, num_tiles, iters_per_tile, num_whole,
                  A_BLOCKS: gl.constexpr, B_BLOCKS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
                  BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
                  num_warps: gl.constexpr):  # fmt: skip
    """One worker: its whole tiles, then its share of the tail. n: columns of out, of which b has twice as many if GATED, and then whole
    blocks of scales if B_BLOCKS. Pointers to scales may be None.

    TMA descriptors: a, of [m, k] in boxes [rows of a consumer, 128]; b, of [columns, k] in boxes [columns of a part, 128]; out, of [m, n]
    in boxes [rows of a consumer, columns of a tile], or None: then out_ptr is written.
    """
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    PARTS: gl.constexpr = 2 if GATED or BLOCK_N == 256 else 1
    WIDTH: gl.constexpr = BLOCK_N // PARTS
    COLUMNS: gl.constexpr = WIDTH if GATED else BLOCK_N
    codes: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    a_bufs = gl.allocate_shared_memory(a.dtype, [STAGES * CONSUMERS, ROWS, PANEL], codes)
    b_bufs = gl.allocate_shared_memory(b.dtype, [STAGES * PARTS, WIDTH, PANEL], codes)
    out_bufs = a_bufs
    if out is not None:
        swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
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
    tiles_m = (m + BLOCK_M - 1) // BLOCK_M
    tiles_n = (n + COLUMNS - 1) // COLUMNS
    tail = (num_tiles - num_whole) * iters_per_tile
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (FIRST, out, out_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, partials_ptr, counters_ptr, alpha, m, n,
                            stride_scale_a_m, stride_scale_a_k, stride_scale_b_k, stride_scale_b_n,
                            stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                            worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail, a_bufs, b_bufs, out_bufs, full, empty,
                            A_BLOCKS, B_BLOCKS, ACTIVATION, GATED, CONSUMERS, PARTS, STAGES)),
                (_consume, (SECOND, out, out_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, partials_ptr, counters_ptr, alpha, m, n,
                            stride_scale_a_m, stride_scale_a_k, stride_scale_b_k, stride_scale_b_n,
                            stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                            worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail, a_bufs, b_bufs, out_bufs, full, empty,
                            A_BLOCKS, B_BLOCKS, ACTIVATION, GATED, CONSUMERS, PARTS, STAGES)),
                (_produce, (a, b, n, worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail, a_bufs, b_bufs, full, empty,
                            GATED, CONSUMERS, PARTS, STAGES)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (FIRST, out, out_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, partials_ptr, counters_ptr, alpha, m, n,
                            stride_scale_a_m, stride_scale_a_k, stride_scale_b_k, stride_scale_b_n,
                            stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                            worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail, a_bufs, b_bufs, out_bufs, full, empty,
                            A_BLOCKS, B_BLOCKS, ACTIVATION, GATED, CONSUMERS, PARTS, STAGES)),
                (_produce, (a, b, n, worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail, a_bufs, b_bufs, full, empty,
                            GATED, CONSUMERS, PARTS, STAGES)),
            ],
            [1],
            [40],
        )  # fmt: skip

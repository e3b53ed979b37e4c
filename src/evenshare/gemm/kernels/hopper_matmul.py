"""Stream-K GEMM for Hopper (sm_90): one persistent worker an SM walks the tiles of a `UniformPlan` (arXiv 2301.03598, section 5.2).

A producer streams k-steps of both operands by TMA into a ring of STAGES buffers and runs ahead over the borders of tiles. Each consumer
owns ROWS rows of the tile: it keeps one product in flight behind the one it issues, hands in or merges the partials of its own rows, and
leaves the output to TMA, which writes it while the next tile is summed.

An operand lies in shared memory as it does in memory, so either of its dimensions may be the contiguous one.
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
from evenshare.device.partials import arrive, merge, store_partial
from evenshare.device.segments import next_segment, partial_slot, share_begin
from evenshare.gemm.kernels.hopper_tile import coordinates, parts_of_64, stage_before, store_columns

PANEL = gl.constexpr(64)  # 16-bit numbers of the widest swizzle, 128 bytes; and the k of a step


@gluon.jit
def _load(
    operand,
    first,
    step,
    bar,
    panels,
    stage,
    K_MAJOR: gl.constexpr,
    SIZE: gl.constexpr,
    at: gl.constexpr,
    TOTAL: gl.constexpr,
):
    """SIZE rows or columns of an operand from `first` on, into a stage's panels from `at` on; a stage has TOTAL of them."""
    if K_MAJOR:
        PARTS: gl.constexpr = SIZE // panels.shape[1]
        for part in gl.static_range(PARTS):
            panel = panels.index(stage * (TOTAL // panels.shape[1]) + at // panels.shape[1] + part)
            tma.async_copy_global_to_shared(operand, [first + part * panels.shape[1], step * PANEL], bar, panel)
    else:
        for part in gl.static_range(SIZE // PANEL):
            panel = panels.index(stage * (TOTAL // PANEL) + at // PANEL + part)
            tma.async_copy_global_to_shared(operand, [step * PANEL, first + part * PANEL], bar, panel)


@gluon.jit
def _produce(a, b, n, worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail, a_panels, b_panels, full, empty,
             A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, GATED: gl.constexpr,
             BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """One warp. Of a gated product a tile takes half its columns from each half of b."""
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
            mbarrier.expect(bar, (BLOCK_M + BLOCK_N) * PANEL * 2)
            _load(a, tile_m * BLOCK_M, step, bar, a_panels, stage, A_K_MAJOR, BLOCK_M, 0, BLOCK_M)
            if GATED:
                HALF: gl.constexpr = BLOCK_N // 2
                _load(b, tile_n * HALF, step, bar, b_panels, stage, B_K_MAJOR, HALF, 0, BLOCK_N)
                _load(b, n + tile_n * HALF, step, bar, b_panels, stage, B_K_MAJOR, HALF, HALF, BLOCK_N)
            else:
                _load(b, tile_n * BLOCK_N, step, bar, b_panels, stage, B_K_MAJOR, BLOCK_N, 0, BLOCK_N)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _consume(number: gl.constexpr, out, out_ptr, bias_ptr, residual_ptr, partials_ptr, counters_ptr, alpha, beta, m, n,
             stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
             worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail,
             a_bufs, b_bufs, out_bufs, full, empty,
             A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
             BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    COLUMNS: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    SLOT: gl.constexpr = BLOCK_M * BLOCK_N
    AT_ONCE: gl.constexpr = 2 if BLOCK_N == 256 else 4
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
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
        for step in range(begin, end):
            mbarrier.wait(full.index(stage), phase)
            if A_K_MAJOR:
                left = a_bufs.index(stage * CONSUMERS + number)
            else:
                left = a_bufs.index(stage * CONSUMERS + number).permute([1, 0])
            if B_K_MAJOR:
                right = b_bufs.index(stage).permute([1, 0])
            else:
                right = b_bufs.index(stage)
            token = warpgroup_mma(left, right, acc, use_acc=step > begin, is_async=True)
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
            row = tile_m * BLOCK_M + number * ROWS
            store_columns(out, out_ptr, None, 0, None, 0, bias_ptr, residual_ptr, out_bufs.index(number), parts, ups, alpha, beta,
                          row, tile_n * COLUMNS, m, n, stride_out_m, stride_out_n, stride_residual_m, stride_residual_n, ACTIVATION, GATED, COLUMNS)  # fmt: skip
    if out is not None:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["alpha", "beta", "num_workers", "num_tiles", "iters_per_tile", "num_whole"])
def matmul(a, b, out, out_ptr, bias_ptr, residual_ptr, partials_ptr, counters_ptr, alpha, beta, m, n,
           stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
           num_workers, num_tiles, iters_per_tile, num_whole,
           A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
           BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """One worker: its whole tiles, then its share of the tail. n: columns of out, of which b has twice as many if GATED.

    TMA descriptors: a, of [m, k] in boxes [rows of a consumer, 64], or of [k, m] in boxes [64, 64]; b, of [columns, k] in boxes [columns of
    a tile, or half if GATED, 64], or of [k, columns] in boxes [64, 64]; out, of [m, n] in boxes [rows of a consumer, columns of a tile], or
    None: then out_ptr is written.
    """
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    COLUMNS: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    element: gl.constexpr = a.dtype
    if A_K_MAJOR:
        a_panels = gl.allocate_shared_memory(element, [STAGES * CONSUMERS, ROWS, PANEL], swizzled)
        a_bufs = a_panels
    else:
        a_panels = gl.allocate_shared_memory(element, [STAGES * BLOCK_M // PANEL, PANEL, PANEL], swizzled)
        a_bufs = a_panels._reinterpret(element, [STAGES * CONSUMERS, PANEL, ROWS], swizzled)
    if B_K_MAJOR:
        b_panels = gl.allocate_shared_memory(element, [STAGES * BLOCK_N // COLUMNS, COLUMNS, PANEL], swizzled)
        b_bufs = b_panels._reinterpret(element, [STAGES, BLOCK_N, PANEL], swizzled)
    else:
        b_panels = gl.allocate_shared_memory(element, [STAGES * BLOCK_N // PANEL, PANEL, PANEL], swizzled)
        b_bufs = b_panels._reinterpret(element, [STAGES, PANEL, BLOCK_N], swizzled)
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
    tiles_m = (m + BLOCK_M - 1) // BLOCK_M
    tiles_n = (n + COLUMNS - 1) // COLUMNS
    tail = (num_tiles - num_whole) * iters_per_tile
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (FIRST, out, out_ptr, bias_ptr, residual_ptr, partials_ptr, counters_ptr, alpha, beta, m, n,
                            stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                            worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail,
                            a_bufs, b_bufs, out_bufs, full, empty, A_K_MAJOR, B_K_MAJOR, ACTIVATION, GATED,
                            BLOCK_M, BLOCK_N, CONSUMERS, STAGES)),
                (_consume, (SECOND, out, out_ptr, bias_ptr, residual_ptr, partials_ptr, counters_ptr, alpha, beta, m, n,
                            stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                            worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail,
                            a_bufs, b_bufs, out_bufs, full, empty, A_K_MAJOR, B_K_MAJOR, ACTIVATION, GATED,
                            BLOCK_M, BLOCK_N, CONSUMERS, STAGES)),
                (_produce, (a, b, n, worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail,
                            a_panels, b_panels, full, empty, A_K_MAJOR, B_K_MAJOR, GATED, BLOCK_M, BLOCK_N, STAGES)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (FIRST, out, out_ptr, bias_ptr, residual_ptr, partials_ptr, counters_ptr, alpha, beta, m, n,
                            stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                            worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail,
                            a_bufs, b_bufs, out_bufs, full, empty, A_K_MAJOR, B_K_MAJOR, ACTIVATION, GATED,
                            BLOCK_M, BLOCK_N, CONSUMERS, STAGES)),
                (_produce, (a, b, n, worker, num_workers, tiles_m, tiles_n, iters_per_tile, num_whole, tail,
                            a_panels, b_panels, full, empty, A_K_MAJOR, B_K_MAJOR, GATED, BLOCK_M, BLOCK_N, STAGES)),
            ],
            [1],
            [40],
        )  # fmt: skip

"""Stream-K GEMM of few rows for Hopper (sm_90), the products of decoding: outᵀ = bᵀ aᵀ, so that columns of b fill the 64 rows of wgmma
and the rows of a are its N.

What counts is to read b once, at the speed of the memory. A producer streams steps of 128 of k into as many stages as shared memory holds,
and runs ahead over the borders of tiles and through what follows a sum; one consumer keeps a product in flight. A tile is one strip of 64
columns of b or two, of a gated product one of the gate's and one of up's. Partials are small, so tiles are cut freely.
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
from evenshare.gemm.kernels.hopper_tile import stage_before

PANEL = gl.constexpr(64)  # 16-bit numbers of the widest swizzle, 128 bytes
STEP = gl.constexpr(128)  # of k
STRIP = gl.constexpr(64)  # columns of b: the rows of wgmma


@gluon.jit
def _produce(a, b, n, worker, num_workers, iters_per_tile, num_whole, tail, a_panels, b_panels, full, empty,
             B_K_MAJOR: gl.constexpr, GATED: gl.constexpr, STRIPS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """One warp."""
    stage = 0
    phase = 1
    tile = worker
    position = share_begin(worker, tail, num_workers)
    share_end = share_begin(worker + 1, tail, num_workers)
    while (tile < num_whole) | (position < share_end):
        current, begin, end, _s, tile, position = next_segment(
            tile, position, share_end, iters_per_tile, num_whole, num_workers
        )
        for step in range(begin, end):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, (STRIPS * STRIP + BLOCK_M) * STEP * 2)
            for strip in gl.static_range(STRIPS):
                column = current * STRIP + strip * n if GATED else (current * STRIPS + strip) * STRIP
                if B_K_MAJOR:
                    for half in gl.static_range(2):
                        panel = b_panels.index((stage * STRIPS + strip) * 2 + half)
                        tma.async_copy_global_to_shared(b, [column, step * STEP + half * PANEL], bar, panel)
                else:
                    tma.async_copy_global_to_shared(
                        b, [step * STEP, column], bar, b_panels.index(stage * STRIPS + strip)
                    )
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    a, [0, step * STEP + half * PANEL], bar, a_panels.index(stage * 2 + half)
                )
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _biased(x, bias_ptr, columns, is_column, first):
    if bias_ptr is not None:
        x += gl.load(bias_ptr + first + columns, mask=is_column, other=0.0).to(gl.float32).expand_dims(1)
    return x


@gluon.jit
def _store(out_ptr, bias_ptr, residual_ptr, acc, up, alpha, beta, column, m, n, stride_out_m, stride_out_n,
           stride_residual_m, stride_residual_n, ACTIVATION: gl.constexpr, GATED: gl.constexpr):  # fmt: skip
    """As `device.epilogue.store_tile`, transposed: acc [columns of out from `column` on, rows of out]; up: what they are multiplied by."""
    layout: gl.constexpr = acc.type.layout
    columns = column + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    rows = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    is_column = columns < n
    y = ACTIVATION(_biased(acc * alpha, bias_ptr, columns, is_column, 0))
    if GATED:
        y *= _biased(up * alpha, bias_ptr, columns, is_column, n)
    mask = is_column.expand_dims(1) & (rows < m).expand_dims(0)
    columns = columns.to(gl.int64).expand_dims(1)
    rows = rows.to(gl.int64).expand_dims(0)
    if residual_ptr is not None:
        offsets = rows * stride_residual_m + columns * stride_residual_n
        y += beta * gl.load(residual_ptr + offsets, mask=mask, other=0.0).to(gl.float32)
    gl.store(out_ptr + rows * stride_out_m + columns * stride_out_n, y.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _consume(out_ptr, bias_ptr, residual_ptr, partials_ptr, counters_ptr, alpha, beta, m, n,
             stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
             worker, num_workers, iters_per_tile, num_whole, tail, a_bufs, b_bufs, full, empty,
             B_K_MAJOR: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
             STRIPS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Four warps."""
    PART: gl.constexpr = STRIP * BLOCK_M
    SLOT: gl.constexpr = STRIPS * PART
    AT_ONCE: gl.constexpr = min(16, 128 // BLOCK_M)  # partials that are read together, into 64 registers at most
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16]
    )
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
        first_acc = gl.zeros([STRIP, BLOCK_M], gl.float32, layout)
        second_acc = first_acc
        for step in range(begin, end):
            mbarrier.wait(full.index(stage), phase)
            right = a_bufs.index(stage).permute([1, 0])
            left = b_bufs.index(stage * STRIPS)
            if not B_K_MAJOR:
                left = left.permute([1, 0])
            first_token = warpgroup_mma(left, right, first_acc, use_acc=step > begin, is_async=True)
            if STRIPS == 2:
                left = b_bufs.index(stage * STRIPS + 1)
                if not B_K_MAJOR:
                    left = left.permute([1, 0])
                second_token = warpgroup_mma(left, right, second_acc, use_acc=step > begin, is_async=True)
                first_acc, second_acc = warpgroup_mma_wait(2, (first_token, second_token))
            else:
                first_acc = warpgroup_mma_wait(1, (first_token,))
            if step > begin:
                mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
            stage, phase = next_stage(stage, phase, STAGES)
        if STRIPS == 2:
            first_acc, second_acc = warpgroup_mma_wait(0, (first_acc, second_acc))
        else:
            first_acc = warpgroup_mma_wait(0, (first_acc,))
        if begin < end:
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
        complete = end - begin == iters_per_tile
        if not complete:
            tile_begin = split_tile * iters_per_tile
            slot = (worker * 2 + (own_begin < tile_begin).to(gl.int32)).to(gl.int64)
            store_partial(partials_ptr + slot * SLOT, first_acc)
            if STRIPS == 2:
                store_partial(partials_ptr + PART + slot * SLOT, second_acc)
            complete, first, last = arrive(counters_ptr + split_tile, tile_begin, iters_per_tile, tail, num_workers)
            if complete:
                first_slot = partial_slot(first, tile_begin, tail, num_workers)
                first_acc = merge(first_acc, partials_ptr, first, last, first_slot, SLOT, AT_ONCE)
                if STRIPS == 2:
                    second_acc = merge(second_acc, partials_ptr + PART, first, last, first_slot, SLOT, AT_ONCE)
        if complete:
            column = current * (STRIP if GATED else STRIPS * STRIP)
            _store(out_ptr, bias_ptr, residual_ptr, first_acc, second_acc, alpha, beta, column, m, n,
                   stride_out_m, stride_out_n, stride_residual_m, stride_residual_n, ACTIVATION, GATED)  # fmt: skip
            if STRIPS == 2 and not GATED:
                _store(out_ptr, bias_ptr, residual_ptr, second_acc, second_acc, alpha, beta, column + STRIP, m, n,
                       stride_out_m, stride_out_n, stride_residual_m, stride_residual_n, ACTIVATION, GATED)  # fmt: skip


@gluon.jit(do_not_specialize=["m", "alpha", "beta", "num_workers", "num_tiles", "iters_per_tile", "num_whole"])
def matmul(a, b, out_ptr, bias_ptr, residual_ptr, partials_ptr, counters_ptr, alpha, beta, m, n,
           stride_out_m, stride_out_n, stride_residual_m, stride_residual_n, num_workers, num_tiles, iters_per_tile, num_whole,
           B_K_MAJOR: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
           STRIPS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """One worker: its whole tiles, then its share of the tail. m: at most BLOCK_M; n: columns of out, of which b has twice as many if GATED.

    TMA descriptors: a, of [m, k] in boxes [BLOCK_M, 64]; b, of [columns, k] in boxes [64, 64], or of [k, columns] in boxes [128, 64].
    """
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    element: gl.constexpr = a.dtype
    a_panels = gl.allocate_shared_memory(element, [STAGES * 2, BLOCK_M, PANEL], swizzled)
    a_bufs = a_panels._reinterpret(element, [STAGES, BLOCK_M, STEP], swizzled)
    if B_K_MAJOR:
        b_panels = gl.allocate_shared_memory(element, [STAGES * STRIPS * 2, STRIP, PANEL], swizzled)
        b_bufs = b_panels._reinterpret(element, [STAGES * STRIPS, STRIP, STEP], swizzled)
    else:
        b_panels = gl.allocate_shared_memory(element, [STAGES * STRIPS, STEP, STRIP], swizzled)
        b_bufs = b_panels
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # the kernel before, which may write what this one reads or use the same workspace, ends here
    worker = gl.program_id(0)
    tail = (num_tiles - num_whole) * iters_per_tile
    gl.warp_specialize(
        [
            (_consume, (out_ptr, bias_ptr, residual_ptr, partials_ptr, counters_ptr, alpha, beta, m, n,
                        stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                        worker, num_workers, iters_per_tile, num_whole, tail, a_bufs, b_bufs, full, empty,
                        B_K_MAJOR, ACTIVATION, GATED, STRIPS, BLOCK_M, STAGES)),
            (_produce, (a, b, n, worker, num_workers, iters_per_tile, num_whole, tail, a_panels, b_panels, full, empty,
                        B_K_MAJOR, GATED, STRIPS, BLOCK_M, STAGES)),
        ],
        [1],
        [40],
    )  # fmt: skip

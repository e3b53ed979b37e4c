"""y = activation(x Wᵀ + bias) + residual for Hopper (sm_90), W in 4-bit codes: yᵀ = W xᵀ by an even share of the (tile, k-step) space.

W is the left operand, so its rows fill the M side of the tensor cores and the few tokens are the N. A producer streams k-steps of 128
columns, their codes, scales and x, into a ring of STAGES buffers and runs ahead over the borders of segments. Each of STRIPS consumers
takes 64 rows, so that one multiplies while another unpacks, and of those each warp takes 16: one 16-byte load gives a thread the codes of its operand registers for 64 columns, which become 16-bit numbers there by
and-or and one subtraction, of the zero point, without a shuffle. Each group is summed for itself in float32 and then scaled, so nothing overflows.

Up to 16 tokens go through mma.sync, which takes 8 at a time and waits for nobody; more through wgmma, which reads x from shared memory.
What offsets add is a multiple of the group's sum of x, which one more product, by ones, gives.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from evenshare.device.gluon import barrier, halves, next_stage
from evenshare.device.partials import arrive, merge, store_partial
from evenshare.device.segments import (
    next_segment,
    partial_slot,
    share_begin,
)
from evenshare.quant.kernels.dequantize import E2M1, FLOAT_OFFSETS, INTEGER_ZEROS, NF4
from evenshare.quant.kernels.hopper_store import store_rows
from evenshare.quant.kernels.hopper_unpack import (
    BAND,
    BLOCK,
    MIDDLE,
    STEP,
    STRIP,
    as_operand,
    as_pair,
    integers,
    looked_up,
    parts_of,
    zeros_of,
)

PIECES = gl.constexpr(8)  # of a tile's scales: a swizzle repeats after 8
MOST_TOKENS = gl.constexpr(128)  # of a tile


@gluon.jit
def _produce(x, words, scales, zeros, worker, num_workers, tiles_m, iters_per_tile, num_whole, tail,
             x_bufs, word_bufs, scale_bufs, zero_bufs, full, empty,
             GROUP_SIZE: gl.constexpr, FORM: gl.constexpr, STRIPS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """One warp."""
    GROUPS: gl.constexpr = max(STEP // GROUP_SIZE, 1)  # of a step
    WORD_BYTES: gl.constexpr = STRIPS * STRIP * STEP // 2
    HAS_ZEROS: gl.constexpr = FORM == INTEGER_ZEROS or FORM == FLOAT_OFFSETS
    PER_ROW: gl.constexpr = scale_bufs.dtype.primitive_bitwidth + (
        zero_bufs.dtype.primitive_bitwidth if HAS_ZEROS else 0
    )
    SCALE_BYTES: gl.constexpr = GROUPS * STRIPS * STRIP * PER_ROW // 8
    stage = 0
    phase = 1
    tile = worker
    position = share_begin(worker, tail, num_workers)
    share_end = share_begin(worker + 1, tail, num_workers)
    while (tile < num_whole) | (position < share_end):
        current, begin, end, _s, tile, position = next_segment(
            tile, position, share_end, iters_per_tile, num_whole, num_workers
        )
        tile_n = current // tiles_m
        row = (current - tile_n * tiles_m) * BLOCK_M
        for step in range(begin, end):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, WORD_BYTES + SCALE_BYTES + BLOCK_M * STEP * 2)
            group = step * STEP // GROUP_SIZE
            for half in gl.static_range(2):
                at = 2 * stage + half
                tma.async_copy_global_to_shared(
                    words, [tile_n * (STRIPS * STRIP // BAND), 2 * step + half, 0, 0], bar, word_bufs.index(at)
                )
                tma.async_copy_global_to_shared(x, [row, (2 * step + half) * BLOCK], bar, x_bufs.index(at))
            tma.async_copy_global_to_shared(scales, [group, tile_n * PIECES, 0], bar, scale_bufs.index(stage))
            if HAS_ZEROS:
                tma.async_copy_global_to_shared(zeros, [group, tile_n * PIECES, 0], bar, zero_bufs.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _multiply(a, x_buf, acc, is_first: gl.constexpr, layout: gl.constexpr):
    """a [rows, columns] x_buf [tokens, columns]ᵀ, and acc unless it is the first of a sum."""
    if layout.version[0] == 2:
        right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
        acc = mma_v2(a, x_buf.permute([1, 0]).load(right), gl.zeros_like(acc) if is_first else acc)
    else:
        token = warpgroup_mma(a, x_buf.permute([1, 0]), acc, use_acc=not is_first, is_async=True)
        acc = warpgroup_mma_wait(0, (token,))
    return acc


@gluon.jit
def _strip(values, number: gl.constexpr):
    """[64 STRIPS] -> the values of a strip: no register moves, and what is not asked for is not loaded."""
    STRIPS: gl.constexpr = values.shape[0] // STRIP
    if STRIPS == 2:
        first, second = gl.split(gl.permute(gl.reshape(values, [2, STRIP]), [1, 0]))
        strips = (first, second)
    else:
        even, odd = gl.split(gl.permute(gl.reshape(values, [2, 2, STRIP]), [2, 0, 1]))
        a, c = gl.split(even)
        b, d = gl.split(odd)
        strips = (a, b, c, d)
    return strips[number]


@gluon.jit
def _of_group(buf, group: gl.constexpr, number: gl.constexpr, by_piece: gl.constexpr, layout: gl.constexpr):
    """The values of a group for a strip, [rows]."""
    values = buf.slice(group * PIECES, PIECES, 0).load(by_piece)
    values = _strip(gl.reshape(values, [PIECES * buf.shape[1]]), number)
    return gl.convert_layout(values, gl.SliceLayout(1, layout), assert_trivial=True)


@gluon.jit
def _add_part(at: gl.constexpr, words, x_buf, scale_buf, zero_buf, acc, sums, x_sums, ones, number: gl.constexpr,
              by_piece: gl.constexpr, layout: gl.constexpr, operand: gl.constexpr, GROUP_SIZE: gl.constexpr, FORM: gl.constexpr):  # fmt: skip
    """Part `at` of a step, of a group's columns or 64, multiplied by x; the group's sums are scaled and added to acc after its last one."""
    element: gl.constexpr = x_buf.dtype
    PARTS: gl.constexpr = max(BLOCK // GROUP_SIZE, 1)
    GROUPS: gl.constexpr = max(STEP // GROUP_SIZE, 1)
    COLUMNS: gl.constexpr = BLOCK // PARTS
    GROUP: gl.constexpr = at % GROUPS
    IS_FIRST: gl.constexpr = GROUPS > 1 or at == 0
    if PARTS > 1:
        x_buf = x_buf.slice(at % PARTS * COLUMNS, COLUMNS, 1)
    if FORM == E2M1 or FORM == NF4:
        numbers = looked_up(words, element, FORM)
    elif FORM == INTEGER_ZEROS:
        upper, lower = zeros_of(_of_group(zero_buf, GROUP, number, by_piece, layout), words, element)
        numbers = integers(words, upper, lower, element)
    else:
        middle = as_pair(gl.zeros_like(words) + MIDDLE, element)
        numbers = integers(words, middle, middle, element)
    sums = _multiply(as_operand(numbers, operand), x_buf, sums, IS_FIRST, layout)
    if FORM == FLOAT_OFFSETS:
        x_sums = _multiply(ones, x_buf, x_sums, IS_FIRST, layout)
    if GROUPS > 1 or at == 1:
        scale = _of_group(scale_buf, GROUP, number, by_piece, layout).to(gl.float32).expand_dims(1)
        acc += sums * scale
        if FORM == FLOAT_OFFSETS:
            offset = _of_group(zero_buf, GROUP, number, by_piece, layout).to(gl.float32).expand_dims(1)
            acc += x_sums * (offset + MIDDLE * scale)
    return acc, sums, x_sums


@gluon.jit
def _consume(number: gl.constexpr, bias_ptr, residual_ptr, out_ptr, partials_ptr, counters_ptr, m, n,
             stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
             worker, num_workers, tiles_m, iters_per_tile, num_whole, tail,
             x_bufs, word_bufs, scale_bufs, zero_bufs, full, empty,
             GROUP_SIZE: gl.constexpr, FORM: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
             STRIPS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Four warps: the strip `number` of every tile."""
    element: gl.constexpr = x_bufs.dtype
    version: gl.constexpr = [2, 0] if BLOCK_M <= 16 else [3, 0]
    instruction: gl.constexpr = [16, 8] if BLOCK_M <= 16 else [16, BLOCK_M, 16]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=version, warps_per_cta=[4, 1], instr_shape=instruction)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    thread_order: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    # Of 8 pieces of the rows' values those that a thread of `layout` has: lanes, registers and warps count rows, registers the strips.
    warp_bases: gl.constexpr = [[1, 0], [2, 0]] if STRIPS == 2 else [[0, 16], [1, 0]]
    registers: gl.constexpr = [[0, 8], [4, 0]] if STRIPS == 2 else [[0, 8], [2, 0], [4, 0]]
    by_piece: gl.constexpr = gl.DistributedLinearLayout(
        registers, [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], warp_bases, [], [PIECES, PIECES * STRIPS]
    )
    PARTS: gl.constexpr = max(BLOCK // GROUP_SIZE, 1)  # of 64 columns
    ones = gl.full([STRIP, BLOCK // PARTS], 1.0, element, operand)
    sums = gl.zeros([STRIP, BLOCK_M], gl.float32, layout)  # of a group: codes less their zero points, times x
    x_sums = sums  # of x alone
    SLOT: gl.constexpr = STRIPS * STRIP * BLOCK_M
    AT_ONCE: gl.constexpr = 8 if BLOCK_M <= 16 else 2  # partials that are read together, into up to 64 registers

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
        tile_n = current // tiles_m
        acc = gl.zeros([STRIP, BLOCK_M], gl.float32, layout)
        for _ in range(begin, end):
            mbarrier.wait(full.index(stage), phase)
            scale_buf = scale_bufs.index(stage)
            zero_buf = zero_bufs.index(stage)
            for half in gl.static_range(2):
                words = word_bufs.index(2 * stage + half).slice(number * 16, 16, 0).load(thread_order)
                parts = parts_of(gl.reshape(words, [4, 8, 4, 4]), PARTS)
                for part in gl.static_range(PARTS):
                    acc, sums, x_sums = _add_part(
                        half * PARTS + part, parts[part], x_bufs.index(2 * stage + half), scale_buf, zero_buf,
                        acc, sums, x_sums, ones, number, by_piece, layout, operand, GROUP_SIZE, FORM)  # fmt: skip
            barrier()
            mbarrier.arrive(empty.index(stage), count=1)  # all four warps have read the step
            stage, phase = next_stage(stage, phase, STAGES)
        complete = end - begin == iters_per_tile
        if not complete:
            tile_begin = split_tile * iters_per_tile
            slot = (worker * 2 + (own_begin < tile_begin).to(gl.int32)).to(gl.int64)
            own_partials_ptr = partials_ptr + number * STRIP * BLOCK_M
            store_partial(own_partials_ptr + slot * SLOT, acc)
            counter_ptr = counters_ptr + split_tile * STRIPS + number
            complete, first, last = arrive(counter_ptr, tile_begin, iters_per_tile, tail, num_workers)
            if complete:
                first_slot = partial_slot(first, tile_begin, tail, num_workers)
                acc = merge(acc, own_partials_ptr, first, last, first_slot, SLOT, AT_ONCE)
        if complete:
            token = (current - tile_n * tiles_m) * BLOCK_M
            row = (tile_n * STRIPS + number) * STRIP
            if BLOCK_M == MOST_TOKENS:
                left, right = halves(acc)
                store_rows(out_ptr, bias_ptr, residual_ptr, left, row, None, token, m, n, stride_out_m, stride_out_n,
                           stride_residual_m, stride_residual_n, ACTIVATION, GATED)  # fmt: skip
                store_rows(out_ptr, bias_ptr, residual_ptr, right, row, None, token + BLOCK_M // 2, m, n, stride_out_m, stride_out_n,
                           stride_residual_m, stride_residual_n, ACTIVATION, GATED)  # fmt: skip
            else:
                store_rows(out_ptr, bias_ptr, residual_ptr, acc, row, None, token, m, n, stride_out_m, stride_out_n,
                           stride_residual_m, stride_residual_n, ACTIVATION, GATED)  # fmt: skip


@gluon.constexpr_function
def _pieces_layout(dtype, strips):
    """Of pieces of 8 strips values: the swizzle is as wide as one."""
    bits = dtype.primitive_bitwidth
    return gl.NVMMASharedLayout(swizzle_byte_width=strips * bits, element_bitwidth=bits, rank=2)


@gluon.jit(do_not_specialize=["m", "num_workers", "num_tiles", "iters_per_tile", "num_whole"])
def w4a16(x, words, scales, zeros, bias_ptr, residual_ptr, out_ptr, partials_ptr, counters_ptr,
          m, n, stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
          num_workers, num_tiles, iters_per_tile, num_whole,
          GROUP_SIZE: gl.constexpr, FORM: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
          STRIPS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """One worker of a `UniformPlan` of tiles [64 STRIPS rows of W, BLOCK_M tokens]; n: columns of out.

    TMA descriptors: x, boxes [BLOCK_M, 64] of [m, k]; words, boxes [4 STRIPS, 1, 4, 32] of int32 [bands, k / 64, 4, 32] in the order of
    `quant/hopper_weight.py`; scales and zeros (int16 if they are zero points), boxes [groups of a step, 8, 8 STRIPS] of [groups, pieces, 8 STRIPS].
    """
    panel: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    word_panel: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    SCALE_ROWS: gl.constexpr = max(STEP // GROUP_SIZE, 1) * PIECES
    x_bufs = gl.allocate_shared_memory(x.dtype, [2 * STAGES, BLOCK_M, BLOCK], panel)
    word_bufs = gl.allocate_shared_memory(gl.int32, [2 * STAGES, 16 * STRIPS, 32], word_panel)
    scale_bufs = gl.allocate_shared_memory(
        scales.dtype, [STAGES, SCALE_ROWS, PIECES * STRIPS], _pieces_layout(scales.dtype, STRIPS)
    )
    zero_bufs = scale_bufs
    if FORM == INTEGER_ZEROS or FORM == FLOAT_OFFSETS:
        zero_bufs = gl.allocate_shared_memory(
            zeros.dtype, [STAGES, SCALE_ROWS, PIECES * STRIPS], _pieces_layout(zeros.dtype, STRIPS)
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=STRIPS)
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # the kernel before, which may write x or use the same workspace, ends here
    worker = gl.program_id(0)
    tiles_m = (m + BLOCK_M - 1) // BLOCK_M
    tail = (num_tiles - num_whole) * iters_per_tile
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    FOURTH: gl.constexpr = 3
    if STRIPS == 2:
        gl.warp_specialize(
            [
                (_consume, (FIRST, bias_ptr, residual_ptr, out_ptr, partials_ptr, counters_ptr, m, n,
                            stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                            worker, num_workers, tiles_m, iters_per_tile, num_whole, tail,
                            x_bufs, word_bufs, scale_bufs, zero_bufs, full, empty,
                            GROUP_SIZE, FORM, ACTIVATION, GATED, STRIPS, BLOCK_M, STAGES)),
                (_consume, (SECOND, bias_ptr, residual_ptr, out_ptr, partials_ptr, counters_ptr, m, n,
                            stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                            worker, num_workers, tiles_m, iters_per_tile, num_whole, tail,
                            x_bufs, word_bufs, scale_bufs, zero_bufs, full, empty,
                            GROUP_SIZE, FORM, ACTIVATION, GATED, STRIPS, BLOCK_M, STAGES)),
                (_produce, (x, words, scales, zeros, worker, num_workers, tiles_m, iters_per_tile, num_whole, tail,
                            x_bufs, word_bufs, scale_bufs, zero_bufs, full, empty,
                            GROUP_SIZE, FORM, STRIPS, BLOCK_M, STAGES)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (FIRST, bias_ptr, residual_ptr, out_ptr, partials_ptr, counters_ptr, m, n,
                            stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                            worker, num_workers, tiles_m, iters_per_tile, num_whole, tail,
                            x_bufs, word_bufs, scale_bufs, zero_bufs, full, empty,
                            GROUP_SIZE, FORM, ACTIVATION, GATED, STRIPS, BLOCK_M, STAGES)),
                (_consume, (SECOND, bias_ptr, residual_ptr, out_ptr, partials_ptr, counters_ptr, m, n,
                            stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                            worker, num_workers, tiles_m, iters_per_tile, num_whole, tail,
                            x_bufs, word_bufs, scale_bufs, zero_bufs, full, empty,
                            GROUP_SIZE, FORM, ACTIVATION, GATED, STRIPS, BLOCK_M, STAGES)),
                (_consume, (THIRD, bias_ptr, residual_ptr, out_ptr, partials_ptr, counters_ptr, m, n,
                            stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                            worker, num_workers, tiles_m, iters_per_tile, num_whole, tail,
                            x_bufs, word_bufs, scale_bufs, zero_bufs, full, empty,
                            GROUP_SIZE, FORM, ACTIVATION, GATED, STRIPS, BLOCK_M, STAGES)),
                (_consume, (FOURTH, bias_ptr, residual_ptr, out_ptr, partials_ptr, counters_ptr, m, n,
                            stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
                            worker, num_workers, tiles_m, iters_per_tile, num_whole, tail,
                            x_bufs, word_bufs, scale_bufs, zero_bufs, full, empty,
                            GROUP_SIZE, FORM, ACTIVATION, GATED, STRIPS, BLOCK_M, STAGES)),
                (_produce, (x, words, scales, zeros, worker, num_workers, tiles_m, iters_per_tile, num_whole, tail,
                            x_bufs, word_bufs, scale_bufs, zero_bufs, full, empty,
                            GROUP_SIZE, FORM, STRIPS, BLOCK_M, STAGES)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 40],
        )  # fmt: skip

"""y = activation(x Wᵀ + bias) + residual for Hopper (sm_90), W in 4-bit codes and x of few tokens: every row of W by one worker.

Workers take even shares of the groups of 16 rows, PAIR of them at a time, and the columns are dealt to the WARPS of a worker, each of
which reads 128 columns at a turn. So no worker waits for another, and no sum leaves it: the warps' sums meet in shared memory once
for each pass over the columns. Codes and scales go straight into registers, DEPTH turns ahead and over the borders of passes, in the
order of the tensor cores' left operand (`quant/hopper.py` packs them so). The first of them are on their way before the kernel that
writes x has ended (programmatic dependent launch).

Multiplying takes few instructions, of which the issue slots would otherwise run out. A code in the lowest bits of a float16 is a
subnormal number, 2^-24 of it, and one four bits higher is 2^-20 of it, so unpacking is a shift and four ands for eight codes. The power
of two goes into the row's scale, and what zero points add is a multiple of the sum of x, which is known beforehand. x is float16, too:
bfloat16 values are multiplied by a power of two for each token and 128 columns that makes the largest just fit. What that cannot hold is
below 2^-39 of the largest.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from evenshare.quant.kernels.dequantize import E2M1, FLOAT_OFFSETS, INTEGER_ZEROS, NF4
from evenshare.quant.kernels.hopper_store import store_rows
from evenshare.quant.kernels.hopper_unpack import BLOCK, MIDDLE, STEP, STRIP, as_batch, looked_up, parts_of, subnormals

ROWS = gl.constexpr(16)  # of W, which lie together
BLOCK_WORDS = gl.constexpr(128)  # of 16 rows and 64 columns: 16 bytes for each thread of a warp
STRIP_WORDS = gl.constexpr(STRIP.value * BLOCK.value // 8)  # of 64 rows and 64 columns
UPPER, LOWER = gl.constexpr(2.0**24), gl.constexpr(2.0**20)  # by which rows 0 to 7 and 8 to 15 are too small
EXPONENT = gl.constexpr(0x7F800000)  # the bits of a float32's
LEAST_EXPONENT = gl.constexpr(32 << 23)  # of the largest of 128 x: less is as good as zero, and its inverse fits
TO_FIT = gl.constexpr(15 << 23)  # float16's largest exponent
TWO = gl.constexpr(254 << 23)  # exponents of a number and its inverse, together


@gluon.jit
def _fetch(words_ptr, scales_ptr, zeros_ptr, group, end_group, turn, num_steps, row_stride,
           WARPS: gl.constexpr, PAIR: gl.constexpr, GROUPS: gl.constexpr, FORM: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Words, scales and zeros of a turn for PAIR groups of rows: tuples, by row group, then half or group of columns."""
    by_word: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    of_warp: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, by_word)))
    step = turn * WARPS + gl.arange(0, WARPS, layout=of_warp)
    step = step.expand_dims(1).expand_dims(2).expand_dims(3)
    within = _thread_words(by_word)
    rows: gl.constexpr = gl.SliceLayout(2, layout)
    scale_step = turn * WARPS + gl.arange(0, WARPS, layout=gl.SliceLayout(1, rows)).expand_dims(1)
    words = ()
    scales = ()
    zeros = ()
    for i in gl.static_range(PAIR):
        mask = (step < num_steps) & (group + i < end_group)
        strip = (group + i) // 4
        base = words_ptr + strip.to(gl.int64) * num_steps * (2 * STRIP_WORDS) + (group + i) % 4 * BLOCK_WORDS
        for half in gl.static_range(2):
            at = (2 * step + half) * STRIP_WORDS + within
            words = words + (gl.load(base + at, mask=mask, other=0, eviction_policy="evict_first"),)
        row = (group + i) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, rows)).expand_dims(0)
        mask = (scale_step < num_steps) & (group + i < end_group)
        for part in gl.static_range(GROUPS):
            at = (scale_step * GROUPS + part).to(gl.int64) * row_stride + row
            scales = scales + (gl.load(scales_ptr + at, mask=mask, other=0.0),)
            if FORM == INTEGER_ZEROS or FORM == FLOAT_OFFSETS:
                zeros = zeros + (gl.load(zeros_ptr + at, mask=mask, other=0),)
    return words, scales, zeros


@gluon.jit
def _thread_words(by_word: gl.constexpr):
    """Offsets of the words of a block, [1, 8, 4, 4]: rows, quads of a warp's threads, steps of 16 columns."""
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, by_word))))
    quad = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, by_word))))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, by_word))))
    row = row.expand_dims(0).expand_dims(2).expand_dims(3)
    quad = quad.expand_dims(0).expand_dims(1).expand_dims(3)
    word = word.expand_dims(0).expand_dims(1).expand_dims(2)
    return row * 16 + quad * 4 + word


@gluon.jit
def _fill(x_ptr, m, k, stride_x, x_bufs, factor_bufs, sum_bufs,
          WARPS: gl.constexpr, TOKENS: gl.constexpr, TURNS: gl.constexpr, GROUPS: gl.constexpr):  # fmt: skip
    """x into shared memory, in the order in which threads read it as the right operand: [warps, half of the 128 columns, half of
    that, tokens, quad, 8 values]; beside it what it was divided by, and its sums over groups of columns. Zeros behind its ends."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout))).expand_dims(1).expand_dims(2)
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))).expand_dims(0).expand_dims(2)
    column = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout))).expand_dims(0).expand_dims(1)
    rows = x_ptr + token.to(gl.int64) * stride_x
    for turn in range(TURNS):
        at = (turn * WARPS + warp) * STEP + column
        given = gl.load(rows + at, mask=(token < m) & (at < k), other=0.0)
        x = given.to(gl.float32)
        sums = gl.sum(gl.reshape(x, [WARPS, TOKENS, GROUPS, STEP // GROUPS]), 3)
        sum_bufs.index(turn).permute([1, 2, 0]).store(sums)
        if given.dtype == gl.bfloat16:
            peak = gl.max(gl.abs(x), 2)
            exponent = gl.maximum(peak.to(gl.int32, bitcast=True) & EXPONENT, LEAST_EXPONENT) - TO_FIT
            factor_bufs.index(turn).permute([1, 2, 0]).store(exponent.to(gl.float32, bitcast=True).expand_dims(2))
            given = (x * (TWO - exponent).to(gl.float32, bitcast=True).expand_dims(2)).to(gl.float16)
        # [warp, token, half, half, 16 columns, half of those, quad, pair]
        parts = gl.permute(gl.reshape(given, [WARPS, TOKENS, 2, 2, 2, 2, 4, 2]), [0, 2, 3, 1, 6, 4, 5, 7])
        x_bufs.index(turn).store(gl.reshape(parts, [WARPS, 2, 2, TOKENS, 4, 8]))


@gluon.jit
def _read_x(x_buf, at: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Part `at` of a turn's x as the right operand, [warps, 64 / PARTS, WIDTH]. Of one token all columns are the same."""
    WARPS: gl.constexpr = x_buf.shape[0]
    TOKENS: gl.constexpr = x_buf.shape[3]
    by_thread: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2, 1, 1, 8], [1, 1, 1, 8, 4, 1], [WARPS, 1, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    operand: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    buf = x_buf.slice(at // PARTS, 1, 1)
    if PARTS == 2:
        buf = buf.slice(at % 2, 1, 2)
    if PARTS == 4:
        buf = buf.slice(at % 4 // 2, 1, 2).slice(at % 2 * 4, 4, 5)
    x = buf.load(by_thread)
    HALVES: gl.constexpr = x.shape[2]
    STEPS: gl.constexpr = x.shape[5] // 4
    x = gl.permute(gl.reshape(x, [WARPS, HALVES, TOKENS, 4, STEPS, 2, 2]), [0, 1, 4, 5, 3, 6, 2])
    x = gl.convert_layout(gl.reshape(x, [WARPS, BLOCK // PARTS, TOKENS]), operand, assert_trivial=True)
    if TOKENS < WIDTH:
        repeated = x.to(gl.int16, bitcast=True) | gl.zeros([WARPS, BLOCK // PARTS, WIDTH], gl.int16, operand)
        x = repeated.to(gl.float16, bitcast=True)
    return x


@gluon.jit
def _multiply(acc, words, scales, zeros, x, factor, x_sums, i: gl.constexpr, units,
              PARTS: gl.constexpr, GROUPS: gl.constexpr, FORM: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """acc + W x of a turn, for row group i. Each group of columns is summed for itself and then scaled."""
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    sums = gl.zeros_like(acc)
    for at in gl.static_range(2 * PARTS):
        part = parts_of(words[2 * i + at // PARTS], PARTS)[at % PARTS]
        if FORM == E2M1 or FORM == NF4:
            numbers = looked_up(part, gl.float16, FORM)
        else:
            numbers = subnormals(part)
        if GROUPS > 1:
            sums = gl.zeros_like(acc)
        sums = mma_v2(as_batch(numbers, operand), x[at], sums)
        if GROUPS > 1 or at == 1:
            scale = scales[i * GROUPS + at % GROUPS].to(gl.float32).expand_dims(2)
            group = sums if factor is None else sums * factor
            x_sum = x_sums[at % GROUPS]
            if FORM == E2M1 or FORM == NF4:
                acc += group * scale
            elif FORM == INTEGER_ZEROS:
                zero = zeros[i * GROUPS + at % GROUPS].to(gl.float32).expand_dims(2)
                acc += (group * units - zero * x_sum) * scale
            elif FORM == FLOAT_OFFSETS:
                offset = zeros[i * GROUPS + at % GROUPS].to(gl.float32).expand_dims(2)
                acc += group * (units * scale) + x_sum * offset
            else:
                acc += (group * units - x_sum * MIDDLE) * scale
    return acc


@gluon.jit(do_not_specialize=["m", "num_groups", "num_workers"])
def w4a16_few(x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr,
              m, n, k, num_steps, row_stride, num_groups, num_workers, stride_x,
              stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
              GROUP_SIZE: gl.constexpr, FORM: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
              TOKENS: gl.constexpr, PAIR: gl.constexpr, DEPTH: gl.constexpr, TURNS: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """One worker: its share of `num_groups` groups of 16 rows of W. n: columns of out; row_stride: of scales and zeros [groups, rows].

    words: int32 [strips of 64 rows, 2 num_steps, 4, 8, 4, 4], as `quant/hopper.py` packs them. m: at most TOKENS, which is 1, 8 or 16.
    """
    WARPS: gl.constexpr = num_warps
    WIDTH: gl.constexpr = max(TOKENS, 8)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    PARTS: gl.constexpr = max(BLOCK // GROUP_SIZE, 1)
    GROUPS: gl.constexpr = max(STEP // GROUP_SIZE, 1)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    all_warps: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 4, 8], [1, WARPS, 1], [2, 1, 0])
    own_sums = gl.allocate_shared_memory(gl.float32, [2, WARPS, PAIR * ROWS, WIDTH], flat)
    x_bufs = gl.allocate_shared_memory(
        gl.float16, [TURNS, WARPS, 2, 2, TOKENS, 4, 8], gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
    )
    factor_bufs = gl.allocate_shared_memory(gl.float32, [TURNS, 1, WARPS, TOKENS], flat)
    sum_bufs = gl.allocate_shared_memory(gl.float32, [TURNS, GROUPS, WARPS, TOKENS], flat)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))).expand_dims(0).expand_dims(2)
    units = gl.where(row < 8, UPPER, LOWER)

    gdc_launch_dependents()
    worker = gl.program_id(0)
    group = (worker.to(gl.int64) * num_groups // num_workers).to(gl.int32)
    end_group = ((worker + 1).to(gl.int64) * num_groups // num_workers).to(gl.int32)
    ahead_group = group
    ahead_turn = 0
    ring = ()
    for _ in gl.static_range(DEPTH):
        ring = ring + (_fetch(words_ptr, scales_ptr, zeros_ptr, ahead_group, end_group, ahead_turn, num_steps, row_stride,
                              WARPS, PAIR, GROUPS, FORM, layout),)  # fmt: skip
        ahead_turn += 1
        ahead_group = gl.where(ahead_turn == TURNS, ahead_group + PAIR, ahead_group)
        ahead_turn = gl.where(ahead_turn == TURNS, 0, ahead_turn)
    gdc_wait()  # the kernel before, which may write x, ends here; W is older
    _fill(x_ptr, m, k, stride_x, x_bufs, factor_bufs, sum_bufs, WARPS, TOKENS, TURNS, GROUPS)
    half = 0
    while group < end_group:
        acc = ()
        for _ in gl.static_range(PAIR):
            acc = acc + (gl.zeros([WARPS, ROWS, WIDTH], gl.float32, layout),)
        for turn in range(TURNS):
            words, scales, zeros = ring[0]
            fetched = _fetch(words_ptr, scales_ptr, zeros_ptr, ahead_group, end_group, ahead_turn, num_steps, row_stride,
                             WARPS, PAIR, GROUPS, FORM, layout)  # fmt: skip
            ahead_turn += 1
            ahead_group = gl.where(ahead_turn == TURNS, ahead_group + PAIR, ahead_group)
            ahead_turn = gl.where(ahead_turn == TURNS, 0, ahead_turn)
            x = ()
            for at in gl.static_range(2 * PARTS):
                x = x + (_read_x(x_bufs.index(turn), at, PARTS, WIDTH, layout),)
            factor = None
            if x_ptr.dtype.element_ty == gl.bfloat16:
                factor = factor_bufs.index(turn).permute([1, 0, 2]).load(layout)
            x_sums = ()
            for at in gl.static_range(GROUPS):
                x_sums = x_sums + (sum_bufs.index(turn).slice(at, 1, 0).permute([1, 0, 2]).load(layout),)
            sums = ()
            for i in gl.static_range(PAIR):
                sums = sums + (
                    _multiply(acc[i], words, scales, zeros, x, factor, x_sums, i, units, PARTS, GROUPS, FORM, layout),
                )
            acc = sums
            ring = ring[1:] + (fetched,)
        own = own_sums.index(half)
        for i in gl.static_range(PAIR):
            own.slice(i * ROWS, ROWS, 1).store(acc[i])
        if GATED:
            for i in gl.static_range(PAIR):
                gate = gl.sum(own.slice(i * ROWS, 8, 1).load(all_warps), 0)
                up = gl.sum(own.slice(i * ROWS + 8, 8, 1).load(all_warps), 0)
                both = gl.reshape(gl.permute(gl.join(gate, up), [2, 0, 1]), [ROWS, WIDTH])
                store_rows(out_ptr, bias_ptr, residual_ptr, both, (group + i) * ROWS, end_group * ROWS, 0, m, n,
                           stride_out_m, stride_out_n, stride_residual_m, stride_residual_n, ACTIVATION, GATED)  # fmt: skip
        else:
            total = gl.sum(own.load(all_warps), 0)
            store_rows(out_ptr, bias_ptr, residual_ptr, total, group * ROWS, end_group * ROWS, 0, m, n,
                       stride_out_m, stride_out_n, stride_residual_m, stride_residual_n, ACTIVATION, GATED)  # fmt: skip
        half = 1 - half
        group += PAIR

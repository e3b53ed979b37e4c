"""y = activation(x Wᵀ + bias) + residual for Hopper (sm_90), W in 4-bit codes and x of few tokens: every row of W by one worker.

Workers take even shares of the bands of 16 rows, and the columns are dealt to the WARPS of a worker, each of
which reads 128 columns at a turn. So no worker waits for another, and no sum leaves it: the warps' sums meet in shared memory once
for each pass over the columns. Codes and scales go straight into registers, DEPTH turns ahead and over the borders of passes, in the
order of the tensor cores' left operand (`quant/hopper_weight.py` packs them so). The first of them are on their way before the kernel that
writes x has ended (programmatic dependent launch).

Multiplying takes few instructions, of which the issue slots would otherwise run out. A code in the lowest bits of a float16 is a
subnormal number, 2^-24 of it, and one four bits higher is 2^-20 of it, so unpacking is a shift and four ands for eight codes. The power
of two goes into the row's scale, and what zero points add is a multiple of the sum of x, which is known beforehand. x is float16, too:
bfloat16 values are multiplied by a power of two for each token and 128 columns that makes the largest just fit. What that cannot hold is
below 2^-39 of the largest.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from evenshare.device.gluon import barrier
from evenshare.quant.kernels.dequantize import E2M1, FLOAT_OFFSETS, INTEGER_ZEROS, NF4
from evenshare.quant.kernels.hopper_store import store_rows
from evenshare.quant.kernels.hopper_unpack import BAND, BLOCK, MIDDLE, STEP, as_batch, looked_up, parts_of, subnormals

BLOCK_WORDS = gl.constexpr(128)  # of 16 rows and 64 columns: 16 bytes for each thread of a warp
UPPER, LOWER = gl.constexpr(2.0**24), gl.constexpr(2.0**20)  # by which rows 0 to 7 and 8 to 15 are too small
EXPONENT = gl.constexpr(0x7F800000)  # the bits of a float32's
LEAST_EXPONENT = gl.constexpr(32 << 23)  # of the largest of 128 x: less is as good as zero, and its inverse fits
TO_FIT = gl.constexpr(15 << 23)  # float16's largest exponent
TWO = gl.constexpr(254 << 23)  # exponents of a number and its inverse, together


@gluon.jit
def _fetch(words_ptr, scales_ptr, zeros_ptr, band, end_band, turn, num_steps, row_stride,
           WARPS: gl.constexpr, GROUPS: gl.constexpr, FORM: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Words, scales and zeros of a turn for a band: tuples, by half or group of columns."""
    by_word: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    of_warp: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, by_word)))
    step = turn * WARPS + gl.arange(0, WARPS, layout=of_warp)
    step = step.expand_dims(1).expand_dims(2).expand_dims(3)
    within = _thread_words(by_word)
    mask = (step < num_steps) & (band < end_band)
    base = words_ptr + band.to(gl.int64) * num_steps * (2 * BLOCK_WORDS)
    words = ()
    for half in gl.static_range(2):
        at = (2 * step + half) * BLOCK_WORDS + within
        words = words + (gl.load(base + at, mask=mask, other=0, eviction_policy="evict_first"),)
    rows: gl.constexpr = gl.SliceLayout(2, layout)
    step = turn * WARPS + gl.arange(0, WARPS, layout=gl.SliceLayout(1, rows)).expand_dims(1)
    row = band * BAND + gl.arange(0, BAND, layout=gl.SliceLayout(0, rows)).expand_dims(0)
    mask = (step < num_steps) & (band < end_band)
    scales = ()
    zeros = ()
    for part in gl.static_range(GROUPS):
        at = (step * GROUPS + part).to(gl.int64) * row_stride + row
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
    TOKEN_LANES: gl.constexpr = 1 if TOKENS == 1 else 4
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4 * TOKEN_LANES], [1, TOKEN_LANES, 32 // TOKEN_LANES], [WARPS, 1, 1], [2, 1, 0]
    )
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout))).expand_dims(1).expand_dims(2)
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))).expand_dims(0).expand_dims(2)
    column = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout))).expand_dims(0).expand_dims(1)
    rows = x_ptr + token.to(gl.int64) * stride_x
    AT_ONCE: gl.constexpr = min(TURNS, 4)  # loads that are under way together
    for begin in range(0, TURNS, AT_ONCE):
        loaded = ()
        for i in gl.static_range(AT_ONCE):
            at = ((begin + i) * WARPS + warp) * STEP + column
            loaded = loaded + (gl.load(rows + at, mask=(token < m) & (at < k), other=0.0),)
        for i in gl.static_range(AT_ONCE):
            turn = begin + i
            if turn < TURNS:
                given = loaded[i]
                x = given.to(gl.float32)
                sums = gl.sum(gl.reshape(x, [WARPS, TOKENS, GROUPS, STEP // GROUPS]), 3)
                sum_bufs.index(turn).permute([1, 2, 0]).store(sums)
                if given.dtype == gl.bfloat16:
                    peak = gl.max(gl.abs(x), 2)
                    exponent = gl.maximum(peak.to(gl.int32, bitcast=True) & EXPONENT, LEAST_EXPONENT) - TO_FIT
                    factor = exponent.to(gl.float32, bitcast=True)
                    factor_bufs.index(turn).permute([1, 2, 0]).store(factor.expand_dims(2))
                    inverse = (TWO - exponent).to(gl.float32, bitcast=True)
                    given = (x * inverse.expand_dims(2)).to(gl.float16)
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
def _multiply(acc, words, scales, zeros, x, factor, x_sums, units,
              PARTS: gl.constexpr, GROUPS: gl.constexpr, FORM: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """acc + W x of a turn. Each group of columns is summed for itself and then scaled."""
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    sums = acc  # of a group; set by its first product
    for at in gl.static_range(2 * PARTS):
        part = parts_of(words[at // PARTS], PARTS)[at % PARTS]
        if FORM == E2M1 or FORM == NF4:
            numbers = looked_up(part, gl.float16, FORM)
        else:
            numbers = subnormals(part)
        product = mma_v2(as_batch(numbers, operand), x[at], gl.zeros_like(acc))
        sums = product if GROUPS > 1 or at == 0 else sums + product
        if GROUPS > 1 or at == 1:
            scale = scales[at % GROUPS].to(gl.float32).expand_dims(2)
            group = sums if factor is None else sums * factor
            x_sum = x_sums[at % GROUPS]
            if FORM == E2M1 or FORM == NF4:
                acc += group * scale
            elif FORM == INTEGER_ZEROS:
                zero = zeros[at % GROUPS].to(gl.float32).expand_dims(2)
                acc += (group * units - zero * x_sum) * scale
            elif FORM == FLOAT_OFFSETS:
                offset = zeros[at % GROUPS].to(gl.float32).expand_dims(2)
                acc += group * (units * scale) + x_sum * offset
            else:
                acc += (group * units - x_sum * MIDDLE) * scale
    return acc


@gluon.constexpr_function
def _may_end(slot, depth, turns):
    """Whether a pass over x may end with this slot of the ring."""
    return (slot + 1) % math.gcd(depth, turns) == 0


@gluon.jit
def _next_turn(band, turn, TURNS: gl.constexpr):
    turn += 1
    return gl.where(turn == TURNS, band + 1, band), gl.where(turn == TURNS, 0, turn)


@gluon.jit
def _store(own, acc, band, end_band, out_ptr, bias_ptr, residual_ptr, m, n,
           stride_out_m, stride_out_n, stride_residual_m, stride_residual_n, ACTIVATION: gl.constexpr, GATED: gl.constexpr):  # fmt: skip
    """A band's rows, of all warps' sums together. own: its half of the buffer; the band before may still be read from the other."""
    WARPS: gl.constexpr = own.shape[0]
    all_warps: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 4, 8], [1, WARPS, 1], [2, 1, 0])
    own.store(acc)
    if GATED:
        gate = gl.sum(own.slice(0, BAND // 2, 1).load(all_warps), 0)
        up = gl.sum(own.slice(BAND // 2, BAND // 2, 1).load(all_warps), 0)
        total = gl.reshape(gl.permute(gl.join(gate, up), [2, 0, 1]), [BAND, own.shape[2]])
    else:
        total = gl.sum(own.load(all_warps), 0)
    store_rows(out_ptr, bias_ptr, residual_ptr, total, band * BAND, end_band * BAND, 0, m, n,
               stride_out_m, stride_out_n, stride_residual_m, stride_residual_n, ACTIVATION, GATED)  # fmt: skip


@gluon.jit(do_not_specialize=["m", "num_bands", "num_workers"])
def w4a16_few(x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr,
              m, n, k, num_steps, row_stride, num_bands, num_workers, stride_x,
              stride_out_m, stride_out_n, stride_residual_m, stride_residual_n,
              GROUP_SIZE: gl.constexpr, FORM: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
              TOKENS: gl.constexpr, DEPTH: gl.constexpr, UNIT: gl.constexpr, TURNS: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """One worker: its share of W's `num_bands` bands of 16 rows. n: columns of out; row_stride: of scales and zeros [groups, rows].

    words: int32 [bands, 2 num_steps, 8, 4, 4], as `quant/hopper_weight.py` packs them. m: at most TOKENS, which is 1 or 8.
    """
    WARPS: gl.constexpr = num_warps
    WIDTH: gl.constexpr = 8
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    PARTS: gl.constexpr = max(BLOCK // GROUP_SIZE, 1)
    GROUPS: gl.constexpr = max(STEP // GROUP_SIZE, 1)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    own_sums = gl.allocate_shared_memory(gl.float32, [2, WARPS, BAND, WIDTH], flat)
    x_bufs = gl.allocate_shared_memory(
        gl.float16, [TURNS, WARPS, 2, 2, TOKENS, 4, 8], gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
    )
    factor_bufs = gl.allocate_shared_memory(gl.float32, [TURNS, 1, WARPS, TOKENS], flat)
    sum_bufs = gl.allocate_shared_memory(gl.float32, [TURNS, GROUPS, WARPS, TOKENS], flat)
    row = gl.arange(0, BAND, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))).expand_dims(0).expand_dims(2)
    units = gl.where(row < 8, UPPER, LOWER)

    gdc_launch_dependents()
    worker = gl.program_id(0)
    band = (worker.to(gl.int64) * num_bands // num_workers).to(gl.int32)
    end_band = ((worker + 1).to(gl.int64) * num_bands // num_workers).to(gl.int32)
    num_turns = (end_band - band) * TURNS
    ahead_band = band
    ahead_turn = 0
    ring = ()
    for _ in gl.static_range(DEPTH):
        ring = ring + (_fetch(words_ptr, scales_ptr, zeros_ptr, ahead_band, end_band, ahead_turn, num_steps, row_stride,
                              WARPS, GROUPS, FORM, layout),)  # fmt: skip
        ahead_band, ahead_turn = _next_turn(ahead_band, ahead_turn, TURNS)
    gdc_wait()  # the kernel before, which may write x, ends here; W is older
    _fill(x_ptr, m, k, stride_x, x_bufs, factor_bufs, sum_bufs, WARPS, TOKENS, TURNS, GROUPS)
    barrier()
    half = 0
    turn = 0
    acc = gl.zeros([WARPS, BAND, WIDTH], gl.float32, layout)
    for begin in range(0, num_turns, DEPTH):
        # A turn's registers are loaded anew as soon as they are read: a ring that moves would wait for what is on its way. The
        # compiler interleaves the turns of a unit; the condition keeps it from unpacking all, and from waiting for them, at once.
        for unit in gl.static_range(0, DEPTH, UNIT):
            if begin + unit < num_turns:
                for slot in gl.static_range(unit, unit + UNIT):
                    words, scales, zeros = ring[slot]
                    x = ()
                    for at in gl.static_range(2 * PARTS):
                        x = x + (_read_x(x_bufs.index(turn), at, PARTS, WIDTH, layout),)
                    factor = None
                    if x_ptr.dtype.element_ty == gl.bfloat16:
                        factor = factor_bufs.index(turn).permute([1, 0, 2]).load(layout)
                    x_sums = ()
                    for at in gl.static_range(GROUPS):
                        x_sums = x_sums + (sum_bufs.index(turn).slice(at, 1, 0).permute([1, 0, 2]).load(layout),)
                    acc = _multiply(acc, words, scales, zeros, x, factor, x_sums, units, PARTS, GROUPS, FORM, layout)
                    fetched = _fetch(words_ptr, scales_ptr, zeros_ptr, ahead_band, end_band, ahead_turn, num_steps, row_stride,
                                     WARPS, GROUPS, FORM, layout)  # fmt: skip
                    ring = ring[:slot] + (fetched,) + ring[slot + 1 :]
                    ahead_band, ahead_turn = _next_turn(ahead_band, ahead_turn, TURNS)
                    turn += 1
                    if _may_end(slot, DEPTH, TURNS):
                        if turn == TURNS:
                            _store(own_sums.index(half), acc, band, end_band, out_ptr, bias_ptr, residual_ptr, m, n,
                                   stride_out_m, stride_out_n, stride_residual_m, stride_residual_n, ACTIVATION, GATED)  # fmt: skip
                            acc = gl.zeros([WARPS, BAND, WIDTH], gl.float32, layout)
                            half = 1 - half
                            turn = 0
                            band += 1

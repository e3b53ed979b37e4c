"""What the sampling kernels share: how a row is read and weighed, its order as integers, and the race that draws a token.

A token's random number depends on seed, offset, row and column alone. The largest key p / E, E exponential, among any set of tokens
is a sample of that set (in logarithms the Gumbel trick, arXiv 1611.01144). So however the tokens that a filter keeps are found, the
winner among them is the same; and a winner of a larger set that lies in a smaller one has won there too.
"""

import triton
import triton.language as tl

from evenshare.device.arithmetic import INTERPRETED

ROUNDS = tl.constexpr(7)  # of Philox-4x32, the fewest that pass BigCrush (Salmon et al., SC 2011)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # float32


@triton.jit
def order(x):
    """int32 of the same order as float32, whatever the sign. NaN is above infinity."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def never_drawn(LOGITS: tl.constexpr):
    """The order, int64, of the largest value that no row draws: a probability of 0, a logit of -inf."""
    x = tl.zeros([], tl.float32)
    if LOGITS:
        x = x + float("-inf")
    return order(x).to(tl.int64)


@triton.jit
def load_columns(row_ptr, at, inside, stride, factor):
    """values * factor; -inf outside, which is never drawn."""
    return tl.load(row_ptr + at.to(tl.int64) * stride, mask=inside, other=float("-inf")).to(tl.float32) * factor


@triton.jit
def mass_of(x, top, LOGITS: tl.constexpr):
    """What a token weighs: its probability, or that of its logit but for the row's common factor. top: the row's largest logit."""
    mass = x
    if LOGITS:
        mass = tl.where(x == top, 1.0, tl.exp(x - top))
    return mass


@triton.jit
def add_mass(x, top, total, LOGITS: tl.constexpr):
    """(top', total'), the largest value and the mass of each lane; of logits by a running softmax sum, total of exp(x - top)."""
    larger = tl.maximum(top, x)
    if LOGITS:
        total = total * mass_of(top, larger, True) + mass_of(x, larger, True)
    else:
        total += tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return larger, total


@triton.jit
def join_mass(top, total, LOGITS: tl.constexpr):
    """The largest value and the mass of all lanes."""
    largest = tl.max(top, 0)
    if LOGITS:
        total = total * mass_of(top, largest, True)
    return largest, tl.sum(total, 0)


@triton.jit
def number_of(ptr, value, row):
    """A row's own float32, or the one of all rows."""
    zero = tl.zeros([], tl.float32)
    if ptr is None:
        return zero + value
    else:
        return zero + tl.load(ptr + row)


@triton.jit
def count_of(ptr, value, row):
    """A row's own integer, or the one of all rows."""
    zero = tl.zeros([], tl.int64)
    if ptr is None:
        return zero + value
    else:
        return zero + tl.load(ptr + row)


@triton.jit
def factor_of(temperature_ptr, temperature, row, LOGITS: tl.constexpr):
    """What logits are multiplied by. A temperature of 0 is greedy: small enough to leave the largest alone."""
    factor = tl.zeros([], tl.float32) + 1.0
    if LOGITS:
        factor = 1.0 / tl.maximum(number_of(temperature_ptr, temperature, row), 1e-6)
    return factor


@triton.jit
def source_of(indices_ptr, row, num_x_rows):
    """(the row of x that output `row` samples, whether there is one)."""
    source, exists = row, row >= 0
    if indices_ptr is not None:
        source = tl.load(indices_ptr + row).to(tl.int64)
        exists = (source >= 0) & (source < num_x_rows)
        source = tl.where(exists, source, 0)
    return source, exists


@triton.jit
def uniform(word):
    """In (0, 1), of 32 random bits: fine near 0, where races are won."""
    return tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)


@triton.jit
def random_words(counter, row, seed, offset, COUNT: tl.constexpr):
    """COUNT words, four for each of COUNT / 4 counters."""
    counter = counter.to(tl.uint32)
    zero = counter * 0
    low, high = zero + (offset & 0xFFFFFFFF).to(tl.uint32), zero + ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(seed, counter, zero + row.to(tl.uint32), low, high, ROUNDS)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [COUNT])


@triton.jit
def _log_approx(x):
    """In two instructions instead of twenty; the error is below 2^-22 between 1/2 and 2, and as relative beyond (PTX ISA, lg2.approx)."""
    if INTERPRETED:
        y = tl.log(x)
    else:
        y = (
            tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
            * 0.6931471805599453
        )
    return y


@triton.jit
def race_key(x, counter, row, seed, offset, LOGITS: tl.constexpr, BLOCK: tl.constexpr):
    """Keys of BLOCK tokens in fours of neighbours. counter: [BLOCK / 4], the column of each four's first token / 4."""
    u = uniform(random_words(counter, row, seed, offset, BLOCK))
    wait = tl.where(u < 0.015625, u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25))), -_log_approx(1.0 - u))
    key = x / wait
    if LOGITS:
        key = x - _log_approx(wait)
    return key


@triton.jit
def winner(best, best_at, axis: tl.constexpr):
    """The column of the largest key, the first one of equals; -1 if none was in the race, whose keys are all above -inf."""
    largest = tl.max(best, axis, keep_dims=True)
    return tl.min(tl.where(best == largest, best_at, 0x7FFFFFFF), axis)

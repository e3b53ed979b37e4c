"""What the sampling kernels share: a row read in blocks, its order as integers, its random numbers, and the search for a threshold.

Every filter keeps the tokens above some value: top-k those that fewer than k exceed, top-p those that less than p of the mass exceeds.
So nothing is sorted. Values are compared as integers of the same order (`order`), which a search can halve exactly.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)  # of Philox-4x32, the fewest that pass BigCrush (Salmon et al., SC 2011)


@triton.jit
def order(x):
    """int32 of the same order as float32, whatever the sign. NaN is above infinity."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_row(row_ptr, start, width, stride, factor, BLOCK: tl.constexpr):
    """(columns, values * factor) from `start` on; -inf beyond the row, which no filter keeps."""
    at = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + at.to(tl.int64) * stride, mask=at < width, other=float("-inf")).to(tl.float32)
    return at, x * factor


@triton.jit
def mass_of(x, top, LOGITS: tl.constexpr):
    """What a token weighs: its probability, or that of its logit but for the row's common factor. top: the row's largest logit."""
    mass = x
    if LOGITS:
        mass = tl.where(x == top, 1.0, tl.exp(x - top))
    return mass


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
def uniform(word):
    """In (0, 1), of 32 random bits: fine near 0, where races are won."""
    return tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)


@triton.jit
def random_words(start, row, seed, offset, COUNT: tl.constexpr):
    """COUNT words for numbers `start`, a multiple of 4, and following: the same ones in blocks of any size."""
    counter = (start // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
    zero = counter * 0
    low, high = zero + (offset & 0xFFFFFFFF).to(tl.uint32), zero + ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(seed, counter, zero + row.to(tl.uint32), low, high, ROUNDS)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [COUNT])


@triton.jit
def race_key(x, start, row, seed, offset, LOGITS: tl.constexpr, BLOCK: tl.constexpr):
    """A key for each token of a block, of which the largest among any set of tokens is a sample of that set.

    That is x / E with E exponential, or in logarithms the Gumbel trick (arXiv 1611.01144). The key does not depend on the set, so
    however a set is found, the winner in it is the same, and a winner of a larger set that lies in a smaller one wins there too.
    """
    u = uniform(random_words(start, row, seed, offset, BLOCK))
    wait = tl.where(u < 0.015625, u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25))), -tl.log(1.0 - u))
    key = x / wait
    if LOGITS:
        key = x - tl.log(wait)
    return key


@triton.jit
def threshold(row_ptr, width, stride, factor, top, low, high, mass_low, limit_mass, limit_count, LOGITS: tl.constexpr,
              PIVOTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """(low', mass): the kept tokens, those that less than limit_mass and fewer than limit_count exceed, are all of order > low'.

    None of order <= low may be kept, all of order >= high must be. mass_low: that of order > low. Each pass over the row cuts
    (low, high) into PIVOTS + 1 parts, until one token is left between them, or one value.
    """
    j = tl.arange(0, PIVOTS)
    count_low, count_high = low * 0 + width + 1, low * 0
    while (high - low > 1) & (count_low - count_high != 1):
        pivots = low + (high - low) * (j + 1) // (PIVOTS + 1)
        mass, count = above(row_ptr, width, stride, factor, top, pivots.to(tl.int32), LOGITS, PIVOTS, BLOCK)
        kept = (mass < limit_mass) & (count < limit_count)
        # The higher a pivot, the less is above it: those that fail come first.
        mass_low = tl.min(tl.where(kept, mass_low, mass), 0)
        count_low = tl.min(tl.where(kept, count_low, count), 0)
        count_high = tl.max(tl.where(kept, count, count_high), 0)
        low = tl.max(tl.where(kept, low, pivots), 0)
        high = tl.min(tl.where(kept, pivots, high), 0)
    return low, mass_low


@triton.jit
def above(row_ptr, width, stride, factor, top, pivots, LOGITS: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """(mass, number) of the tokens above each pivot, an order."""
    mass = tl.zeros([PIVOTS, BLOCK], tl.float32)
    count = tl.zeros([PIVOTS, BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        _, x = load_row(row_ptr, start, width, stride, factor, BLOCK)
        over = order(x)[None, :] > pivots[:, None]
        mass += tl.where(over, mass_of(x, top, LOGITS)[None, :], 0.0)
        count += over.to(tl.int32)
    return tl.sum(mass, 1), tl.sum(count, 1).to(tl.int64)

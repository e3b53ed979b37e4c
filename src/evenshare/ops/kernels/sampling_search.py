"""Which tokens filters keep. Nothing is sorted: all that is kept is above some value, which is searched for.

Top-k keeps the tokens that fewer than k exceed, top-p those that less than p of the mass exceeds. Values are compared as integers of
the same order, which a search can halve exactly. The row was surveyed before in groups of GROUP neighbours, and the largest order of
each is its peak: a scan reads only the groups that rise above what is already out, few in the rows that models give.
"""

import triton
import triton.language as tl

from evenshare.ops.kernels.sampling_rows import load_columns, mass_of, order, race_key, winner


@triton.jit
def _load_peaks(peaks_row, num_groups, GROUPS: tl.constexpr):
    g = tl.arange(0, GROUPS)
    return g, tl.load(peaks_row + g, mask=g < num_groups, other=-0x80000000)


@triton.jit
def bound(peaks_row, num_groups, low, high, k, GROUPS: tl.constexpr):
    """An order >= low that k groups, and so k tokens or more, exceed: top-k keeps nothing up to there."""
    _, peaks = _load_peaks(peaks_row, num_groups, GROUPS)
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.sum((peaks > middle).to(tl.int32), 0) >= k:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _select(peaks_row, groups_row, num_groups, low, GROUPS: tl.constexpr):
    """List the groups that rise above `low` in groups_row; returns how many."""
    g, peaks = _load_peaks(peaks_row, num_groups, GROUPS)
    rises = (peaks > low).to(tl.int32)
    tl.debug_barrier()  # the list before has been read
    tl.store(groups_row + tl.cumsum(rises, 0) - 1, g, mask=rises > 0)
    tl.debug_barrier()
    return tl.sum(rises, 0)


@triton.jit
def _load_groups(
    row_ptr, groups_row, first, num_listed, width, stride, factor, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """(columns, values, counters of `race_key`) of the listed groups from `first` on."""
    lane = tl.arange(0, BLOCK)
    slot = first + lane // GROUP
    group = tl.load(groups_row + slot, mask=slot < num_listed, other=0)
    at = group * GROUP + lane % GROUP
    four = tl.arange(0, BLOCK // 4)
    slot_of_four = first + four // (GROUP // 4)
    group_of_four = tl.load(groups_row + slot_of_four, mask=slot_of_four < num_listed, other=0)
    counter = group_of_four * (GROUP // 4) + four % (GROUP // 4)
    return at, load_columns(row_ptr, at, (slot < num_listed) & (at < width), stride, factor), counter


@triton.jit
def threshold(row_ptr, peaks_row, groups_row, num_groups, width, stride, factor, top, low, high, limit_mass, limit_count,
              LOGITS: tl.constexpr, PIVOTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """(low', mass): the kept tokens, those that less than limit_mass and fewer than limit_count exceed, are all of order > low'.

    None of order <= low may be kept, all of order >= high must be. Each scan cuts (low, high) into PIVOTS parts, until one token is
    left between them, or one value.
    """
    j = tl.arange(0, PIVOTS)
    mass_low = low.to(tl.float32)
    count_low, count_high = low * 0 - 1, low * 0 - 2  # not known
    while (count_low < 0) | ((high - low > 1) & (count_low - count_high != 1)):
        pivots = low + (high - low) * j // PIVOTS
        orders = pivots.to(tl.int32)
        masses, counts = tl.zeros([PIVOTS, BLOCK], tl.float32), tl.zeros([PIVOTS, BLOCK], tl.int32)
        num_listed = _select(peaks_row, groups_row, num_groups, low, GROUPS)
        for first in range(0, num_listed, BLOCK // GROUP):
            _, x, _ = _load_groups(row_ptr, groups_row, first, num_listed, width, stride, factor, GROUP, BLOCK)
            over = order(x)[None, :] > orders[:, None]
            masses += tl.where(over, mass_of(x, top, LOGITS)[None, :], 0.0)
            counts += over.to(tl.int32)
        mass, count = tl.sum(masses, 1), tl.sum(counts, 1).to(tl.int64)
        kept = (mass < limit_mass) & (count < limit_count)
        # The higher a pivot, the less is above it: those that are not kept come first, and the last of them is the new low.
        is_low = j == tl.maximum(PIVOTS - tl.sum(kept.to(tl.int32), 0) - 1, 0)
        mass_low = tl.sum(tl.where(is_low, mass, 0.0), 0)
        count_low = tl.sum(tl.where(is_low, count, 0), 0)
        count_high = tl.max(tl.where(kept, count, count_high), 0)
        low = tl.sum(tl.where(is_low, pivots, 0), 0)
        high = tl.min(tl.where(kept, pivots, high), 0)
    return low, mass_low


@triton.jit
def _order_at(row_ptr, column, stride, factor):
    return order(load_columns(row_ptr, tl.maximum(column, 0), column >= 0, stride, factor)).to(tl.int64)


@triton.jit
def narrow(row_ptr, peaks_row, groups_row, num_groups, width, stride, factor, top, row, seed, offset, low, high, token, limit_mass,
           limit_count, LOGITS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The winner among the kept tokens, as in `threshold`; `token` has won the whole row.

    A scan judges the winner so far, and finds the winners above it and above a pivot for when it is not kept.
    """
    j = tl.arange(0, 2)
    found = _order_at(row_ptr, token, stride, factor)
    while found < high:
        below = tl.maximum(found, low)
        pivots = tl.where(j == 0, below, below + (high - below) // 2)
        orders = pivots.to(tl.int32)
        masses, counts = tl.zeros([2, BLOCK], tl.float32), tl.zeros([2, BLOCK], tl.int32)
        best, best_at = tl.full([2, BLOCK], float("-inf"), tl.float32), tl.full([2, BLOCK], -1, tl.int32)
        num_listed = _select(peaks_row, groups_row, num_groups, below, GROUPS)
        for first in range(0, num_listed, BLOCK // GROUP):
            at, x, counter = _load_groups(row_ptr, groups_row, first, num_listed, width, stride, factor, GROUP, BLOCK)
            over = order(x)[None, :] > orders[:, None]
            masses += tl.where(over, mass_of(x, top, LOGITS)[None, :], 0.0)
            counts += over.to(tl.int32)
            key = race_key(x, counter, row, seed, offset, LOGITS, BLOCK)[None, :]
            better = over & (key > best)
            best, best_at = tl.where(better, key, best), tl.where(better, at[None, :], best_at)
        kept = (tl.sum(masses, 1) < limit_mass) & (tl.sum(counts, 1) < limit_count)
        kept = kept & (tl.where(j == 0, found, high) > low)  # a token that is not above low is out already
        token_kept = tl.max((kept & (j == 0)).to(tl.int32), 0) > 0
        pivot = tl.max(pivots, 0)
        pivot_kept = (tl.max((kept & (j == 1)).to(tl.int32), 0) > 0) | (pivot == below)
        if token_kept:
            high = found
        else:
            use = tl.where(pivot_kept, 0, 1)
            token = tl.sum(tl.where(j == use, winner(best, best_at, 1), 0), 0)
            low = tl.where(pivot_kept, below, pivot)
            high = tl.where(pivot_kept & (pivot > below), pivot, high)
            found = _order_at(row_ptr, token, stride, factor)
    return token

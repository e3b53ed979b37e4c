"""Sampling from rows of probabilities or logits, their softmax, and what filters keep of them.

A survey reads every row once, PART columns a program, so that few rows keep a GPU busy as well; parts depend on the width alone, and
so do sums. A program for each row then joins its parts and looks into the groups that matter (sampling_search.py).
"""

import triton
import triton.language as tl

from evenshare.ops.kernels.sampling_rows import (
    LOWEST,
    add_mass,
    count_of,
    factor_of,
    join_mass,
    load_columns,
    mass_of,
    never_drawn,
    number_of,
    order,
    race_key,
    source_of,
    winner,
)
from evenshare.ops.kernels.sampling_search import bound, narrow, threshold

NONE, NAN = tl.constexpr(-1), tl.constexpr(-2)  # of a part, in place of its winner's column


@triton.jit
def survey(x_ptr, indices_ptr, temperature_ptr, seed_ptr, offset_ptr, best_ptr, best_at_ptr, top_ptr, total_ptr, peaks_ptr,
           num_x_rows, width, num_parts, num_groups, stride_x_row, stride_x_dim, temperature,
           RACE: tl.constexpr, MASS: tl.constexpr, PEAKS: tl.constexpr, LOGITS: tl.constexpr,
           GROUP: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Of each part [rows, num_parts], what is asked for: the winner of the race, the largest value and the mass; and the peaks."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, _ = source_of(indices_ptr, row, num_x_rows)
    row_ptr = x_ptr + source * stride_x_row
    factor = factor_of(temperature_ptr, temperature, row, LOGITS)
    low = never_drawn(LOGITS).to(tl.int32)
    top, total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    best, best_at = tl.full([BLOCK], float("-inf"), tl.float32), tl.full([BLOCK], NONE, tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    if RACE:
        seed, offset = tl.load(seed_ptr), tl.load(offset_ptr)
    for start in range(part * PART, tl.minimum(part * PART + PART, width), BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = load_columns(row_ptr, at, at < width, stride_x_dim, factor)
        if MASS:
            top, total = add_mass(x, top, total, LOGITS)
        else:
            top = tl.maximum(top, x)
        if PEAKS:
            peaks = tl.max(tl.reshape(order(x), [BLOCK // GROUP, GROUP]), 1)
            group = start // GROUP + tl.arange(0, BLOCK // GROUP)
            tl.store(peaks_ptr + row * num_groups + group, peaks, mask=group < num_groups)
        if RACE:
            wrong |= (x != x).to(tl.int32)
            key = race_key(x, start // 4 + tl.arange(0, BLOCK // 4), row, seed, offset, LOGITS, BLOCK)
            better = (order(x) > low) & (key > best)
            best, best_at = tl.where(better, key, best), tl.where(better, at, best_at)
    place = row * num_parts + part
    largest, mass = join_mass(top, total, LOGITS)
    tl.store(top_ptr + place, largest)
    if MASS:
        tl.store(total_ptr + place, mass)
    if RACE:
        tl.store(best_ptr + place, tl.max(best, 0))
        tl.store(best_at_ptr + place, tl.where(tl.max(wrong, 0) > 0, NAN, winner(best, best_at, 0)))


@triton.jit
def _join_parts(top_ptr, total_ptr, row, num_parts, PARTS: tl.constexpr, MASS: tl.constexpr, LOGITS: tl.constexpr):
    """(largest value, mass) of a row; without MASS that is 0."""
    part = tl.arange(0, PARTS)
    there = part < num_parts
    top = tl.load(top_ptr + row * num_parts + part, mask=there, other=LOWEST)
    total = tl.zeros([PARTS], tl.float32)
    if MASS:
        total = tl.load(total_ptr + row * num_parts + part, mask=there, other=0.0)
    return join_mass(top, total, LOGITS)


@triton.jit
def softmax(x_ptr, out_ptr, temperature_ptr, top_ptr, total_ptr, width, num_parts, stride_x_row, stride_x_dim, stride_out_row,
            stride_out_dim, temperature, PARTS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out = softmax(x / temperature), after a survey."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    factor = factor_of(temperature_ptr, temperature, row, True)
    largest, mass = _join_parts(top_ptr, total_ptr, row, num_parts, PARTS, True, True)
    for start in range(part * PART, tl.minimum(part * PART + PART, width), BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = load_columns(x_ptr + row * stride_x_row, at, at < width, stride_x_dim, factor)
        y = mass_of(x, largest, True) / mass
        out = out_ptr + row * stride_out_row + at.to(tl.int64) * stride_out_dim
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def find_kept(x_ptr, top_k_ptr, top_p_ptr, top_ptr, total_ptr, peaks_ptr, groups_ptr, low_ptr, mass_ptr, width, num_parts, num_groups,
              stride_x_row, stride_x_dim, top_k, top_p, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, LOGITS: tl.constexpr,
              PARTS: tl.constexpr, PIVOTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The order above which top-k, and of that top-p, keeps every token of a row, and their mass; after a survey."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = x_ptr + row * stride_x_row
    peaks_row, groups_row = peaks_ptr + row * num_groups, groups_ptr + row * num_groups
    largest, mass = _join_parts(top_ptr, total_ptr, row, num_parts, PARTS, not LOGITS, LOGITS)
    low, high = never_drawn(LOGITS), order(largest).to(tl.int64)
    if HAS_TOP_K:
        k = count_of(top_k_ptr, top_k, row)
        if k < width:
            low = bound(peaks_row, num_groups, low, high, k, GROUPS)
            low, mass = threshold(row_ptr, peaks_row, groups_row, num_groups, width, stride_x_dim, 1.0, largest, low, high,
                                  tl.full([], float("inf"), tl.float32), k, LOGITS, PIVOTS, GROUPS, GROUP, BLOCK // 2)  # fmt: skip
    if HAS_TOP_P:
        p = number_of(top_p_ptr, top_p, row)
        if p < 1.0:
            low, mass = threshold(row_ptr, peaks_row, groups_row, num_groups, width, stride_x_dim, 1.0, largest, low, high,
                                  p * mass, width + 1, LOGITS, PIVOTS, GROUPS, GROUP, BLOCK // 2)  # fmt: skip
    tl.store(low_ptr + row, low.to(tl.int32))
    tl.store(mass_ptr + row, mass)


@triton.jit
def keep(x_ptr, out_ptr, low_ptr, mass_ptr, width, stride_x_row, stride_x_dim, stride_out_row, stride_out_dim,
         LOGITS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Of order > low, probabilities divided by the mass, logits as they are; others 0, or -inf."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low, mass = tl.load(low_ptr + row), tl.load(mass_ptr + row)
    for start in range(part * PART, tl.minimum(part * PART + PART, width), BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = load_columns(x_ptr + row * stride_x_row, at, at < width, stride_x_dim, 1.0)
        if LOGITS:
            y = tl.where(order(x) > low, x, float("-inf"))
        else:
            y = tl.where(order(x) > low, x / mass, 0.0)
        out = out_ptr + row * stride_out_row + at.to(tl.int64) * stride_out_dim
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def sample(x_ptr, out_ptr, valid_ptr, indices_ptr, top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr, seed_ptr, offset_ptr,
           best_ptr, best_at_ptr, top_ptr, total_ptr, peaks_ptr, groups_ptr, num_x_rows, width, num_parts, num_groups,
           stride_x_row, stride_x_dim, top_k, top_p, min_p, temperature,
           HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr, TOP_K_FIRST: tl.constexpr, LOGITS: tl.constexpr,
           PARTS: tl.constexpr, PIVOTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One token of each row, of those that the filters keep; after a survey. TOP_K_FIRST: top-p is of the mass that top-k keeps."""
    row = tl.program_id(0).to(tl.int64)
    source, exists = source_of(indices_ptr, row, num_x_rows)
    part = tl.arange(0, PARTS)
    there = part < num_parts
    best = tl.load(best_ptr + row * num_parts + part, mask=there, other=float("-inf"))
    best_at = tl.load(best_at_ptr + row * num_parts + part, mask=there, other=NONE)
    token = winner(best, best_at, 0)
    valid = exists & (token >= 0) & (tl.min(best_at, 0) > NAN)
    if HAS_TOP_K or HAS_TOP_P or HAS_MIN_P:
        if valid:
            row_ptr = x_ptr + source * stride_x_row
            peaks_row, groups_row = peaks_ptr + row * num_groups, groups_ptr + row * num_groups
            factor = factor_of(temperature_ptr, temperature, row, LOGITS)
            largest, mass = _join_parts(top_ptr, total_ptr, row, num_parts, PARTS, HAS_TOP_P, LOGITS)
            low, high = never_drawn(LOGITS), order(largest).to(tl.int64)
            limit_mass, limit_count = mass * 0 + float("inf"), low * 0 + width + 1
            if HAS_TOP_K:
                k = count_of(top_k_ptr, top_k, row)
                if k < width:
                    low = bound(peaks_row, num_groups, low, high, k, GROUPS)
                    if TOP_K_FIRST:
                        low, mass = threshold(row_ptr, peaks_row, groups_row, num_groups, width, stride_x_dim, factor, largest, low,
                                              high, limit_mass, k, LOGITS, PIVOTS, GROUPS, GROUP, BLOCK // 2)  # fmt: skip
                    else:
                        limit_count = k
            if HAS_TOP_P:
                p = number_of(top_p_ptr, top_p, row)
                limit_mass = tl.where(p < 1.0, p * mass, limit_mass)
            if HAS_MIN_P:
                p = number_of(min_p_ptr, min_p, row)
                least = largest + tl.log(p) if LOGITS else largest * p
                low = tl.maximum(low, tl.minimum(order(least).to(tl.int64), high) - 1)
            if (limit_mass == float("inf")) & (limit_count > width):
                high = low + 1
            seed, offset = tl.load(seed_ptr), tl.load(offset_ptr)
            token = narrow(row_ptr, peaks_row, groups_row, num_groups, width, stride_x_dim, factor, largest, row, seed, offset, low,
                           high, token, limit_mass, limit_count, LOGITS, GROUPS, GROUP, BLOCK)  # fmt: skip
    tl.store(out_ptr + row, tl.where(valid, token, 0).to(out_ptr.dtype.element_ty))
    if valid_ptr is not None:
        tl.store(valid_ptr + row, valid)

"""Sampling from rows of probabilities or logits, their softmax and what filters keep of them: a program for each row, nothing sorted."""

import triton
import triton.language as tl

from evenshare.ops.kernels.sampling_rows import (
    count_of,
    load_row,
    mass_of,
    number_of,
    order,
    race_key,
    random_words,
    threshold,
    uniform,
)

LOWEST = tl.constexpr(-3.4028234663852886e38)  # float32


@triton.jit
def _add_online(x, top, total):
    """(top', total') of a running softmax sum, for each lane: total of exp(x - top)."""
    larger = tl.maximum(top, x)
    return larger, total * mass_of(top, larger, True) + mass_of(x, larger, True)


@triton.jit
def _join_online(top, total):
    """One (top, total) of all lanes."""
    largest = tl.max(top, 0)
    return largest, tl.sum(total * mass_of(top, largest, True), 0)


@triton.jit
def _factor(temperature_ptr, temperature, row):
    """A temperature of 0 is greedy: small enough to leave the largest logit alone."""
    return 1.0 / tl.maximum(number_of(temperature_ptr, temperature, row), 1e-6)


@triton.jit
def _winner(best, best_at, axis: tl.constexpr):
    """The column of the largest key, the first one of equals; -1 if none was in the race, whose keys are all above -inf."""
    largest = tl.max(best, axis, keep_dims=True)
    return tl.min(tl.where(best == largest, best_at, 0x7FFFFFFF), axis)


@triton.jit
def _order_at(row_ptr, column, stride, factor):
    x = tl.load(row_ptr + tl.maximum(column, 0).to(tl.int64) * stride).to(tl.float32)
    return order(x * factor).to(tl.int64)


@triton.jit
def softmax(x_ptr, out_ptr, temperature_ptr, width, stride_x_row, stride_x_dim, stride_out_row, stride_out_dim, temperature,
            BLOCK: tl.constexpr):  # fmt: skip
    """out = softmax(x / temperature)."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr, out_row = x_ptr + row * stride_x_row, out_ptr + row * stride_out_row
    factor = _factor(temperature_ptr, temperature, row)
    top, total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        _, x = load_row(row_ptr, start, width, stride_x_dim, factor, BLOCK)
        top, total = _add_online(x, top, total)
    largest, mass = _join_online(top, total)
    for start in range(0, width, BLOCK):
        at, x = load_row(row_ptr, start, width, stride_x_dim, factor, BLOCK)
        y = mass_of(x, largest, True) / mass
        tl.store(out_row + at.to(tl.int64) * stride_out_dim, y.to(out_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def keep(x_ptr, out_ptr, top_k_ptr, top_p_ptr, width, stride_x_row, stride_x_dim, stride_out_row, stride_out_dim, top_k, top_p,
         HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, LOGITS: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Probabilities: of top-k, and of that top-p, with sum 1, others 0. Logits: those of top-k as they are, others -inf."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr, out_row = x_ptr + row * stride_x_row, out_ptr + row * stride_out_row
    top, total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        _, x = load_row(row_ptr, start, width, stride_x_dim, 1.0, BLOCK)
        top = tl.maximum(top, x)
        if not LOGITS:
            total += tl.where(order(x) > 0, x, 0.0)
    largest, mass = tl.max(top, 0), tl.sum(total, 0)
    high = order(largest).to(tl.int64)
    low = order(tl.full([], float("-inf"), tl.float32) if LOGITS else tl.zeros([], tl.float32)).to(tl.int64)
    if HAS_TOP_K:
        k = count_of(top_k_ptr, top_k, row)
        if k < width:
            low, mass = threshold(
                row_ptr, width, stride_x_dim, 1.0, largest, low, high, mass, float("inf"), k, LOGITS, PIVOTS, BLOCK
            )
    if HAS_TOP_P:
        p = number_of(top_p_ptr, top_p, row)
        if p < 1.0:
            low, mass = threshold(
                row_ptr, width, stride_x_dim, 1.0, largest, low, high, mass, p * mass, width + 1, LOGITS, PIVOTS, BLOCK
            )
    for start in range(0, width, BLOCK):
        at, x = load_row(row_ptr, start, width, stride_x_dim, 1.0, BLOCK)
        if LOGITS:
            y = tl.where(order(x) > low, x, float("-inf"))
        else:
            y = tl.where(order(x) > low, x / mass, 0.0)
        tl.store(out_row + at.to(tl.int64) * stride_out_dim, y.to(out_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def sample(x_ptr, out_ptr, valid_ptr, indices_ptr, top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr, seed_ptr, offset_ptr,
           num_x_rows, width, stride_x_row, stride_x_dim, top_k, top_p, min_p, temperature,
           HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr, TOP_K_FIRST: tl.constexpr,
           LOGITS: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One token of each row, of those that the filters keep.

    The first pass over the row finds its mass, its maximum and the winner of the whole row (`race_key`). That is the sample unless a
    filter drops it. A further pass says so, finds the winners above it and above a pivot, and leaves less to search; what passes
    are made does not change the sample. TOP_K_FIRST: top-p is of the mass that top-k keeps, and not of the row's.
    """
    row = tl.program_id(0).to(tl.int64)
    seed, offset = tl.load(seed_ptr), tl.load(offset_ptr)
    source, exists = row, row >= 0
    if indices_ptr is not None:
        source = tl.load(indices_ptr + row).to(tl.int64)
        exists = (source >= 0) & (source < num_x_rows)
        source = tl.where(exists, source, 0)
    row_ptr = x_ptr + source * stride_x_row
    factor = 1.0
    if LOGITS:
        factor = _factor(temperature_ptr, temperature, row)
    NEEDS_MASS: tl.constexpr = HAS_TOP_P or TOP_K_FIRST
    NEEDS_MAX: tl.constexpr = HAS_TOP_K or HAS_TOP_P or HAS_MIN_P
    low = order(tl.full([], float("-inf"), tl.float32) if LOGITS else tl.zeros([], tl.float32)).to(tl.int64)
    top, total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    best, best_at = tl.full([BLOCK], float("-inf"), tl.float32), tl.full([BLOCK], -1, tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        at, x = load_row(row_ptr, start, width, stride_x_dim, factor, BLOCK)
        wrong |= (x != x).to(tl.int32)
        if NEEDS_MASS and LOGITS:
            top, total = _add_online(x, top, total)
        elif NEEDS_MAX:
            top = tl.maximum(top, x)
        if NEEDS_MASS and not LOGITS:
            total += tl.where(order(x) > low, x, 0.0)
        key = race_key(x, start, row, seed, offset, LOGITS, BLOCK)
        better = (order(x) > low) & (key > best)
        best, best_at = tl.where(better, key, best), tl.where(better, at, best_at)
    token = _winner(best, best_at, 0)
    valid = exists & (token >= 0) & (tl.max(wrong, 0) == 0)
    if NEEDS_MAX:
        if valid:
            largest, mass = tl.max(top, 0), tl.sum(total, 0)
            if NEEDS_MASS and LOGITS:
                largest, mass = _join_online(top, total)
            high = order(largest).to(tl.int64)
            limit_mass, limit_count = mass * 0 + float("inf"), low * 0 + width + 1
            if HAS_TOP_K:
                limit_count = count_of(top_k_ptr, top_k, row)
                if TOP_K_FIRST:
                    if limit_count < width:
                        low, mass = threshold(row_ptr, width, stride_x_dim, factor, largest, low, high, mass, limit_mass, limit_count,
                                              LOGITS, PIVOTS, BLOCK)  # fmt: skip
                    limit_count = low * 0 + width + 1
            if HAS_TOP_P:
                p = number_of(top_p_ptr, top_p, row)
                limit_mass = tl.where(p < 1.0, p * mass, limit_mass)
            if HAS_MIN_P:
                p = number_of(min_p_ptr, min_p, row)
                least = largest + tl.log(p) if LOGITS else largest * p
                low = tl.maximum(low, tl.minimum(order(least).to(tl.int64), high) - 1)
            if (limit_mass == float("inf")) & (limit_count >= width):
                high = low + 1
            token = _narrow(row_ptr, width, stride_x_dim, factor, largest, row, seed, offset, low, high, token, limit_mass, limit_count,
                            LOGITS, BLOCK)  # fmt: skip
    tl.store(out_ptr + row, tl.where(valid, token, 0).to(out_ptr.dtype.element_ty))
    if valid_ptr is not None:
        tl.store(valid_ptr + row, valid)


@triton.jit
def _narrow(row_ptr, width, stride, factor, largest, row, seed, offset, low, high, token, limit_mass, limit_count,
            LOGITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The winner among the kept tokens: none of order <= low, all of order >= high; `token` is the winner of the whole row."""
    j = tl.arange(0, 2)
    found = _order_at(row_ptr, token, stride, factor)
    while found < high:
        below = tl.maximum(found, low)
        pivots = tl.where(j == 0, below, below + (high - below) // 2)
        orders = pivots.to(tl.int32)
        mass, count = tl.zeros([2, BLOCK], tl.float32), tl.zeros([2, BLOCK], tl.int32)
        best, best_at = tl.full([2, BLOCK], float("-inf"), tl.float32), tl.full([2, BLOCK], -1, tl.int32)
        for start in range(0, width, BLOCK):
            at, x = load_row(row_ptr, start, width, stride, factor, BLOCK)
            if tl.max(order(x), 0) > below:
                over = order(x)[None, :] > orders[:, None]
                mass += tl.where(over, mass_of(x, largest, LOGITS)[None, :], 0.0)
                count += over.to(tl.int32)
                key = race_key(x, start, row, seed, offset, LOGITS, BLOCK)[None, :]
                better = over & (key > best)
                best, best_at = tl.where(better, key, best), tl.where(better, at[None, :], best_at)
        kept = (tl.sum(mass, 1) < limit_mass) & (tl.sum(count, 1) < limit_count)
        kept = kept & (tl.where(j == 0, found, high) > low)  # a token that is not above low is out already
        token_kept = tl.max((kept & (j == 0)).to(tl.int32), 0) > 0
        pivot_kept = tl.max((kept & (j == 1)).to(tl.int32), 0) > 0
        pivot = tl.max(pivots, 0)
        if token_kept:
            high = found
        else:
            use = tl.where(pivot_kept | (pivot == below), 0, 1)
            token = tl.sum(tl.where(j == use, _winner(best, best_at, 1), 0), 0)
            low = tl.where(use == 0, below, pivot)
            high = tl.where(pivot_kept & (pivot > below), pivot, high)
            found = _order_at(row_ptr, token, stride, factor)
    return token


@triton.jit
def verify_chain(draft_ptr, ids_ptr, target_ptr, out_ptr, accepted_ptr, emitted_ptr, seed_ptr, offset_ptr, num_draft, width,
                 stride_draft_row, stride_draft_token, stride_draft_dim, stride_ids_row, stride_ids_token,
                 stride_target_row, stride_target_token, stride_target_dim, BLOCK_DRAFT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Speculative sampling of one request a program (arXiv 2211.17192): the drafts up to the first that is refused, and one token."""
    row = tl.program_id(0).to(tl.int64)
    seed, offset = tl.load(seed_ptr), tl.load(offset_ptr)
    n = tl.arange(0, BLOCK_DRAFT)
    there = n < num_draft
    ids = tl.load(ids_ptr + row * stride_ids_row + n.to(tl.int64) * stride_ids_token, mask=there, other=-1).to(tl.int64)
    known = there & (ids >= 0) & (ids < width)
    draft_row, target_row = draft_ptr + row * stride_draft_row, target_ptr + row * stride_target_row
    at = n.to(tl.int64)
    p = tl.load(draft_row + at * stride_draft_token + ids * stride_draft_dim, mask=known, other=0.0).to(tl.float32)
    q = tl.load(target_row + at * stride_target_token + ids * stride_target_dim, mask=known, other=0.0).to(tl.float32)
    # Beyond the counters of tokens, which are below 2^31 / 4.
    u = uniform(random_words(0x70000000, row, seed, offset, BLOCK_DRAFT))
    accepted = known & (u * p < q)
    emitted = tl.min(tl.where(accepted, num_draft, tl.minimum(n, num_draft)), 0)
    width_draft = tl.where(emitted < num_draft, width, 0)
    target_row += emitted.to(tl.int64) * stride_target_token
    draft_row += emitted.to(tl.int64) * stride_draft_token
    best, best_at = tl.full([BLOCK], float("-inf"), tl.float32), tl.full([BLOCK], -1, tl.int32)
    spare, spare_at = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        columns, y = load_row(target_row, start, width, stride_target_dim, 1.0, BLOCK)
        _, x = load_row(draft_row, start, width_draft, stride_draft_dim, 1.0, BLOCK)
        rest = y - tl.maximum(x, 0.0)
        key = race_key(rest, start, row, seed, offset, False, BLOCK)
        better = (rest > 0) & (key > best)
        best, best_at = tl.where(better, key, best), tl.where(better, columns, best_at)
        likelier = y > spare
        spare, spare_at = tl.where(likelier, y, spare), tl.where(likelier, columns, spare_at)
    token = _winner(best, best_at, 0)
    # Rounding can leave nothing of the difference; the target's likeliest token is then as good as any.
    token = tl.where(token < 0, _winner(spare, spare_at, 0), token)
    out_row = out_ptr + row * (num_draft + 1)
    tl.store(
        out_row + n, tl.where(n < emitted, ids, tl.where(n == emitted, token, -1)).to(tl.int32), mask=n <= num_draft
    )
    tl.store(accepted_ptr + row, tl.load(accepted_ptr + row) + tl.sum(accepted.to(tl.int32), 0))
    tl.store(emitted_ptr + row, tl.load(emitted_ptr + row) + emitted)

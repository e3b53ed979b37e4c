"""Speculative sampling (arXiv 2211.17192): drafts are judged, a token is drawn from what is left where they end, and put behind them."""

import triton
import triton.language as tl

from evenshare.ops.kernels.sampling_rows import LOWEST, load_columns, race_key, random_words, uniform, winner

JUDGES = tl.constexpr(0x1C000000)  # first counter of the numbers that judge drafts; those of tokens are below 2^31 / 4


@triton.jit
def judge_drafts(draft_ptr, ids_ptr, target_ptr, out_ptr, end_ptr, accepted_ptr, emitted_ptr, seed_ptr, offset_ptr, num_draft, width,
                 stride_draft_row, stride_draft_token, stride_draft_dim, stride_ids_row, stride_ids_token,
                 stride_target_row, stride_target_token, stride_target_dim, BLOCK: tl.constexpr):  # fmt: skip
    """Of each request, the drafts up to the first that is refused, -1 behind them, and how many they are. BLOCK > num_draft."""
    row = tl.program_id(0).to(tl.int64)
    seed, offset = tl.load(seed_ptr), tl.load(offset_ptr)
    n = tl.arange(0, BLOCK)
    at = n.to(tl.int64)
    there = n < num_draft
    ids = tl.load(ids_ptr + row * stride_ids_row + at * stride_ids_token, mask=there, other=-1).to(tl.int64)
    known = there & (ids >= 0) & (ids < width)
    draft = draft_ptr + row * stride_draft_row + at * stride_draft_token + ids * stride_draft_dim
    target = target_ptr + row * stride_target_row + at * stride_target_token + ids * stride_target_dim
    p, q = tl.load(draft, mask=known, other=0.0).to(tl.float32), tl.load(target, mask=known, other=0.0).to(tl.float32)
    u = uniform(random_words(tl.arange(0, BLOCK // 4) + JUDGES, row, seed, offset, BLOCK))
    accepted = known & (u * p < q)
    end = tl.min(tl.where(accepted, num_draft, tl.minimum(n, num_draft)), 0)
    tl.store(out_ptr + row * (num_draft + 1) + n, tl.where(n < end, ids, -1).to(tl.int32), mask=n <= num_draft)
    tl.store(end_ptr + row, end)
    tl.store(accepted_ptr + row, tl.load(accepted_ptr + row) + tl.sum(accepted.to(tl.int32), 0))
    tl.store(emitted_ptr + row, tl.load(emitted_ptr + row) + end)


@triton.jit
def survey_rest(draft_ptr, target_ptr, end_ptr, best_ptr, best_at_ptr, spare_ptr, spare_at_ptr, seed_ptr, offset_ptr, num_draft, width,
                num_parts, stride_draft_row, stride_draft_token, stride_draft_dim, stride_target_row, stride_target_token,
                stride_target_dim, PART: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The winner of each part of max(target - draft, 0) where drafts end, and the target's likeliest token, for when nothing is left."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seed, offset = tl.load(seed_ptr), tl.load(offset_ptr)
    end = tl.load(end_ptr + row)
    width_draft = tl.where(end < num_draft, width, 0)  # behind the last draft there is none
    target_row = target_ptr + row * stride_target_row + end.to(tl.int64) * stride_target_token
    draft_row = draft_ptr + row * stride_draft_row + end.to(tl.int64) * stride_draft_token
    best, best_at = tl.full([BLOCK], float("-inf"), tl.float32), tl.full([BLOCK], -1, tl.int32)
    spare, spare_at = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(part * PART, tl.minimum(part * PART + PART, width), BLOCK):
        at = start + tl.arange(0, BLOCK)
        y = load_columns(target_row, at, at < width, stride_target_dim, 1.0)
        x = load_columns(draft_row, at, at < width_draft, stride_draft_dim, 1.0)
        rest = y - tl.maximum(x, 0.0)
        key = race_key(rest, start // 4 + tl.arange(0, BLOCK // 4), row, seed, offset, False, BLOCK)
        better = (rest > 0) & (key > best)
        best, best_at = tl.where(better, key, best), tl.where(better, at, best_at)
        likelier = y > spare
        spare, spare_at = tl.where(likelier, y, spare), tl.where(likelier, at, spare_at)
    place = row * num_parts + part
    tl.store(best_ptr + place, tl.max(best, 0))
    tl.store(best_at_ptr + place, winner(best, best_at, 0))
    tl.store(spare_ptr + place, tl.max(spare, 0))
    tl.store(spare_at_ptr + place, winner(spare, spare_at, 0))


@triton.jit
def place_token(
    out_ptr, end_ptr, best_ptr, best_at_ptr, spare_ptr, spare_at_ptr, num_draft, num_parts, PARTS: tl.constexpr
):
    """Rounding can leave nothing of the difference; the target's likeliest token is then as good as any."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    place, there = row * num_parts + part, part < num_parts
    best = tl.load(best_ptr + place, mask=there, other=float("-inf"))
    token = winner(best, tl.load(best_at_ptr + place, mask=there, other=-1), 0)
    if token < 0:
        spare = tl.load(spare_ptr + place, mask=there, other=float("-inf"))
        token = winner(spare, tl.load(spare_at_ptr + place, mask=there, other=0), 0)
    tl.store(out_ptr + row * (num_draft + 1) + tl.load(end_ptr + row), token)

"""Attention in plain torch: the CPU backend, and the oracle of the tests.

Two ways to the same numbers. `torch.nn.functional.scaled_dot_product_attention` computes in the input's dtype with fp32
sums (for 16-bit inputs the probabilities are rounded to 16 bits before they meet V, as in the kernels): error about
1.5 roundings of the output. It serves every call that wants no lse, no soft cap and no `compute_dtype`. The explicit
formula serves the others: 16-bit inputs are widened to fp32, so only the final rounding remains; with
`compute_dtype=torch.float64` it is the oracle.

Masks never meet an empty row: rows without keys are written first (o = 0, lse = -inf) and taken out, so no NaN can
arise from them. Keys outside every row's range are sliced away, not masked, and keys past a request's length are never
used. float8_e4m3fn keys and values go through the formula, widened and scaled, and
such queries too, whose scale is in that of the keys. Variants go through the formula as well; a row all of whose keys they
hide is a row without keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from evenshare.attention.formula import Rule, clear_rows, formula, widened

if TYPE_CHECKING:
    from evenshare.attention.variants.eager import Place
    from evenshare.attention.variants.variant import Variant

# Elements of the largest intermediate (scores or mask) of one chunk of rows: 64 MiB in fp32.
MAX_CHUNK = 1 << 24


def ragged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: Sequence[int],
    kv_indptr: Sequence[int],
    *,
    causal: bool,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    variant: Variant | None = None,
    first_request: int = 0,
) -> None:
    """Write the attention of every request of a ragged batch into `out` (and `lse`).

    q: [total_q, Hq, D]; k: [total_kv, Hkv, D]; v: [total_kv, Hkv, Dv]; any strides. Request r has the query rows
    [qo_indptr[r], qo_indptr[r + 1]) and the keys [kv_indptr[r], kv_indptr[r + 1]); both are trusted.
    out: [total_q, Hq, Dv], any strides; rows that no request owns become 0.
    lse: float32 [total_q, Hq], natural logarithm, or None.
    k_scale, v_scale: factors of k and v, one or one for each KV head, if these are float8_e4m3fn; None: 1. q may then be
    float8_e4m3fn too; k_scale is its factor times that of k.
    compute_dtype: None computes as the module says; torch.float64 is the oracle.
    variant: see `evenshare.Variant`; first_request: the number that its functions know the first request by.
    """
    rule = Rule(causal, window_left, logits_soft_cap, sm_scale, k_scale, v_scale, compute_dtype, variant)
    _clear_unowned_rows(out, lse, qo_indptr)
    for r in range(len(qo_indptr) - 1):
        rows, keys = slice(qo_indptr[r], qo_indptr[r + 1]), slice(kv_indptr[r], kv_indptr[r + 1])
        _request(q[rows], k[keys], v[keys], rule, out[rows], None if lse is None else lse[rows], first_request + r)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: Sequence[int],
    page_lists: Sequence[torch.Tensor | slice],
    kv_lens: Sequence[int],
    *,
    causal: bool,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    variant: Variant | None = None,
    first_request: int = 0,
) -> None:
    """`ragged_attention` with keys in pages.

    k_cache: [num_pages, page_size, Hkv, D]; v_cache: [num_pages, page_size, Hkv, Dv]; any strides, so an HND cache is
    passed as a transposed view. page_lists[r]: request r's page ids in order (integer tensor of at least
    ceil(kv_lens[r] / page_size) entries; further ones are ignored), or a slice for consecutive pages. Consecutive pages
    of a dense cache are read in place, others are gathered.

    Raises ValueError, before anything is written, if a needed page is outside the cache.
    """
    rule = Rule(causal, window_left, logits_soft_cap, sm_scale, k_scale, v_scale, compute_dtype, variant)
    num_pages, page_size = k_cache.shape[0], k_cache.shape[1]
    pages = [
        _needed_pages(page_lists[r], -(-kv_len // page_size), num_pages, request=r) for r, kv_len in enumerate(kv_lens)
    ]
    _clear_unowned_rows(out, lse, qo_indptr)
    for r, kv_len in enumerate(kv_lens):
        rows = slice(qo_indptr[r], qo_indptr[r + 1])
        k, v = _gather(k_cache, pages[r], kv_len), _gather(v_cache, pages[r], kv_len)
        _request(q[rows], k, v, rule, out[rows], None if lse is None else lse[rows], first_request + r)


def paged_mla(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv: torch.Tensor,
    kpe: torch.Tensor,
    qo_indptr: Sequence[int],
    page_lists: Sequence[torch.Tensor | slice],
    kv_lens: Sequence[int],
    *,
    causal: bool,
    sm_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """`paged_attention` over latents: keys [ckv | kpe] of one KV head, whose values are the ckv.

    q_nope, out: [total_q, H, C]; q_pe: [total_q, H, R]; ckv: [num_pages, page_size, C]; kpe: [num_pages, page_size, R].
    """
    rule = Rule(causal, -1, None, sm_scale, None, None, None)
    num_pages, page_size = ckv.shape[0], ckv.shape[1]
    pages = [
        _needed_pages(page_lists[r], -(-kv_len // page_size), num_pages, request=r) for r, kv_len in enumerate(kv_lens)
    ]
    q = torch.cat([q_nope, q_pe], -1)
    _clear_unowned_rows(out, lse, qo_indptr)
    for r, kv_len in enumerate(kv_lens):
        rows = slice(qo_indptr[r], qo_indptr[r + 1])
        latents, rotary = (_gather(cache, pages[r], kv_len).unsqueeze(1) for cache in (ckv, kpe))
        keys = torch.cat([latents, rotary], -1)
        _request(q[rows], keys, latents, rule, out[rows], None if lse is None else lse[rows], r)


def _clear_unowned_rows(out: torch.Tensor, lse: torch.Tensor | None, qo_indptr: Sequence[int]) -> None:
    for begin, end in ((0, qo_indptr[0]), (qo_indptr[-1], out.shape[0])):
        if end > begin:
            clear_rows(out[begin:end], None if lse is None else lse[begin:end])


def _needed_pages(pages: torch.Tensor | slice, needed: int, num_pages: int, request: int) -> torch.Tensor | slice:
    """The first `needed` page ids, as a slice if they are consecutive; all are inside the cache."""
    if needed == 0:
        return slice(0, 0)
    if isinstance(pages, slice):
        low, high = pages.start, pages.start + needed - 1
        pages = slice(low, high + 1)
    else:
        pages = pages[:needed]
        ids = pages.tolist()
        low, high = min(ids), max(ids)
        if ids == list(range(low, low + needed)):
            pages = slice(low, low + needed)
    if low < 0 or high >= num_pages:
        wrong = low if low < 0 else high
        raise ValueError(f"page of request {request}: got {wrong}, want 0 to {num_pages - 1} (the cache's pages)")
    return pages


def _gather(cache: torch.Tensor, pages: torch.Tensor | slice, kv_len: int) -> torch.Tensor:
    """[kv_len, Hkv, D]: a view if the pages are consecutive and the cache is dense, else a copy."""
    block = cache[pages] if isinstance(pages, slice) else cache.index_select(0, pages)
    return block.flatten(0, 1)[:kv_len]


def _request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: Rule,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    number: int,
) -> None:
    """Request `number`: q [n, Hq, D], k [m, Hkv, D], v [m, Hkv, Dv] -> out [n, Hq, Dv], lse [n, Hq]."""
    num_rows, num_keys = q.shape[0], k.shape[0]
    fp8 = k.dtype == torch.float8_e4m3fn
    k, v = widened(k, "key", rule.k_scale, rule, number), widened(v, "value", rule.v_scale, rule, number)
    shift = num_keys - num_rows  # bottom-right aligned: the last key that row i sees, if causal, is shift + i
    empty = num_rows if num_keys == 0 else min(num_rows, max(0, -shift)) if rule.causal else 0
    if empty:
        clear_rows(out[:empty], None if lse is None else lse[:empty])
    explicit = lse is not None or bool(rule.logits_soft_cap) or rule.compute_dtype is not None or fp8
    explicit |= rule.variant is not None
    windowed = 0 <= rule.window_left < num_keys - 1
    if rule.causal and not (explicit or windowed) and num_rows - empty == num_keys > 1:
        return _fused_square_causal(q[empty:], k, v, out[empty:], rule.sm_scale)
    chunk = max(1, MAX_CHUNK // max(num_keys * (q.shape[1] if explicit else 1), 1))
    for begin in range(empty, num_rows, chunk):
        end = min(begin + chunk, num_rows)
        last = shift + end if rule.causal else num_keys
        first = max(0, shift + begin - rule.window_left) if windowed else 0
        mask = _mask(range(shift + begin, shift + end), range(first, last), rule, q.device)
        rows, keys, values = slice(begin, end), k[first:last], v[first:last]
        if explicit:
            place = _place(number, q.shape[1], range(shift + begin, shift + end), range(first, last), q.device)
            formula(q[rows], keys, values, mask, rule, place, out[rows], None if lse is None else lse[rows])
        else:
            _fused(q[rows], keys, values, mask, out[rows], rule.sm_scale)


def _mask(rows: range, keys: range, rule: Rule, device: torch.device) -> torch.Tensor | None:
    """Bool [rows, keys], True where the row sees the key; None if all do. A row's number is its last causal key."""
    below = rule.causal and keys.stop - 1 > rows.start
    above = 0 <= rule.window_left < rows.stop - 1 - keys.start
    if not (below or above):
        return None
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)[None, :]
    if not above:
        return key <= row
    seen = key + rule.window_left >= row
    return seen & (key <= row) if below else seen


def _place(request: int, num_heads: int, rows: range, keys: range, device: torch.device) -> Place:
    from evenshare.attention.variants.eager import Place

    spans = (range(num_heads), rows, keys)
    return Place(request, *(torch.arange(span.start, span.stop, device=device) for span in spans))


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor, sm_scale: float
) -> None:
    num_rows, num_kv_heads, group = q.shape[0], k.shape[1], q.shape[1] // k.shape[1]
    by_kv_head = (num_rows, num_kv_heads, group, -1)
    # Packed rows as well: torch's CPU kernel converts the keys once per query head that it is given. For 9 and 3 heads,
    # D = 64, 2048 keys in bf16 that is 178 us against 1100 us.
    packed = q.view(by_kv_head) if num_rows == 1 else q.view(by_kv_head).permute(1, 2, 0, 3).flatten(1, 2).unsqueeze(0)
    if mask is not None:
        mask = mask.repeat(group, 1)
    keys, values = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
    heads = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=sm_scale)
    if num_rows > 1:
        heads = heads.view(num_kv_heads, group, num_rows, -1).permute(2, 0, 1, 3)
    out.view(by_kv_head).copy_(heads)


def _fused_square_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, sm_scale: float) -> None:
    """As many rows as keys: torch's own causal mask is the bottom-right one, and skips the upper half."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    result = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=sm_scale, enable_gqa=gqa)
    out.copy_(result.squeeze(0).transpose(0, 1))

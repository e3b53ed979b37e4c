"""Attention in plain torch: the CPU backend, and the oracle of the tests.

Two ways to the same numbers. `torch.nn.functional.scaled_dot_product_attention` computes in the input's dtype with fp32
sums (for 16-bit inputs the probabilities are rounded to 16 bits before they meet V, as in the kernels): error about
1.5 roundings of the output. It serves every call that wants no lse, no soft cap and no `compute_dtype`. The explicit
formula serves the others: 16-bit inputs are widened to fp32, so only the final rounding remains; with
`compute_dtype=torch.float64` it is the oracle.

Masks never meet an empty row: rows without keys are written first (o = 0, lse = -inf) and taken out, so no NaN can arise
from them. Keys outside every row's range are sliced away, not masked, and keys past a request's length are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

# Scores of one chunk of rows: 2^24 fp32 elements are 64 MiB, and chunks of that size cost nothing in speed.
MAX_SCORES = 1 << 24


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
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Write the attention of every request of a ragged batch into `out` (and `lse`).

    q: [total_q, Hq, D]; k: [total_kv, Hkv, D]; v: [total_kv, Hkv, Dv]; any strides. Request r has the query rows
    [qo_indptr[r], qo_indptr[r + 1]) and the keys [kv_indptr[r], kv_indptr[r + 1]); both are trusted.
    out: [total_q, Hq, Dv], any strides; rows that no request owns become 0.
    lse: float32 [total_q, Hq], natural logarithm, or None.
    compute_dtype: None computes as the module says; torch.float64 is the oracle.
    """
    _clear_unowned_rows(out, lse, qo_indptr)
    for r in range(len(qo_indptr) - 1):
        rows, keys = slice(qo_indptr[r], qo_indptr[r + 1]), slice(kv_indptr[r], kv_indptr[r + 1])
        _request(
            q[rows],
            k[keys],
            v[keys],
            out[rows],
            None if lse is None else lse[rows],
            causal,
            window_left,
            logits_soft_cap,
            sm_scale,
            compute_dtype,
        )


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
    compute_dtype: torch.dtype | None = None,
) -> None:
    """`ragged_attention` with keys in pages.

    k_cache: [num_pages, page_size, Hkv, D]; v_cache: [num_pages, page_size, Hkv, Dv]; any strides, so an HND cache is passed as a
    transposed view. page_lists[r]: request r's page ids in order (integer tensor of at least ceil(kv_lens[r] / page_size)
    entries; further ones are ignored), or a slice for consecutive pages. Consecutive pages of a dense cache are read in place.

    Raises ValueError, before anything is written, if a needed page is outside the cache.
    """
    num_pages, page_size = k_cache.shape[0], k_cache.shape[1]
    needed = [-(-kv_len // page_size) for kv_len in kv_lens]
    pages = [_consecutive(page_lists[r], needed[r], num_pages, r) for r in range(len(kv_lens))]
    _clear_unowned_rows(out, lse, qo_indptr)
    for r, kv_len in enumerate(kv_lens):
        rows = slice(qo_indptr[r], qo_indptr[r + 1])
        _request(
            q[rows],
            _gather(k_cache, pages[r], kv_len),
            _gather(v_cache, pages[r], kv_len),
            out[rows],
            None if lse is None else lse[rows],
            causal,
            window_left,
            logits_soft_cap,
            sm_scale,
            compute_dtype,
        )


def _clear_unowned_rows(out: torch.Tensor, lse: torch.Tensor | None, qo_indptr: Sequence[int]) -> None:
    begin, end = qo_indptr[0], qo_indptr[-1]
    for rows in (slice(0, begin), slice(end, out.shape[0])):
        if rows.stop > rows.start:
            out[rows] = 0
            if lse is not None:
                lse[rows] = float("-inf")


def _consecutive(pages: torch.Tensor | slice, needed: int, num_pages: int, request: int) -> torch.Tensor | slice:
    """The `needed` page ids of a request, as a slice if they are consecutive. Checks that all are inside the cache."""
    if needed == 0:
        return slice(0, 0)
    if isinstance(pages, slice):
        pages = slice(pages.start, pages.start + needed)
        low, high = pages.start, pages.stop - 1
    else:
        pages = pages[:needed]
        low, high = int(pages[0]), int(pages[-1])
        if high - low == needed - 1 and (needed <= 2 or bool((pages[1:] - pages[:-1] == 1).all())):
            pages = slice(low, high + 1)
        else:
            smallest, largest = torch.aminmax(pages)
            low, high = int(smallest), int(largest)
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
    out: torch.Tensor,
    lse: torch.Tensor | None,
    causal: bool,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float,
    compute_dtype: torch.dtype | None,
) -> None:
    """One request: q [n, Hq, D], k [m, Hkv, D], v [m, Hkv, Dv] -> out [n, Hq, Dv], lse [n, Hq]."""
    num_rows, num_keys = q.shape[0], k.shape[0]
    shift = num_keys - num_rows  # bottom-right: row i's last causal key is shift + i
    empty = num_rows if num_keys == 0 else min(num_rows, max(0, -shift)) if causal else 0
    if empty:
        out[:empty] = 0
        if lse is not None:
            lse[:empty] = float("-inf")
    explicit = lse is not None or bool(logits_soft_cap) or compute_dtype is not None
    windowed = 0 <= window_left < num_keys - 1
    rows_at_once = num_rows
    if explicit or windowed or (causal and shift > 0):
        rows_at_once = max(1, MAX_SCORES // max(num_keys * (q.shape[1] if explicit else 1), 1))
    for begin in range(empty, num_rows, max(rows_at_once, 1)):
        end = min(begin + rows_at_once, num_rows)
        last = shift + end if causal else num_keys
        first = max(0, shift + begin - window_left) if windowed else 0
        rows, keys = slice(begin, end), slice(first, last)
        if explicit:
            mask = _mask(shift + begin, shift + end, first, last, causal, window_left, q.device)
            _formula(
                q[rows],
                k[keys],
                v[keys],
                mask,
                out[rows],
                None if lse is None else lse[rows],
                logits_soft_cap,
                sm_scale,
                compute_dtype or torch.float32,
            )
        elif causal and not windowed and begin + shift == 0 and end - begin > 1:
            _fused_square_causal(q[rows], k[keys], v[keys], out[rows], sm_scale)
        else:
            mask = _mask(shift + begin, shift + end, first, last, causal, window_left, q.device)
            _fused(q[rows], k[keys], v[keys], mask, out[rows], sm_scale)


def _mask(
    row_begin: int, row_end: int, key_begin: int, key_end: int, causal: bool, window_left: int, device: torch.device
) -> torch.Tensor | None:
    """Bool [rows, keys], True where the row sees the key; None if every row sees every key. Row i's last causal key is row_begin + i."""
    below = causal and key_end - 1 > row_begin
    above = 0 <= window_left < row_end - 1 - key_begin
    if not (below or above):
        return None
    last = torch.arange(row_begin, row_end, device=device)[:, None]
    key = torch.arange(key_begin, key_end, device=device)[None, :]
    keep = key <= last if below else torch.ones(1, 1, dtype=torch.bool, device=device)
    return keep & (key + window_left >= last) if above else keep


def _formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    logits_soft_cap: float | None,
    sm_scale: float,
    dtype: torch.dtype,
) -> None:
    num_rows, num_qo_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    # The query heads of a KV head are rows of one matrix: no key is repeated.
    packed = q.to(dtype).unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    scores = torch.bmm(packed, k.to(dtype).permute(1, 2, 0)).mul_(sm_scale)
    if logits_soft_cap:
        scores.div_(logits_soft_cap).tanh_().mul_(logits_soft_cap)
    if mask is not None:
        scores.unflatten(1, (-1, num_rows)).masked_fill_(~mask, float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    values = torch.bmm(weights, v.to(dtype).transpose(0, 1)).div_(total)
    out.copy_(values.unflatten(1, (-1, num_rows)).permute(2, 0, 1, 3).reshape(num_rows, num_qo_heads, -1))
    if lse is not None:
        logsumexp = (peak + total.log()).view(num_kv_heads, -1, num_rows)
        lse.copy_(logsumexp.permute(2, 0, 1).reshape(num_rows, num_qo_heads))


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor, sm_scale: float
) -> None:
    num_rows, num_qo_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_qo_heads // num_kv_heads
    # Packed rows, since torch's CPU kernel converts every key once per query head it is given: 178 us against 1100 us
    # for 9/3 heads, D = 64, 2048 keys in bf16.
    packed = (
        q.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3).reshape(1, num_kv_heads, group * num_rows, head_dim)
    )
    if mask is not None:
        mask = mask.expand(group, *mask.shape).reshape(group * num_rows, -1)
    keys, values = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
    result = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=sm_scale)
    out.copy_(result.view(num_kv_heads, group, num_rows, -1).permute(2, 0, 1, 3).reshape(num_rows, num_qo_heads, -1))


def _fused_square_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, sm_scale: float) -> None:
    """As many rows as keys: torch's own causal mask, which skips the upper half, is the bottom-right one."""
    heads = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    result = F.scaled_dot_product_attention(*heads, is_causal=True, scale=sm_scale, enable_gqa=q.shape[1] != k.shape[1])
    out.copy_(result.squeeze(0).transpose(0, 1))

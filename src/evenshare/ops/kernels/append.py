"""Write new keys and values into a paged cache. A row is one (token, KV head); a row whose place does not exist is skipped."""

import triton
import triton.language as tl


@triton.jit
def append_paged_kv_cache(k_ptr, v_ptr, batch_indices_ptr, positions_ptr, kv_indptr_ptr, table_ptr, k_cache_ptr, v_cache_ptr,
                          num_rows, num_heads, num_requests, num_entries, table_width, num_pages, page_size,
                          stride_batch, stride_position, stride_indptr, stride_table_row, stride_table_entry,
                          stride_k_token, stride_k_head, stride_k_dim, stride_v_token, stride_v_head, stride_v_dim,
                          stride_kc_page, stride_kc_token, stride_kc_head, stride_kc_dim,
                          stride_vc_page, stride_vc_token, stride_vc_head, stride_vc_dim,
                          HAS_INDPTR: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
                          BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """table: HAS_INDPTR: the flat kv_indices, request b's entries are [kv_indptr[b], kv_indptr[b + 1]); otherwise a block table."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // num_heads
    head = row - token * num_heads
    mask = row < num_rows
    # Device values are never read by the host, so each is checked here before it becomes an address.
    request = tl.load(batch_indices_ptr + token * stride_batch, mask=mask, other=-1).to(tl.int64)
    position = tl.load(positions_ptr + token * stride_position, mask=mask, other=-1).to(tl.int64)
    mask &= (request >= 0) & (request < num_requests) & (position >= 0)
    entry = position // page_size
    if HAS_INDPTR:
        begin = tl.load(kv_indptr_ptr + request * stride_indptr, mask=mask, other=0).to(tl.int64)
        end = tl.load(kv_indptr_ptr + (request + 1) * stride_indptr, mask=mask, other=0).to(tl.int64)
        entry += begin
        mask &= (begin >= 0) & (entry < end) & (entry < num_entries)
        table = table_ptr + entry * stride_table_entry
    else:
        mask &= entry < table_width
        table = table_ptr + request * stride_table_row + entry * stride_table_entry
    page = tl.load(table, mask=mask, other=-1).to(tl.int64)
    mask &= (page >= 0) & (page < num_pages)
    slot = position - position // page_size * page_size

    k_row = k_ptr + token * stride_k_token + head * stride_k_head
    k_out = k_cache_ptr + page * stride_kc_page + slot * stride_kc_token + head * stride_kc_head
    for start in tl.static_range(0, HEAD_DIM, BLOCK_D):
        d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
        inside = mask[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(k_row[:, None] + (d * stride_k_dim)[None, :], mask=inside, other=0.0)
        tl.store(k_out[:, None] + (d * stride_kc_dim)[None, :], k, mask=inside)
    v_row = v_ptr + token * stride_v_token + head * stride_v_head
    v_out = v_cache_ptr + page * stride_vc_page + slot * stride_vc_token + head * stride_vc_head
    for start in tl.static_range(0, HEAD_DIM_V, BLOCK_D):
        d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
        inside = mask[:, None] & (d < HEAD_DIM_V)[None, :]
        v = tl.load(v_row[:, None] + (d * stride_v_dim)[None, :], mask=inside, other=0.0)
        tl.store(v_out[:, None] + (d * stride_vc_dim)[None, :], v, mask=inside)

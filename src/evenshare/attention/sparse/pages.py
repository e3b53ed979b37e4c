"""Pages that are selected for each request and KV head: the selection, and attention over such page tables."""

from __future__ import annotations

from typing import Any

import torch

from evenshare.device.checks import check_is_tensor

INT32_MAX = 2**31 - 1


def page_bounds(k_cache: torch.Tensor, kv_layout: str = "NHD") -> tuple[torch.Tensor, torch.Tensor]:
    """(smallest, largest), each [num_pages, Hkv, D]: of every page's keys, dim by dim, as `select_pages` wants them.

    k_cache: [num_pages, page_size, Hkv, D] (NHD) or [num_pages, Hkv, page_size, D] (HND). What lies in a page past the last key
    counts too: bounds of a page are of use once it is full.
    """
    check_is_tensor(k_cache=k_cache)
    if k_cache.dim() != 4 or kv_layout not in ("NHD", "HND"):
        raise ValueError(
            f"k_cache: got shape {tuple(k_cache.shape)} in {kv_layout!r}, want four dimensions, 'NHD' or 'HND'"
        )
    return torch.aminmax(k_cache, dim=1 if kv_layout == "NHD" else 2)


def select_pages(
    q: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    page_size: int,
    num_selected: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages whose keys may score highest, for each request and KV head (Quest, arXiv 2406.10774, section 3.3).

    q: [B, Hq, D], a decode step's queries. bounds: of `page_bounds`. block_table: integers [B, max_pages]; kv_lens: integers [B].
    A page's rank is the largest score that a key within its bounds can have with any query head of the group. The last page, with
    the newest keys, is always selected, and pages keep their order. Torch operations of static shapes: never syncs.

    Returns (int32 [B, Hkv, num_selected], int32 [B, Hkv]), block_table and kv_lens of `paged_attention`.

    >>> q, keys = torch.ones(1, 2, 8), torch.arange(4.0)[:, None, None, None].expand(4, 16, 1, 8)
    >>> select_pages(q, page_bounds(keys), torch.tensor([[3, 0, 2, 1]]), torch.tensor([60]), 16, 2)
    (tensor([[[3, 1]]], dtype=torch.int32), tensor([[28]], dtype=torch.int32))
    """
    low, high = bounds
    for name, tensor in (
        ("q", q),
        ("bounds", low),
        ("bounds", high),
        ("block_table", block_table),
        ("kv_lens", kv_lens),
    ):
        check_is_tensor(**{name: tensor})
    if q.dim() != 3 or low.dim() != 3 or low.shape != high.shape or low.shape[2] != q.shape[2]:
        raise ValueError(
            f"q, bounds: got shapes {tuple(q.shape)}, {tuple(low.shape)} and {tuple(high.shape)}, "
            "want [B, Hq, D] and twice [num_pages, Hkv, D]"
        )
    num_kv_heads = low.shape[1]
    if num_kv_heads == 0 or q.shape[1] % num_kv_heads:
        raise ValueError(f"q: got {q.shape[1]} heads, want a multiple of the {num_kv_heads} KV heads of the bounds")
    if block_table.dim() != 2 or tuple(kv_lens.shape) != (q.shape[0],) or block_table.shape[0] != q.shape[0]:
        raise ValueError(
            f"block_table, kv_lens: got shapes {tuple(block_table.shape)} and {tuple(kv_lens.shape)}, "
            f"want [{q.shape[0]}, max_pages] and [{q.shape[0]}]"
        )
    if not isinstance(num_selected, int) or not 1 <= num_selected <= block_table.shape[1]:
        raise ValueError(f"num_selected: got {num_selected!r}, want 1 to the {block_table.shape[1]} pages of a table")
    num_pages = (kv_lens + page_size - 1) // page_size
    place = torch.arange(block_table.shape[1], device=block_table.device)
    table = block_table.clamp(0, max(low.shape[0] - 1, 0)).long()
    grouped = q.float().unflatten(1, (num_kv_heads, -1))  # [B, Hkv, group, D]
    # The sum over dims of max(q * low, q * high).
    rank = torch.einsum("bhgd,bphd->bhgp", grouped.clamp(min=0), high[table].float())
    rank = (rank + torch.einsum("bhgd,bphd->bhgp", grouped.clamp(max=0), low[table].float())).amax(2)
    last = num_pages[:, None, None] - 1
    rank = rank.nan_to_num(nan=-torch.inf).masked_fill(place > last, -torch.inf).masked_fill(place == last, torch.inf)
    chosen = rank.topk(num_selected, sorted=False).indices.sort().values
    # Of a shorter request all pages are chosen, and its places past the end, which come after them, do not matter.
    pages = block_table[:, None].expand(-1, num_kv_heads, -1).gather(2, chosen)
    dropped = (num_pages - num_selected).clamp(min=0) * page_size
    lens = (kv_lens - dropped)[:, None].expand(-1, num_kv_heads)
    return pages.to(torch.int32), lens.to(torch.int32).contiguous()


def pages_by_head(
    cache: torch.Tensor, block_table: torch.Tensor, kv_layout: str = "NHD"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same memory as a cache of one KV head, [n, page_size, 1, D] (NHD), and the table's pages in it, [B, Hkv, pages].

    In units of the stride between heads, head h of page p begins at p * (heads that fit into a page's stride) + h. With these a
    plan for num_kv_heads=1 serves B * Hkv requests of one token, `block_table.flatten(0, 1)`, whose queries are
    `q.view(B * Hkv, group, D)`.
    cache: [num_pages, page_size, Hkv, D] (NHD) or [num_pages, Hkv, page_size, D] (HND). block_table: [B, Hkv, pages].
    Raises ValueError unless the stride between pages is a multiple of that between heads.
    """
    check_is_tensor(cache=cache, block_table=block_table)
    if cache.dim() != 4 or kv_layout not in ("NHD", "HND"):
        raise ValueError(
            f"cache: got shape {tuple(cache.shape)} in {kv_layout!r}, want four dimensions, 'NHD' or 'HND'"
        )
    if kv_layout == "HND":
        cache = cache.transpose(1, 2)
    num_pages, page_size, num_heads, dim = cache.shape
    if block_table.dim() != 3 or block_table.shape[1] != num_heads:
        raise ValueError(
            f"block_table: got shape {tuple(block_table.shape)}, want [B, {num_heads}, pages], a table for each KV head"
        )
    page_stride, token_stride, head_stride, _ = cache.stride()
    if num_heads == 1 or num_pages <= 1:  # one of the strides means nothing
        ratio, step = num_heads, head_stride if num_pages <= 1 else page_stride
    else:
        if head_stride == 0 or page_stride % head_stride or page_stride // head_stride * num_pages > INT32_MAX:
            raise ValueError(
                f"cache: got strides {cache.stride()}, want that between pages a multiple of that between heads"
            )
        ratio, step = page_stride // head_stride, head_stride
    size = (num_pages - 1) * ratio + num_heads if num_pages else 0
    heads = torch.arange(num_heads, dtype=block_table.dtype, device=block_table.device)
    # Ids outside the cache stay outside.
    pages = block_table.clamp(-1, num_pages) * ratio + heads[:, None]
    return cache.as_strided((size, page_size, 1, dim), (step, token_stride, step, cache.stride(3))), pages


def paged_attention_by_head(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor | None,
    kv_layout: str,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    **options: Any,
) -> Any:
    """`paged_attention` with a page table for each KV head: block_table [B, Hkv, pages], kv_lens [B, Hkv]."""
    from evenshare.attention.functions import paged_attention

    keys, pages = pages_by_head(k_cache, block_table, kv_layout)
    values, _ = pages_by_head(v_cache, block_table, kv_layout)
    if keys.shape[0] != values.shape[0]:
        raise ValueError(
            "v_cache: got other strides than k_cache, want the same ratio of those between pages and heads"
        )
    batch, num_kv_heads = block_table.shape[:2]
    if q.shape[0] != batch or q.shape[1] % num_kv_heads:
        raise ValueError(f"q: got shape {tuple(q.shape)}, want [{batch}, a multiple of {num_kv_heads} heads, head_dim]")
    if not isinstance(kv_lens, torch.Tensor) or tuple(kv_lens.shape) != (batch, num_kv_heads):
        got = tuple(kv_lens.shape) if isinstance(kv_lens, torch.Tensor) else kv_lens
        raise ValueError(f"kv_lens: got {got}, want [{batch}, {num_kv_heads}], as the block_table")

    def by_head(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (num_kv_heads, -1)).flatten(0, 1)

    outputs = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in (out, lse)]
    made = paged_attention(
        by_head(q),
        keys,
        values,
        block_table=pages.flatten(0, 1),
        kv_lens=kv_lens.reshape(-1),
        out=None if outputs[0] is None else by_head(outputs[0]),
        lse=None if outputs[1] is None else by_head(outputs[1]),
        **options,
    )
    results = [x.view(batch, q.shape[1], *x.shape[2:]) for x in (made if isinstance(made, tuple) else (made,))]
    for number, given in enumerate((out, lse)):
        if given is not None:
            given.copy_(results[number])
            results[number] = given
    return tuple(results) if isinstance(made, tuple) else results[0]

"""Which requests of a batch begin with the same pages."""

from __future__ import annotations

import torch

from evenshare.attention.cascade import CascadeLevel
from evenshare.device.checks import check_is_tensor


def detect_shared_prefixes(
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    page_size: int,
    *,
    qo_indptr: torch.Tensor | None = None,
    min_pages: int = 1,
    max_groups: int | None = None,
) -> list[CascadeLevel]:
    """Two levels for `plan_cascade`: pages that neighbouring requests begin with alike, and each request's own.

    block_table: integers [B, max_pages], kv_lens: integers [B], qo_indptr: integers [B + 1] or None, one token each. Requests next
    to each other share their first pages if the table has the same ids there, min_pages of them at least, all full and before
    their queries. Sort requests by prefix to make them neighbours.
    max_groups: groups that share something, the first ones; beyond it requests keep all pages to themselves. Fewer groups than
    requests let the shared level have taller tiles. None: as many as there may be.

    Torch operations whose shapes follow from the arguments' alone, where those are: no sync, and a CUDA graph can capture them.

    >>> shared, own = detect_shared_prefixes(torch.tensor([[4, 7, 1], [4, 7, 2], [5, 0, 0]]), torch.tensor([40, 35, 9]), 16)
    >>> shared.kv_lens.tolist(), shared.qo_indptr.tolist(), own.kv_lens.tolist()
    ([32, 0, 0], [0, 2, 3, 3], [8, 3, 9])
    """
    for name, tensor in (("block_table", block_table), ("kv_lens", kv_lens)):
        check_is_tensor(**{name: tensor})
    if block_table.dim() != 2 or tuple(kv_lens.shape) != tuple(block_table.shape[:1]):
        raise ValueError(
            f"block_table, kv_lens: got shapes {tuple(block_table.shape)} and {tuple(kv_lens.shape)}, want [B, max_pages] and [B]"
        )
    for name, number in (("page_size", page_size), ("min_pages", min_pages), ("max_groups", max_groups)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}: got {number!r}, want an int of 1 or more")
    device, (batch, width) = block_table.device, block_table.shape
    if qo_indptr is None:
        qo_indptr = torch.arange(batch + 1, device=device)
    check_is_tensor(qo_indptr=qo_indptr)
    if tuple(qo_indptr.shape) != (batch + 1,):
        raise ValueError(f"qo_indptr: got shape {tuple(qo_indptr.shape)}, want [{batch + 1}]")
    # Pages before the queries, which all of them see whole.
    whole = (kv_lens - (qo_indptr[1:] - qo_indptr[:-1])).clamp(min=0) // page_size
    place = torch.arange(width, device=device)
    alike = (block_table[1:] == block_table[:-1]) & (place < torch.minimum(whole[1:], whole[:-1])[:, None])
    common = torch.nn.functional.pad(alike.long().cumprod(1).sum(1), (1, 1))[: batch + 1]  # of requests r - 1 and r
    joined = common >= min_pages
    alone = ~(joined[:-1] | joined[1:])
    begins = ~joined[:-1]
    begins[1:] &= ~(alone[1:] & alone[:-1])  # neighbours that share nothing are one group, without keys
    capacity = batch if max_groups is None else min(batch, 2 * max_groups + 1)
    group = (begins.long().cumsum(0) - 1).clamp(max=max(capacity - 1, 0))
    # A group's prefix is what all its links have; links of a group that holds what is left over may have nothing.
    links = torch.where(joined[:-1], common[:-1], 0)
    linked = torch.nn.functional.pad(group[1:] == group[:-1], (1, 0))[:batch]
    most = torch.full((capacity,), width + 1, device=device)
    prefix = most.scatter_reduce(0, group, torch.where(linked, links, width + 1), "amin")
    prefix = torch.where(prefix > width, 0, prefix)
    first = torch.searchsorted(
        group, torch.arange(capacity + 1, device=device)
    )  # of a group; those without requests: batch
    own = prefix[group] if batch else prefix
    shifted = (place + own[:, None]).clamp(max=max(width - 1, 0))
    lens_type = kv_lens.dtype
    return [
        CascadeLevel(
            qo_indptr[first], block_table[first[:-1].clamp(max=max(batch - 1, 0))], (prefix * page_size).to(lens_type)
        ),
        CascadeLevel(qo_indptr, block_table.gather(1, shifted), (kv_lens - own * page_size).to(lens_type)),
    ]

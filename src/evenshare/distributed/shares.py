"""A rank's share of heads and of a weight's rows and columns (tensor parallelism; Megatron-LM, arXiv 1909.08053)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from evenshare.quant import QuantizedWeight
from evenshare.quant.rounding import pack_codes
from evenshare.quant.weight import order_by_group

Weight = TypeVar("Weight", torch.Tensor, QuantizedWeight)


def even_share(size: int, rank: int, num_ranks: int, unit: int = 1) -> range:
    """The numbers below `size` that are the rank's: neighbours, in whole units, shares differing by one unit at most.

    >>> even_share(10, 1, 4), even_share(512, 2, 3, unit=128)
    (range(2, 5), range(256, 512))
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank: got {rank} of {num_ranks}, want 0 to {num_ranks - 1}")
    if unit < 1 or size % unit:
        raise ValueError(f"unit: got {unit} for a size of {size}, want 1 or more that divides it")
    units = size // unit
    return range(rank * units // num_ranks * unit, (rank + 1) * units // num_ranks * unit)


@dataclass(frozen=True)
class HeadShare:
    """A rank's heads: its query heads, and the KV heads that they read."""

    qo: range
    kv: range

    def rows(self, head_dim: int, *, of: str) -> range:
        """Their rows in a projection's weight. of: "qo" or "kv"."""
        heads = self.qo if of == "qo" else self.kv
        return range(heads.start * head_dim, heads.stop * head_dim)


def share_heads(num_qo_heads: int, num_kv_heads: int, rank: int, num_ranks: int) -> HeadShare:
    """Head-parallel attention: a rank's heads, on which it plans and runs attention as if they were all.

    KV heads are dealt evenly, with their query heads. Where there are more ranks than KV heads, a multiple of them, the ranks of a
    KV head each keep it and share its query heads. Raises ValueError for other numbers.

    >>> share_heads(32, 8, 1, 4)
    HeadShare(qo=range(8, 16), kv=range(2, 4))
    >>> share_heads(32, 2, 3, 4)
    HeadShare(qo=range(24, 32), kv=range(1, 2))
    """
    if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(
            f"num_qo_heads, num_kv_heads: got {num_qo_heads} and {num_kv_heads}, want the first a multiple of the second"
        )
    group = num_qo_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        kv = even_share(num_kv_heads, rank, num_ranks)
        return HeadShare(range(kv.start * group, kv.stop * group), kv)
    if num_ranks % num_kv_heads or num_ranks > num_qo_heads:
        raise ValueError(
            f"num_ranks: got {num_ranks} for {num_qo_heads} query heads and {num_kv_heads} KV heads, "
            "want at most the KV heads, or a multiple of them that is at most the query heads"
        )
    replicas = num_ranks // num_kv_heads
    head = rank // replicas
    own = even_share(group, rank % replicas, replicas)
    return HeadShare(range(head * group + own.start, head * group + own.stop), range(head, head + 1))


def take_outputs(weight: Weight, rows: Sequence[range]) -> Weight:
    """The weight [n', k] of these rows of W [n, k], in order: a copy, so that the rest can be freed."""
    if isinstance(weight, torch.Tensor):
        return torch.cat([weight[part.start : part.stop] for part in rows])
    return weight.take_rows(torch.cat([torch.arange(part.start, part.stop) for part in rows]).to(weight.device))


def take_inputs(weight: Weight, columns: range) -> Weight:
    """The weight W[:, columns] of W [n, k].

    A quantised weight whose groups are not cut keeps their form. Otherwise, and with act-order, where neighbours belong to any
    groups, each column stays with its group's scale, and parts of groups are stored as `order_by_group` says.
    """
    if isinstance(weight, torch.Tensor):
        return weight[:, columns.start : columns.stop].contiguous()
    if not 0 <= columns.start < columns.stop <= weight.k:
        raise ValueError(f"columns: got {columns}, want at least one of the weight's {weight.k}")
    size, one_group = weight.group_size, weight.group_size == weight.stored_k
    if weight.permutation is None and (one_group or not (columns.start % size or columns.stop % size)):
        kept = torch.arange(columns.start, columns.stop)
        groups = torch.arange(weight.num_groups) if one_group else kept[::size] // size
        return _select(weight, kept, groups, len(columns), len(columns) if one_group else size, None)
    column = torch.arange(weight.k, dtype=torch.int32) if weight.permutation is None else weight.permutation.cpu()
    stored = ((column >= columns.start) & (column < columns.stop)).nonzero()[:, 0]
    order, size, groups = order_by_group(stored // size, weight.num_groups, size)
    kept = torch.where(order < 0, 0, stored[order])  # the codes of padding columns mean nothing
    permutation = torch.where(order < 0, -1, column[stored][order] - columns.start).int()
    return _select(weight, kept, groups, len(columns), size, permutation)


def _select(
    weight: QuantizedWeight,
    stored: torch.Tensor,
    groups: torch.Tensor,
    k: int,
    group_size: int,
    permutation: torch.Tensor | None,
) -> QuantizedWeight:
    """A weight of these stored columns and groups."""
    device = weight.device
    groups = groups.to(device)

    def take(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.index_select(1, groups)

    return QuantizedWeight(
        pack_codes(weight.unpacked_codes().index_select(1, stored.to(device)), weight.bits),
        weight.scales.index_select(1, groups),
        k,
        group_size,
        weight.bits,
        take(weight.zeros),
        take(weight.offsets),
        weight.encoding,
        None if permutation is None else permutation.to(device),
    )

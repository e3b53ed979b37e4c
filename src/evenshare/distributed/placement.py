"""Which rank keeps which keys: logical pages of requests dealt to ranks, by turns or in ranges of even cost.

A rank stores its pages of a request in logical order, all full but perhaps the request's last one. So the keys before any logical
position are, on every rank, the first `count` of its own: closed forms in the position, without a look at the pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from evenshare.schedule import RaggedSpace, make_plan
from evenshare.schedule.plan import BEGIN, END, TILE

DEALING_POLICIES = ("level_fill", "stream_k", "data_parallel")  # give a worker one range of a tile at most


class Placement(Protocol):
    """Logical pages of requests on ranks. Positions count a request's keys from 0; tensors may be on any device."""

    page_size: int
    num_ranks: int

    def count(self, end: torch.Tensor, rank: int, request: torch.Tensor | None = None) -> torch.Tensor:
        """How many keys before position `end` (integers [n], of requests `request` [n]; None: 0 to n - 1) the rank has."""
        ...

    def locate(self, position: torch.Tensor, request: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(rank, position among that rank's keys of the request) of keys: where new keys are to be written."""
        ...

    def max_count(self, num_keys: int) -> int:
        """How many of `num_keys` neighbouring keys a rank has at most."""
        ...


@dataclass(frozen=True)
class RoundRobin:
    """Page j of request r lies on rank (j + first[r]) mod num_ranks.

    Ranks differ by a page at most in every request, whatever its length and however it grows. first: int32 [B] or None, zeros;
    with many short requests, r mod num_ranks spreads their first pages.
    """

    page_size: int
    num_ranks: int
    first: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _check_sizes(self.page_size, self.num_ranks)

    def count(self, end: torch.Tensor, rank: int, request: torch.Tensor | None = None) -> torch.Tensor:
        turn = self.page_size * self.num_ranks
        end = end.clamp(min=0)
        own = end % turn - self._slot(rank, request) * self.page_size
        return end // turn * self.page_size + own.clamp(0, self.page_size)

    def locate(self, position: torch.Tensor, request: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page = position // self.page_size
        rank = page if self.first is None else page + self.first[request]
        return rank % self.num_ranks, page // self.num_ranks * self.page_size + position % self.page_size

    def max_count(self, num_keys: int) -> int:
        turn = self.page_size * self.num_ranks
        return min(num_keys, -(-num_keys // turn) * self.page_size + self.page_size)

    def _slot(self, rank: int, request: torch.Tensor | None) -> int | torch.Tensor:
        """The rank's place in a turn of a request."""
        if self.first is None:
            return rank
        first = self.first if request is None else self.first[request]
        return (rank - first) % self.num_ranks


@dataclass(frozen=True)
class PageRanges:
    """Rank p has the pages [begin[p, r], end[p, r]) of request r; the last one's rank also gets what the request grows by."""

    page_size: int
    begin: torch.Tensor  # int32 [num_ranks, B]
    end: torch.Tensor

    @property
    def num_ranks(self) -> int:
        return self.begin.shape[0]

    def count(self, end: torch.Tensor, rank: int, request: torch.Tensor | None = None) -> torch.Tensor:
        low, high = self.begin[rank], self.end[rank]
        if request is not None:
            low, high = low[request], high[request]
        return (end - low * self.page_size).clamp(min=0).minimum((high - low) * self.page_size)

    def locate(self, position: torch.Tensor, request: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page = position // self.page_size
        begin = self.begin[:, request]
        rank = ((begin <= page) & (page < self.end[:, request])).int().argmax(0)
        return rank, position - begin.gather(0, rank[None])[0] * self.page_size

    def max_count(self, num_keys: int) -> int:
        return num_keys

    def to(self, device: torch.device | str) -> PageRanges:
        return PageRanges(self.page_size, self.begin.to(device), self.end.to(device))


def deal_pages(
    kv_lens: torch.Tensor, page_size: int, num_ranks: int, *, policy: str = "level_fill", cut_cost: int = 1
) -> PageRanges:
    """Deal requests of uneven length so that ranks finish level: `evenshare.schedule` one level up, its workers the ranks.

    kv_lens: integers [B] on the host, keys of each request, those to come included where they are known. policy: "level_fill" (most
    requests whole, the others cut to level), "stream_k" (one even cut through all of them) or "data_parallel" (none cut).
    cut_cost: what a cut costs besides, in pages: another rank begins and ends with the request. All requests' states travel in one
    message in any case.

    Raises ValueError naming the argument, what was got and what is wanted.
    """
    _check_sizes(page_size, num_ranks)
    if policy not in DEALING_POLICIES:
        raise ValueError(f"policy: got {policy!r}, want one of {', '.join(DEALING_POLICIES)}")
    if kv_lens.device.type != "cpu" or kv_lens.dim() != 1:
        raise ValueError(f"kv_lens: got shape {tuple(kv_lens.shape)} on {kv_lens.device}, want [B] on the host")
    pages = (-(-kv_lens.long() // page_size)).clamp(min=1).int()  # a request without keys has an owner too
    plan = make_plan(RaggedSpace(pages, cut_cost=cut_cost), policy, num_ranks)
    begin = torch.zeros(num_ranks, len(pages), dtype=torch.int32)
    end = torch.zeros_like(begin)
    bounds = plan.worker_indptr.tolist()
    for rank in range(num_ranks):
        rows = plan.segments[bounds[rank] : bounds[rank + 1]].long()
        begin[rank, rows[:, TILE]], end[rank, rows[:, TILE]] = rows[:, BEGIN].int(), rows[:, END].int()
    last = (begin < end) & (end == pages)
    return PageRanges(page_size, begin, end.masked_fill(last, (2**31 - 1) // page_size))


def _check_sizes(page_size: int, num_ranks: int) -> None:
    if page_size < 1 or num_ranks < 1:
        raise ValueError(f"page_size, num_ranks: got {page_size} and {num_ranks}, want 1 or more")

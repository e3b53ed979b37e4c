"""Which rank computes which query tokens of a prefill, so that ranks finish level.

A long request is cut for all ranks. Under a causal mask its end costs more than its begin, so it is cut into 2 P chunks, of which
rank r has the r-th from either end (zig-zag); where every row costs the same (no mask, or a window) P chunks do. A short request
stays whole: `evenshare.schedule` deals those, the dearest first, to the least loaded rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evenshare.schedule import RaggedSpace, make_plan
from evenshare.schedule.plan import TILE

MAX_COST = 1 << 20  # of a short request, in the scheduler's 32-bit units


@dataclass(frozen=True)
class TokenLayout:
    """Rank p has the tokens [begin[p, r, c], end[p, r, c]) of request r, c = 0 and 1, one piece after the other."""

    begin: torch.Tensor  # int64 [num_ranks, B, 2], on the host
    end: torch.Tensor
    starts: torch.Tensor  # int64 [B], of the requests in the whole batch
    cut: torch.Tensor  # bool [B]: requests of which several ranks have tokens

    @property
    def lens(self) -> torch.Tensor:
        """int64 [num_ranks, B, 2]"""
        return self.end - self.begin

    def count(self, rank: int) -> int:
        """Tokens that a rank has."""
        return int(self.lens[rank].sum())

    def positions(self, rank: int) -> torch.Tensor:
        """int64 [count]: of a rank's tokens, each in its request, in the order in which the rank holds them."""
        return ranges(self.begin[rank].flatten(), self.lens[rank].flatten())

    def requests(self, rank: int) -> torch.Tensor:
        """int64 [count]: the request of each of a rank's tokens."""
        return torch.arange(len(self.starts)).repeat_interleave(self.lens[rank].sum(1))

    def tokens(self, rank: int) -> torch.Tensor:
        """int64 [count]: the same tokens as rows of the whole batch."""
        return self.positions(rank) + self.starts[self.requests(rank)]

    def shared(self, rank: int) -> torch.Tensor:
        """bool [count]: whether a token is of a request that was cut, so that other ranks want its key."""
        return self.cut[self.requests(rank)]


def ranges(begin: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """The numbers begin[i], begin[i] + 1, ..., lens[i] of them, for every i."""
    return torch.arange(int(lens.sum())) + (begin - (lens.cumsum(0) - lens)).repeat_interleave(lens)


def indptr_of(lens: torch.Tensor) -> torch.Tensor:
    """int32: 0 and the prefix sums of lens, flattened."""
    return torch.nn.functional.pad(lens.flatten().cumsum(0), (1, 0)).int()


def lay_out(indptr: torch.Tensor, num_ranks: int, *, zigzag: bool, row_cost: int, min_chunk: int) -> TokenLayout:
    """indptr: int64 [B + 1] on the host. row_cost: keys that a row sees at most. min_chunk: a request is cut if every chunk gets so
    many tokens."""
    lens = indptr[1:] - indptr[:-1]
    num_chunks = 2 * num_ranks if zigzag else num_ranks
    # Chunks are equal but for the last, so that ring steps are alike and share their plans, if that leaves the last one any tokens.
    chunk, step = torch.arange(num_chunks + 1)[:, None], -(-lens // num_chunks)
    bounds = torch.where((num_chunks - 1) * step < lens, (chunk * step).minimum(lens), chunk * lens // num_chunks)
    begin = bounds.new_zeros(num_ranks, len(lens), 2)
    end = torch.zeros_like(begin)
    begin[:, :, 0], end[:, :, 0] = bounds[:num_ranks], bounds[1 : num_ranks + 1]
    if zigzag:
        begin[:, :, 1], end[:, :, 1] = bounds[num_ranks:-1].flip(0), bounds[num_ranks + 1 :].flip(0)
    whole = lens < num_chunks * min_chunk
    begin[:, whole], end[:, whole] = 0, 0
    short = whole.nonzero()[:, 0]
    end[_deal(lens[short], num_ranks, row_cost), short, 0] = lens[short]
    return TokenLayout(begin, end, indptr[:-1], ~whole)


def _deal(lens: torch.Tensor, num_ranks: int, row_cost: int) -> torch.Tensor:
    """int64 [n]: the rank of each request that stays whole."""
    rank = torch.zeros_like(lens)
    if not len(lens):
        return rank
    cost = lens * lens.clamp(max=row_cost)
    cost = (cost * MAX_COST // cost.max().clamp(min=1)).clamp(min=1)
    plan = make_plan(RaggedSpace(cost.int()), "cost_sorted", num_ranks, max_chunk=MAX_COST)
    bounds = plan.worker_indptr.tolist()
    for p in range(num_ranks):
        rank[plan.segments[bounds[p] : bounds[p + 1], TILE].long()] = p
    return rank

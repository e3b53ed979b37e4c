"""Prefill with a window: ranks have neighbouring chunks, and send each other the keys that a window reaches back to."""

from __future__ import annotations

import torch

from evenshare.distributed.exchange import Exchange
from evenshare.distributed.layout import TokenLayout, ranges
from evenshare.distributed.ranks import Ranks


class Halo:
    """The keys before a rank's own that a window reaches: who sends which of them to whom, and where they go."""

    def __init__(self, layout: TokenLayout, ranks: Ranks, window_left: int, device: torch.device | str) -> None:
        begin, end = layout.begin[:, :, 0], layout.end[:, :, 0]  # [rank, request]
        rank, lens = ranks.rank, end - begin
        wanted = torch.where(lens > 0, (begin - window_left).clamp(min=0), begin)  # from there on
        starts = lens.cumsum(1) - lens  # of requests among a rank's tokens

        def overlap(source: int, target: int) -> tuple[torch.Tensor, torch.Tensor]:
            """([B], [B]): from where to where `source` has what `target` wants before its own."""
            low = torch.maximum(begin[source], wanted[target])
            return low, torch.minimum(end[source], begin[target]).maximum(low)

        # Request and position as one number, to sort by.
        number = torch.arange(lens.shape[1]) * (int(end.max()) + 1 if end.numel() else 1)
        sent: list[torch.Tensor] = []
        received: list[torch.Tensor] = []
        for peer in range(ranks.size):
            low, high = overlap(rank, peer)
            sent.append(ranges(starts[rank] + low - begin[rank], high - low))
            low, high = overlap(peer, rank)
            received.append(ranges(number + low, high - low))
        self._exchange = Exchange(ranks, "keys of a window", sent, [len(numbers) for numbers in received], device)
        self._order = torch.cat((*received, ranges(number + begin[rank], lens[rank]))).argsort().to(device)
        self.qo_lens = lens[rank]
        self.kv_lens = end[rank] - wanted[rank]

    def extend(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's keys and values with those before them, request by request."""
        keys = torch.cat((k, v), -1)
        whole = torch.cat((self._exchange.run(keys), keys)).index_select(0, self._order)
        return whole[..., : k.shape[2]], whole[..., k.shape[2] :]

"""Prefill with a window: ranks have neighbouring chunks, and send each other the keys that a window reaches back to."""

from __future__ import annotations

import torch
import torch.distributed as dist

from evenshare.distributed.layout import TokenLayout, ranges
from evenshare.distributed.ranks import Ranks


class Halo:
    """The keys before a rank's own that a window reaches: who sends which of them to whom, and where they go."""

    def __init__(self, layout: TokenLayout, ranks: Ranks, window_left: int, device: torch.device | str) -> None:
        self.ranks = ranks
        begin, end = layout.begin[:, :, 0], layout.end[:, :, 0]
        wanted = (begin - window_left).clamp(min=0)  # from there on, by rank and request
        wanted = torch.where(end > begin, wanted, begin)
        rank, size = ranks.rank, ranks.size
        lens = end - begin
        starts = lens.cumsum(1) - lens  # of requests among a rank's tokens

        def overlap(source: int, target: int) -> tuple[torch.Tensor, torch.Tensor]:
            """[B], [B]: what `source` has and `target` wants before its own."""
            low = torch.maximum(begin[source], wanted[target])
            high = torch.minimum(end[source], begin[target]).maximum(low)
            return low, high

        self.send_counts: list[int] = []
        self.receive_counts: list[int] = []
        sent: list[torch.Tensor] = []
        received: list[torch.Tensor] = []  # request and position as one number, to sort by
        stride = int(end.max()) + 1 if end.numel() else 1
        for peer in range(size):
            low, high = overlap(rank, peer)
            sent.append(ranges(starts[rank] + low - begin[rank], high - low))
            self.send_counts.append(int((high - low).sum()))
            low, high = overlap(peer, rank)
            received.append(ranges(low + torch.arange(len(low)) * stride, high - low))
            self.receive_counts.append(int((high - low).sum()))
        own = ranges(begin[rank] + torch.arange(len(lens[rank])) * stride, lens[rank])
        self.sent = torch.cat(sent).to(device)
        self.order = torch.cat((*received, own)).argsort().to(device)
        self.qo_lens = lens[rank]
        self.kv_lens = end[rank] - torch.minimum(wanted[rank], begin[rank])

    def extend(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's keys and values with those before them, request by request."""
        keys = torch.cat((k, v), -1)
        rows = keys.index_select(0, self.sent)
        found = rows.new_empty(sum(self.receive_counts), *rows.shape[1:])
        with self.ranks.talking("keys of a window"):
            dist.all_to_all_single(
                found.view(torch.uint8),
                rows.view(torch.uint8),
                self.receive_counts,
                self.send_counts,
                group=self.ranks.group,
            )
        whole = torch.cat((found, keys)).index_select(0, self.order)
        return whole[..., : k.shape[2]], whole[..., k.shape[2] :]

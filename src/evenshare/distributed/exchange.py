"""Rows that change ranks by a plan that all ranks know: keys that a window reaches, keys that go from prefill's layout to pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from evenshare.distributed.layout import TokenLayout
from evenshare.distributed.placement import Placement
from evenshare.distributed.ranks import Ranks


class Exchange:
    """sent[p]: which of this rank's rows rank p gets; received[p]: how many it sends. One collective."""

    def __init__(
        self,
        ranks: Ranks,
        about: str,
        sent: Sequence[torch.Tensor],
        received: Sequence[int],
        device: torch.device | str,
    ) -> None:
        self._ranks = ranks
        self._about = about
        self._rows = torch.cat([*sent]).to(device)
        self._counts = list(received), [len(rows) for rows in sent]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """[own rows, ...] -> [sum of received, ...], in the order of ranks."""
        rows = x.index_select(0, self._rows)
        found = rows.new_empty(sum(self._counts[0]), *rows.shape[1:])
        with self._ranks.talking(self._about):
            sides = found.view(torch.uint8), rows.view(torch.uint8)
            dist.all_to_all_single(*sides, *self._counts, group=self._ranks.group)
        return found


class KeyMove:
    """Keys and values of a prefill on their way to the ranks that keep them; made by `RingPlan.move_to`.

    batch_indices, positions: int32 [n] on the device, request and place of each row that comes, for `append_paged_kv_cache`.
    """

    def __init__(self, ranks: Ranks, layout: TokenLayout, placement: Placement, device: torch.device | str) -> None:
        sent: list[torch.Tensor] = []
        requests: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        for rank in range(ranks.size):
            request = layout.requests(rank)
            owner, place = placement.locate(layout.positions(rank), request)
            if rank == ranks.rank:
                sent = [(owner == peer).nonzero()[:, 0] for peer in range(ranks.size)]
            own = owner == ranks.rank
            requests.append(request[own])
            places.append(place[own])
        self._exchange = Exchange(ranks, "keys that move to their pages", sent, [len(rows) for rows in places], device)
        self.batch_indices = torch.cat(requests).int().to(device)
        self.positions = torch.cat(places).int().to(device)

    def run(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k [num_tokens, Hkv, D] and v [num_tokens, Hkv, Dv] of the prefill -> [n, Hkv, D] and [n, Hkv, Dv] that the rank keeps."""
        found = self._exchange.run(torch.cat((k, v), -1))
        return found[..., : k.shape[2]], found[..., k.shape[2] :]

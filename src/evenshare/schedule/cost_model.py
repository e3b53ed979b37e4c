"""How many shares to cut a space of equal tiles into: more workers against more merging (Stream-K, section 5.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

Shares = TypeVar("Shares", int, np.ndarray)  # one number of shares, or many at once


@dataclass(frozen=True)
class CostModel:
    """Time of one share, in any one unit (only ratios matter when choosing).

    Constants are measured per (device, dtype, tile).
    """

    a: float  # once a share: launch, prologue, output of whole tiles
    b: float  # once a share if tiles are split: storing a partial
    c: float  # each iteration
    d: float  # each further contributor of a tile: reading its partial and adding it

    def __post_init__(self) -> None:
        for name in ("a", "b", "c", "d"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, want 0 or more")

    def time(self, num_shares: Shares, num_tiles: int, iters_per_tile: int) -> Shares | float:
        """a + b * [peers > 1] + c * iters_per_share + d * (peers - 1), the slowest share's time.

        iters_per_share = ceil(num_tiles * iters_per_tile / num_shares); peers = ceil(iters_per_tile / iters_per_share), the
        shares that cover one tile. Shares no shorter than a tile count as unsplit, even where they straddle tiles.
        """
        iters_per_share = -(-num_tiles * iters_per_tile // num_shares)
        peers = -(-iters_per_tile // iters_per_share)
        return self.a + self.b * (peers > 1) + self.c * iters_per_share + self.d * (peers - 1)


@lru_cache(maxsize=4096)
def choose_num_shares(model: CostModel, num_tiles: int, iters_per_tile: int, max_shares: int) -> int:
    """Number of shares in [1, max_shares] with the least `model.time`; among equals the fewest. 1 for an empty space.

    max_shares: workers that run at once. Raises ValueError for negative sizes or max_shares < 1.
    """
    if num_tiles < 0 or iters_per_tile < 0:
        raise ValueError(f"num_tiles, iters_per_tile: got {num_tiles} and {iters_per_tile}, want 0 or more")
    if max_shares < 1:
        raise ValueError(f"max_shares: got {max_shares}, want 1 or more")
    if num_tiles == 0 or iters_per_tile == 0:
        return 1
    times = model.time(np.arange(1, max_shares + 1), num_tiles, iters_per_tile)
    return int(np.argmin(times)) + 1

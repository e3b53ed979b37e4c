"""How long the same work takes on more ranks: times of shares, measured on one GPU, and what a link takes for the messages.

The model of a collective is that of Thakur, Rabenseifner and Gropp (Optimization of Collective Communication Operations in MPICH,
2005): log2(P) latencies and the bytes that a rank must send at the link's bandwidth, so the least that any algorithm takes.
Exchange and computation overlap where they do in the code: round the ring, and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from evenshare.distributed.states import ONE_STEP_BYTES


@dataclass(frozen=True)
class Link:
    """Between neighbouring ranks, in one direction."""

    gb_s: float
    latency_us: float

    def __post_init__(self) -> None:
        if not (self.gb_s > 0 and self.latency_us >= 0):
            raise ValueError(f"gb_s, latency_us: got {self.gb_s} and {self.latency_us}, want above 0, and 0 or more")

    def message_us(self, num_bytes: float) -> float:
        """From one rank to the next."""
        return self.latency_us + num_bytes / self.gb_s * 1e-3

    def spread_us(self, num_bytes: float, num_ranks: int) -> float:
        """An all-gather to, a reduce-scatter of or an exchange of num_bytes on every rank."""
        sent = num_bytes * (num_ranks - 1) / num_ranks
        return math.ceil(math.log2(num_ranks)) * self.latency_us + sent / self.gb_s * 1e-3

    def sum_us(self, num_bytes: float, num_ranks: int) -> float:
        """An all-reduce of num_bytes on every rank: a reduce-scatter and an all-gather."""
        return 2 * self.spread_us(num_bytes, num_ranks)


def context_us(share_us: float, state_bytes: float, result_bytes: float, num_ranks: int, link: Link) -> float:
    """Context-parallel attention into output "all". share_us: of one rank's share, the merge of states included; state_bytes,
    result_bytes: of all states of one rank, and of the result with its lse."""
    if num_ranks == 1:
        return share_us
    if state_bytes * num_ranks <= ONE_STEP_BYTES:
        return share_us + link.spread_us(state_bytes * num_ranks, num_ranks)
    return share_us + link.spread_us(state_bytes, num_ranks) + link.spread_us(result_bytes, num_ranks)


def ring_us(own_us: float, step_us: float, kv_bytes: float, num_ranks: int, link: Link) -> float:
    """Causal prefill round the ring. own_us: of the step with a rank's own keys, step_us: of any other, its merge included;
    kv_bytes: of a rank's keys and values."""
    if num_ranks == 1:
        return own_us
    message = link.message_us(kv_bytes)
    return max(own_us, message) + (num_ranks - 2) * max(step_us, message) + step_us


def tensor_us(share_us: float, sum_bytes: float, num_sums: int, num_ranks: int, link: Link) -> float:
    """Tensor-parallel layers. share_us: of a rank's products and what lies between; num_sums: all-reduces of sum_bytes each."""
    return share_us if num_ranks == 1 else share_us + num_sums * link.sum_us(sum_bytes, num_ranks)

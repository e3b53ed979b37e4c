"""The model of scaling, against times worked out by hand."""

from __future__ import annotations

import pytest

from evenshare.distributed.scaling import Link, context_us, ring_us, tensor_us

LINK = Link(gb_s=100, latency_us=5)  # 100,000 bytes a microsecond


def test_collectives() -> None:
    assert LINK.message_us(1e6) == 5 + 10
    assert LINK.spread_us(8e6, 4) == 2 * 5 + 60
    assert LINK.sum_us(8e6, 4) == 2 * LINK.spread_us(8e6, 4)
    assert LINK.spread_us(8e6, 5) == 3 * 5 + 64


def test_one_rank_sends_nothing() -> None:
    assert context_us(7, 1e6, 1e6, 1, LINK) == 7
    assert ring_us(7, 3, 1e6, 1, LINK) == 7
    assert tensor_us(7, 1e6, 2, 1, LINK) == 7


def test_small_states_are_gathered_and_large_ones_exchanged() -> None:
    assert context_us(7, 1e4, 1e4, 2, LINK) == 7 + 5 + 0.1
    assert context_us(7, 2e6, 1e6, 2, LINK) == 7 + (5 + 10) + (5 + 5)


def test_a_ring_hides_messages_behind_steps() -> None:
    assert ring_us(40, 30, 1e6, 4, LINK) == 40 + 2 * 30 + 30  # 15 us a message
    assert ring_us(40, 30, 5e6, 4, LINK) == 55 + 2 * 55 + 30  # 55 us


def test_sums() -> None:
    assert tensor_us(7, 1e6, 2, 2, LINK) == 7 + 2 * 2 * (5 + 5)


def test_errors() -> None:
    with pytest.raises(ValueError, match="gb_s, latency_us: got 0 and 1"):
        Link(0, 1)

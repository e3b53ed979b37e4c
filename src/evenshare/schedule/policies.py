"""Policies by name, their parameters, and how much a plan can hold."""

from __future__ import annotations

from dataclasses import dataclass

POLICIES = ("data_parallel", "fixed_split", "stream_k", "level_fill", "cost_sorted", "batch_invariant")
# Policies that are prefix sums, so that a plan can be made on the device.
DEVICE_POLICIES = ("data_parallel", "fixed_split", "stream_k", "level_fill", "batch_invariant")


@dataclass(frozen=True)
class Policy:
    """How a space is dealt.

    data_parallel: whole tiles in waves. fixed_split: each tile in `num_splits` nearly equal parts (fewer if it is shorter).
    stream_k: the whole space in even shares. level_fill: whole tiles in waves, then a tail cut so that workers finish level; all
    tiles are whole where that costs no more than the cuts (`RaggedSpace.cut_cost`).
    cost_sorted: chunks of at most `max_chunk` iterations (0: an even share), long ones first, to the least loaded worker.
    batch_invariant: cuts at multiples of `split_iterations` from each tile's begin, so that no tile's cuts depend on another.
    """

    name: str
    num_splits: int = 4
    split_iterations: int = 16
    max_chunk: int = 0

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise ValueError(f"policy: got {self.name!r}, want one of {', '.join(POLICIES)}")
        if self.num_splits < 1:
            raise ValueError(f"num_splits: got {self.num_splits}, want 1 or more")
        if self.split_iterations < 1:
            raise ValueError(f"split_iterations: got {self.split_iterations}, want 1 or more")
        if self.max_chunk < 0:
            raise ValueError(f"max_chunk: got {self.max_chunk}, want 0 (an even share) or more")


@dataclass(frozen=True)
class PlanCapacity:
    """Sizes of a plan's arrays."""

    max_segments: int
    max_slots: int
    max_counters: int


def capacity_of(policy: Policy, max_tiles: int, num_workers: int, max_iterations: int = 0) -> PlanCapacity:
    """Sizes that hold any plan of `max_tiles` tiles with `max_iterations` iterations in all: a function of no length.

    Even shares cut at most num_workers - 1 times, so at most that many tiles, and each cut adds one partial to its tile.
    """
    if policy.name == "data_parallel":
        return PlanCapacity(max_tiles, 0, 0)
    if policy.name in ("stream_k", "level_fill"):
        return PlanCapacity(max_tiles + num_workers, 2 * num_workers, num_workers)
    if policy.name == "fixed_split":
        parts = max_tiles * policy.num_splits
        return PlanCapacity(parts, parts, max_tiles)
    chunk = policy.split_iterations if policy.name == "batch_invariant" else policy.max_chunk
    parts = max_tiles + (max_iterations // chunk if chunk else num_workers)
    return PlanCapacity(parts, parts, max_tiles)

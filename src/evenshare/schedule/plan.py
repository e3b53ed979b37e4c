"""The plan: who computes what. Ints and int32 tensors only; kernels consume it, policies produce it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

# Columns of `Plan.segments`. A row is 32 bytes: one sector, read with independent loads.
TILE, BEGIN, END, SLOT, SLOT_BEGIN, NUM_SLOTS, COUNTER, RESERVED = range(8)
SEGMENT_COLUMNS = 8


@dataclass(frozen=True)
class Plan:
    """Segments dealt to workers.

    A segment is the iterations [BEGIN, END) of tile TILE. NUM_SLOTS == 1 marks a whole tile: its worker writes the output.
    Otherwise the tile is split: the worker stores a partial in slot SLOT; the tile's partials are the slots
    [SLOT_BEGIN, SLOT_BEGIN + NUM_SLOTS) in tile order, and COUNTER is the tile's arrival counter. Whole tiles have
    SLOT = SLOT_BEGIN = COUNTER = 0, NUM_SLOTS = 1.

    Sizes depend on the capacity alone, never on the costs, so a plan made on the device inside a CUDA graph keeps its shapes.
    """

    num_workers: int  # programs to launch
    max_segments: int
    max_slots: int  # partial results that the workspace must hold
    max_counters: int  # split tiles at most
    worker_indptr: (
        torch.Tensor
    )  # int32 [num_workers + 1]: worker w runs segments [worker_indptr[w], worker_indptr[w + 1])
    segments: torch.Tensor  # int32 [max_segments, 8]; rows past worker_indptr[-1] are zero
    status: (
        torch.Tensor
    )  # int32 [1]: bits of schedule.plan.Status, set by planners and kernels, never read by the host on a call

    def to(self, device: torch.device | str) -> Plan:
        """The same plan with its tensors on `device`; the copies are asynchronous."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True) for name in ("worker_indptr", "segments", "status")
        }
        return replace(self, **moved)


class Status:
    """Bits of `Plan.status`."""

    SEGMENTS_OVERFLOW = 1  # more segments (or slots) than the capacity holds: the plan is empty
    TILES_OVERFLOW = 2  # more tiles than the capacity holds
    BAD_LENGTHS = 4  # a decreasing indptr, a negative or impossible length
    BAD_INDEX = 8  # a page or block index outside the cache


@dataclass(frozen=True)
class UniformPlan:
    """Closed form for equal tiles: tiles [0, num_whole) whole, in waves over the workers; the rest dealt in even shares.

    Same segments as `Plan` by the level-fill policy with equal costs (a test expands and compares); kernels walk it with
    `device.segments`. A worker has at most two partials: slots [2w, 2w + 2).
    """

    num_workers: int
    num_tiles: int
    iters_per_tile: int
    num_whole: int

    @property
    def max_slots(self) -> int:
        return 2 * self.num_workers if self.num_whole < self.num_tiles else 0

    @property
    def max_counters(self) -> int:
        return self.num_tiles - self.num_whole

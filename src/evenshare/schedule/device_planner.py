"""Plans on the device: the prefix-sum policies in one launch or two, with the host planner's arrays bit for bit.

Even shares take one launch, level fill and the policies that cut at fixed places two (`kernels/shares.py`, `kernels/parts.py`). No
sync, no allocation: scratch belongs to the `DevicePlanner`, so `plan` can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton

from evenshare.schedule.kernels import parts, shares
from evenshare.schedule.plan import SEGMENT_COLUMNS, Plan
from evenshare.schedule.policies import DEVICE_POLICIES, Policy, capacity_of
from evenshare.schedule.space import RaggedSpace

# Rows that a step of the prefix sums takes: all of a small space at once, and no more, since searches take log2 steps.
ROW_BLOCKS = (128, 1024)
PLAN_WARPS, MEASURE_WARPS = 8, 4  # more warps share the work on a vector, but wait longer for one another
FILL_BLOCK = 128
WAVE_BLOCK = 64
INTERPRETER_BLOCK = 16  # the interpreter's time grows with the blocks


class DevicePlanner:
    """Plans spaces of one shape on their device, again and again, into the same arrays."""

    def __init__(self, space: RaggedSpace, policy: str | Policy, num_workers: int, *, max_iterations: int = 0) -> None:
        """space: fixes the device, the number of rows, inner, overhead and cut_cost; its iterations are not read here.

        max_iterations: over all tiles; a capacity that only batch_invariant needs.
        Raises ValueError for a policy that is no prefix sum (cost_sorted).
        """
        self.policy = Policy(policy) if isinstance(policy, str) else policy
        if self.policy.name not in DEVICE_POLICIES:
            raise ValueError(
                f"policy: got {self.policy.name!r}, want one of {', '.join(DEVICE_POLICIES)} on the device"
            )
        if num_workers < 1:
            raise ValueError(f"num_workers: got {num_workers}, want 1 or more")
        device = space.iterations.device
        self.inner, self.overhead, self.num_rows = space.inner, space.overhead, space.iterations.shape[0]
        self.cut_cost = space.cut_cost
        capacity = capacity_of(self.policy, space.num_tiles, num_workers, max_iterations)

        def ints(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._level = self.policy.name == "level_fill"
        self._by_worker = self.policy.name in ("stream_k", "level_fill")
        # Scratch. By parts: prefix sums over rows. By shares: what measure_waves hands on.
        rows = 0 if self._by_worker else self.num_rows
        self._sums = [ints(rows, torch.int64), ints(rows), ints(rows)]
        rows, tiles = (self.num_rows, space.num_tiles) if self._level else (0, 0)
        self._measured = [
            ints(3 + num_workers, torch.int64),
            ints(rows, torch.int64),
            ints(rows),
            ints(tiles, torch.int64),
            ints(num_workers),
        ]
        self._all_rows = torch.full((1,), self.num_rows, dtype=torch.int32, device=device)
        self.arrays = Plan(
            num_workers,
            capacity.max_segments,
            capacity.max_slots,
            capacity.max_counters,
            ints(num_workers + 1),
            ints(capacity.max_segments * SEGMENT_COLUMNS).view(capacity.max_segments, SEGMENT_COLUMNS),
            ints(1),
        )
        self._worker_block = triton.next_power_of_2(num_workers + 1)
        if device.type == "cpu":
            self._row_block = self._fill_block = self._wave_block = INTERPRETER_BLOCK
        else:
            low, high = ROW_BLOCKS
            self._row_block = min(max(triton.next_power_of_2(self.num_rows), low), high)
            self._fill_block, self._wave_block = FILL_BLOCK, WAVE_BLOCK

    def plan(self, iterations: torch.Tensor, num_rows: torch.Tensor | None = None) -> Plan:
        """Deal int32 iterations [num_rows] on the planner's device; overwrites and returns the planner's arrays.

        Values are not read by the host: rows of negative length are taken as empty and set Status.BAD_LENGTHS, more parts than
        the capacity set Status.SEGMENTS_OVERFLOW and leave the plan empty.
        num_rows: int32 [1] on the same device; rows from there on are taken as empty, unread. None: all rows count.
        Raises ValueError for another shape, dtype, stride or device.
        """
        device = self.arrays.segments.device
        if iterations.shape != (self.num_rows,) or iterations.dtype != torch.int32 or iterations.device != device:
            raise ValueError(
                f"iterations: got {iterations.dtype} {tuple(iterations.shape)} on {iterations.device}, "
                f"want torch.int32 ({self.num_rows},) on {device}"
            )
        if not iterations.is_contiguous():
            raise ValueError(f"iterations: got stride {iterations.stride(0)}, want 1")
        if num_rows is None:
            num_rows = self._all_rows
        elif num_rows.shape != (1,) or num_rows.dtype != torch.int32 or num_rows.device != device:
            raise ValueError(
                f"num_rows: got {num_rows.dtype} {tuple(num_rows.shape)} on {num_rows.device}, want torch.int32 (1,) on {device}"
            )
        if self.num_rows > 0:
            with torch.cuda.device_of(iterations):  # the tensor's GPU, not the current one
                if self._by_worker:
                    self._plan_shares(iterations, num_rows)
                else:
                    self._plan_parts(iterations, num_rows)
        return self.arrays

    def _plan_shares(self, iterations: torch.Tensor, num_rows: torch.Tensor) -> None:
        plan, row_block = self.arrays, self._row_block
        sizes = (self.num_rows, self.inner, self.overhead, plan.num_workers)
        rows = (iterations, num_rows, *self._measured)
        if self._level:
            shares.measure_waves[(plan.num_workers,)](
                *rows, plan.status, *sizes, BLOCK=row_block, WAVE_BLOCK=self._wave_block, num_warps=MEASURE_WARPS
            )
        shares.plan_shares[(plan.num_workers,)](
            *rows, plan.worker_indptr, plan.segments, plan.status, *sizes, plan.max_segments, self.cut_cost,
            LEVEL=self._level, BLOCK=row_block, WORKER_BLOCK=self._worker_block, FILL_BLOCK=self._fill_block,
            num_warps=PLAN_WARPS,
        )  # fmt: skip

    def _plan_parts(self, iterations: torch.Tensor, num_rows: torch.Tensor) -> None:
        plan, policy, fill_block = self.arrays, self.policy, self._fill_block
        cut, parameter = {
            "data_parallel": (0, 1),
            "fixed_split": (parts.FIXED_SPLIT.value, policy.num_splits),
            "batch_invariant": (parts.BATCH_INVARIANT.value, policy.split_iterations),
        }[policy.name]
        sizes = (self.num_rows, self.inner, parameter, plan.num_workers, plan.max_segments)
        rows = (iterations, num_rows, *self._sums)
        parts.measure_parts[(1,)](
            *rows, plan.worker_indptr, plan.status, *sizes,
            CUT=cut, BLOCK=self._row_block, WORKER_BLOCK=self._worker_block,
        )  # fmt: skip
        parts.fill_parts[(triton.cdiv(plan.max_segments, fill_block),)](
            *rows, plan.worker_indptr, plan.segments, *sizes, CUT=cut, BLOCK=fill_block,
        )  # fmt: skip

"""The two ways to run a plan: plain torch on the CPU, and the portable Triton kernels.

Both plan a batch and `bind` a run: a function of (q, k, v, out, lse), and then (k_scale, v_scale) if the keys are fp8, the first of
them times the scale of an fp8 q, for tensors laid out like those given, which serves until the sizes of the plan's metadata change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from evenshare.attention import launch, reference
from evenshare.attention.metadata import Batch, move, request_bounds
from evenshare.attention.problem import FP8, Problem
from evenshare.attention.tiles import TILE_COLUMNS, TileConfig, choose_tile, max_row_tiles, tile_table
from evenshare.device.target import Target
from evenshare.device.workspace import Workspace, new_workspace
from evenshare.schedule import DevicePlanner, Plan, RaggedSpace, make_plan

LN2 = math.log(2.0)
DEFAULT_POLICY = "level_fill"
FP8_CAPABILITY = (8, 9)  # from which on Triton knows the type
Run = Callable[..., None]


@dataclass(frozen=True)
class Capacity:
    """Upper bounds that a plan's arrays are sized by. A CUDA graph replays any batch within them."""

    max_batch: int
    max_q_rows: int  # query tokens over all requests
    max_kv_len: int = 0  # keys of one request; only policies that cut at fixed places need it


class HostLengths:
    """A batch of the CPU backend: lengths as Python ints, taken once per plan."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.status_words: list[torch.Tensor] = []  # host metadata raises at once

    def plan(self, batch: Batch) -> None:
        self.batch = move(batch, "cpu")
        q_start, qo_len, kv_start, kv_len = (t.tolist() for t in request_bounds(self.batch, self.problem.page_size))
        self.qo_indptr = [*q_start, q_start[-1] + qo_len[-1]] if q_start else [0]
        self.kv_start, self.kv_lens = kv_start, kv_len
        indices = self.batch.kv_indices
        if indices is not None:
            flat = indices.as_strided((self.batch.num_indices,), (1,)) if indices.numel() else indices.flatten()
            self.page_lists = [flat[begin:] for begin in kv_start]


class TorchExecutor(HostLengths):
    """The CPU backend."""

    def bind(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scales: tuple[torch.Tensor, ...],
        lse_scale: float,
    ) -> Run:
        return partial(self._run, lse_scale)

    def _run(
        self,
        lse_scale: float,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        problem = self.problem
        options: dict[str, Any] = {
            "causal": problem.causal,
            "window_left": problem.window_left,
            "sm_scale": problem.sm_scale,
            "logits_soft_cap": problem.logits_soft_cap or None,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "variant": problem.variant,
        }
        if self.batch.form == "dense":
            for b, kv_len in enumerate(self.kv_lens):
                row_lse = None if lse is None else lse[b]
                indptrs = [0, q.shape[1]], [0, kv_len]
                reference.ragged_attention(
                    q[b], k[b], v[b], *indptrs, out=out[b], lse=row_lse, first_request=b, **options
                )
        elif self.batch.form == "ragged":
            kv_indptr = [*self.kv_start, self.kv_start[-1] + self.kv_lens[-1]] if self.kv_start else [0]
            reference.ragged_attention(q, k, v, self.qo_indptr, kv_indptr, out=out, lse=lse, **options)
        else:
            reference.paged_attention(
                q, k, v, self.qo_indptr, self.page_lists, self.kv_lens, out=out, lse=lse, **options
            )
        if lse is not None:
            lse *= lse_scale / LN2


class DealtTiles:
    """A batch of the portable kernels: a tile table, the scheduler's plan and a workspace, all sized by the capacity."""

    def __init__(
        self,
        problem: Problem,
        tile: TileConfig,
        capacity: Capacity,
        target: Target,
        policy: str | None,
        planner: str,
    ) -> None:
        self.problem, self.tile, self.target, self.planner = problem, tile, target, planner
        device = target.device
        self.policy = DEFAULT_POLICY if policy is None else policy
        max_tiles = max_row_tiles(problem, self.tile, capacity.max_batch, capacity.max_q_rows)
        self.num_workers = target.num_sms * self.tile.workers_per_sm
        self.tiles = torch.zeros(max_tiles, TILE_COLUMNS, dtype=torch.int32, device=device)
        self.iterations = torch.zeros(max_tiles, dtype=torch.int32, device=device)
        self.num_tiles = torch.zeros(1, dtype=torch.int32, device=device)
        self.status = torch.zeros(1, dtype=torch.int32, device=device)
        max_tile_blocks = max(-(-capacity.max_kv_len // self.tile.block_n), 1)
        self.heads_per_row = self.tile.heads_per_row(problem)
        self.max_iterations = max_tiles * self.heads_per_row * max_tile_blocks
        space = self._space(self.iterations)
        if planner == "device":
            self.device_planner = DevicePlanner(
                space, self.policy, self.num_workers, max_iterations=self.max_iterations
            )
        self.schedule: Plan | None = None  # made by the first plan, overwritten by the next ones
        self.workspace: Workspace | None = None

    def _space(self, iterations: torch.Tensor) -> RaggedSpace:
        return RaggedSpace(iterations, self.heads_per_row, self.tile.overhead, self.tile.cut_cost)

    @property
    def status_words(self) -> list[torch.Tensor]:
        return [self.status] if self.schedule is None else [self.status, self.schedule.status]

    def plan(self, batch: Batch) -> None:
        problem, device = self.problem, self.target.device
        if self.planner == "host":
            tiles, iterations = tile_table(problem, self.tile, batch, self.tiles.shape[0])
            schedule = make_plan(
                self._space(iterations),
                self.policy,
                self.num_workers,
                max_iterations=self.max_iterations,
                out=self.schedule,
            )
            self.schedule = schedule if self.schedule is not None else schedule.to(device)
            self.tiles.copy_(tiles, non_blocking=True)
            self.status.zero_()
        else:
            batch = move(batch, device)
            with torch.cuda.device_of(self.tiles):  # the tensors' GPU, not the current one
                launch.launch_tile_table(
                    problem, self.tile, batch, self.tiles, self.iterations, self.num_tiles, self.status
                )
                self.schedule = self.device_planner.plan(self.iterations, self.num_tiles)
        self.kv_indices = self.tiles if batch.kv_indices is None else batch.kv_indices.to(device, non_blocking=True)
        self.num_indices = batch.num_indices
        if self.workspace is None:
            elements = self.schedule.max_slots * self.partial_elements()
            # Two counters a split tile: the Hopper kernels merge its halves one by one.
            self.workspace = new_workspace(elements, 2 * self.schedule.max_counters, device)

    def partial_elements(self) -> int:
        return launch.partial_elements(self.problem, self.tile)


class TritonExecutor(DealtTiles):
    """The portable kernels and those for Hopper."""

    def __init__(self, problem: Problem, capacity: Capacity, target: Target, policy: str | None, planner: str) -> None:
        if problem.fp8_kv and not target.interpreted and target.capability < FP8_CAPABILITY:
            got, want = (".".join(map(str, c)) for c in (target.capability, FP8_CAPABILITY))
            raise ValueError(f"kv_dtype: got {FP8} on a GPU of compute capability {got}, want {want} or newer")
        mean_qo_len = capacity.max_q_rows / max(capacity.max_batch, 1)
        tile = choose_tile(problem, mean_qo_len, target.capability, target.interpreted)
        super().__init__(problem, tile, capacity, target, policy, planner)
        self.forward: launch.ForwardLauncher | None = None  # made by the first plan

    def plan(self, batch: Batch) -> None:
        super().plan(batch)
        if self.forward is None:
            assert self.schedule is not None
            assert self.workspace is not None
            self.forward = launch.ForwardLauncher(
                self.problem, self.tile, self.schedule, self.tiles, self.workspace, self.status
            )

    def timed(self) -> TritonExecutor:
        """The same executor and arrays; its runs also note when they do what, in `forward.times`."""
        assert self.forward is not None
        twin = copy(self)
        twin.forward = self.forward.timed()
        return twin

    def bind(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scales: tuple[torch.Tensor, ...],
        lse_scale: float,
    ) -> Run:
        assert self.forward is not None
        assert self.workspace is not None
        start = self.forward.bind(q, k, v, out, lse, scales, self.num_indices, lse_scale)
        no_lse = self.workspace.partials

        def run(q: Any, k: Any, v: Any, out: Any, lse: Any, *scales: torch.Tensor) -> None:
            start(q, k, v, out, no_lse if lse is None else lse, self.kv_indices, *scales)

        return run

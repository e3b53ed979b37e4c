"""Plan once per step, run in every layer: `plan_attention(...)` deals the batch's work, `AttentionPlan.run` computes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from evenshare.attention import launch, reference
from evenshare.attention.metadata import Batch, check_host_values, make_batch, request_bounds
from evenshare.attention.problem import Problem, check_tensor, lse_scale
from evenshare.attention.tiles import TILE_COLUMNS, TileConfig, choose_tile, max_row_tiles, tile_table
from evenshare.device.target import Target, select_target
from evenshare.device.workspace import Workspace, new_workspace
from evenshare.schedule import DevicePlanner, Plan, RaggedSpace, Status, capacity_of, make_plan

# Cost of a tile's prologue and epilogue (q load, state, output) in iterations of one key block.
TILE_OVERHEAD = 1


@dataclass(frozen=True)
class Capacity:
    """Upper bounds that a plan's arrays are sized by. A CUDA graph replays any batch within them."""

    max_batch: int
    max_q_rows: int  # query tokens over all requests
    max_kv_blocks: int  # key blocks of one row tile; only policies that cut at fixed places need it


class AttentionPlan:
    """A batch's work dealt to workers; made by `plan_attention`. Owns its workspace: use it on one stream at a time."""

    def __init__(
        self, problem: Problem, batch: Batch, capacity: Capacity, target: Target, *, kv_layout: str, base: float, policy: str,
        planner: str, debug: bool,
    ) -> None:  # fmt: skip
        self.problem = problem
        self.capacity = capacity
        self.target = target
        self.kv_layout = kv_layout
        self.base = base
        self.policy = policy
        self.planner = planner
        self.debug = debug
        self.dense = False
        self._batch = batch
        self._kv_indices: torch.Tensor | None = None
        if target.backend == "triton":
            self._allocate()
        self._plan_now()

    # -- planning ---------------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        problem, device = self.problem, self.target.device
        mean_qo_len = self.capacity.max_q_rows / max(self.capacity.max_batch, 1)
        self.tile: TileConfig = choose_tile(problem, mean_qo_len, self.target.interpreted)
        max_tiles = max_row_tiles(problem, self.tile, self.capacity.max_batch, self.capacity.max_q_rows)
        self._num_workers = self.target.num_sms * self.tile.workers_per_sm
        self._tiles = torch.zeros(max_tiles, TILE_COLUMNS, dtype=torch.int32, device=device)
        self._iterations = torch.zeros(max_tiles, dtype=torch.int32, device=device)
        self._offsets = torch.zeros(self.capacity.max_batch + 1, dtype=torch.int32, device=device)
        self.status = torch.zeros(1, dtype=torch.int32, device=device)
        self._planner = None
        self._workspace: Workspace | None = None

    def update(
        self,
        *,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        last_page_len: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
    ) -> None:
        """Plan again, from the tensors given or, for those left out, from the tensors planned last, whose values may have changed
        in place. With device metadata this launches kernels only: no sync, capturable in a CUDA graph.

        Raises ValueError if the batch is larger than the capacity, or if host metadata is impossible.
        """
        batch = self._batch
        fresh = {
            "qo_indptr": qo_indptr if qo_indptr is not None else batch.qo_indptr,
            "kv_indptr": kv_indptr if kv_indptr is not None else batch.kv_indptr,
            "kv_indices": kv_indices if kv_indices is not None else (batch.kv_indices if batch.form == "paged" else None),
            "last_page_len": last_page_len if last_page_len is not None else (batch.kv_lens if batch.form == "paged" else None),
            "block_table": block_table if block_table is not None else (batch.kv_indices if batch.form == "block_table" else None),
            "kv_lens": kv_lens if kv_lens is not None else (batch.kv_lens if batch.form == "block_table" else None),
        }
        self._batch = make_batch(**fresh)
        if self._batch.form != batch.form:
            raise ValueError(f"form of the metadata: got {self._batch.form}, want {batch.form} as planned first")
        if self._batch.size > self.capacity.max_batch:
            raise ValueError(f"batch: got {self._batch.size} requests, want at most the plan's max_batch {self.capacity.max_batch}")
        self._plan_now()

    def _plan_now(self) -> None:
        batch, problem = self._batch, self.problem
        on_host = batch.device.type == "cpu"
        if on_host:
            check_host_values(batch, problem.page_size)
        elif self.debug:
            check_host_values(_to_host(batch), problem.page_size)
        if self.target.backend == "cpu":
            self._host_batch = _HostBatch(_to_host(batch), problem.page_size)
            return
        device = self.target.device
        self._kv_indices = None if batch.kv_indices is None else batch.kv_indices.to(device, non_blocking=True)
        space = RaggedSpace(self._iterations, inner=problem.num_kv_heads, overhead=TILE_OVERHEAD)
        if self.planner == "host":
            tiles, iterations = tile_table(problem, self.tile, _to_host(batch), self._tiles.shape[0])
            self._tiles.copy_(tiles, non_blocking=True)
            self.status.zero_()
            plan = make_plan(replace(space, iterations=iterations), self.policy, self._num_workers)
            self.plan: Plan = _to_device(plan, device)
        else:
            launch.launch_tile_table(problem, self.tile, batch, self._tiles, self._iterations, self._offsets, self.status)
            if self._planner is None:
                self._planner = DevicePlanner(space, self.policy, self._num_workers)
            self.plan = self._planner.plan(self._iterations)
        if self._workspace is None:
            elements = self.plan.max_slots * launch.partial_elements(problem, self.tile)
            self._workspace = new_workspace(elements, self.plan.max_counters, device)

    # -- running ----------------------------------------------------------------------------------------------------

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Attention of the planned batch.

        q: [total_q, Hq, D]. k, v: pages [num_pages, page_size, Hkv, D] (NHD) or [num_pages, Hkv, page_size, D] (HND), or ragged
        [total_kv, Hkv, D]. Any strides except the last, which is 1. out: [total_q, Hq, Dv] of q's dtype; lse: float32 [total_q, Hq],
        logarithm of the plan's base. Rows of q past the last request are left alone.

        Returns out, or (out, lse) if return_lse or lse is given. A row without keys has out = 0 and lse = -inf. Never syncs.
        Raises ValueError or TypeError naming the argument before anything is written.
        """
        problem, device = self.problem, self.target.device
        heads, dims, kv_heads = problem.num_qo_heads, problem.head_dim, problem.num_kv_heads
        q_shape: tuple[int | None, ...] = (None, None, heads, dims) if self.dense else (None, heads, dims)
        check_tensor("q", q, q_shape, problem.dtype, device)
        if problem.page_size:
            if self.kv_layout == "HND":
                k, v = _swap(k, "k"), _swap(v, "v")
            check_tensor("k", k, (None, problem.page_size, kv_heads, dims), problem.dtype, device)
            check_tensor("v", v, (k.shape[0], problem.page_size, kv_heads, problem.head_dim_v), problem.dtype, device)
        elif self.dense:
            check_tensor("k", k, (q.shape[0], None, kv_heads, dims), problem.dtype, device)
            check_tensor("v", v, (q.shape[0], k.shape[1], kv_heads, problem.head_dim_v), problem.dtype, device)
        else:
            check_tensor("k", k, (None, kv_heads, dims), problem.dtype, device)
            check_tensor("v", v, (k.shape[0], kv_heads, problem.head_dim_v), problem.dtype, device)
        out_shape = (*q.shape[:-1], problem.head_dim_v)
        if out is not None:
            check_tensor("out", out, out_shape, problem.dtype, device)
        if lse is not None:
            check_tensor("lse", lse, q.shape[:-1], torch.float32, device)
        self._check_extent(q, k)
        if out is None:
            out = q.new_empty(out_shape)
        if lse is None and return_lse:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=device)
        if self.target.backend == "cpu":
            self._host_batch.run(problem, q, k, v, out, lse, self.base, self._batch.kv_indices)
        else:
            assert self._workspace is not None
            launch.launch_forward(
                problem, self.tile, self.plan, self._tiles, self._workspace, self.status, q, k, v, out, lse, self._kv_indices,
                self._batch.num_indices, lse_scale(self.base),
            )  # fmt: skip
        return (out, lse) if lse is not None else out

    def _check_extent(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Host metadata that points past q or k is refused here; device metadata is clamped by the kernel."""
        batch = self._batch
        if self.dense:
            return
        if batch.device.type == "cpu":
            rows = int(batch.qo_indptr[-1]) if batch.qo_indptr is not None else batch.size
            if rows > q.shape[0]:
                raise ValueError(f"q: got {q.shape[0]} tokens, want at least the {rows} that qo_indptr deals out")
            if batch.form == "ragged" and batch.kv_indptr is not None and int(batch.kv_indptr[-1]) > k.shape[0]:
                raise ValueError(f"k: got {k.shape[0]} tokens, want at least the {int(batch.kv_indptr[-1])} that kv_indptr deals out")

    def check(self) -> None:
        """Raise RuntimeError if the planner or a kernel met impossible metadata. The only call of a plan that syncs."""
        if self.target.backend == "cpu":
            return
        bits = int(self.status.item()) | int(self.plan.status.item())
        found = [f"{text} ({name})" for name, text in _STATUS_TEXTS.items() if bits & getattr(Status, name)]
        if found:
            raise RuntimeError("attention plan: " + "; ".join(found))


_STATUS_TEXTS = {
    "SEGMENTS_OVERFLOW": "more segments than the plan's capacity",
    "TILES_OVERFLOW": "more query rows than the plan's max_q_rows",
    "BAD_LENGTHS": "an indptr decreases or a length is impossible; those requests were taken as empty",
    "BAD_INDEX": "a page or key index outside the cache; its rows are zero",
}

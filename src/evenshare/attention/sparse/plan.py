"""Lists of key blocks dealt to workers once, for the layers that share them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from evenshare.attention.executors import DEFAULT_POLICY, LN2
from evenshare.attention.problem import Problem, check_tensor, lse_scale
from evenshare.attention.sparse import launch, reference
from evenshare.attention.sparse.blocks import BlockSparsity
from evenshare.attention.sparse.tiles import Heads, choose_block_tile, row_tiles
from evenshare.device.launcher import Launch
from evenshare.device.target import Target
from evenshare.device.workspace import Workspace, new_workspace
from evenshare.schedule import DevicePlanner, Plan, RaggedSpace, make_plan
from evenshare.schedule.plan import Status

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MAX_LAYOUTS = 64  # of q, k, v, out and lse that a plan remembers


class BlockSparsePlan:
    """Lists of blocks dealt to workers; made by `plan_block_sparse_attention`. It owns its workspace: one stream at a time."""

    def __init__(
        self,
        problem: Problem,
        sparsity: BlockSparsity,
        batch: int,
        qo_len: int,
        kv_len: int,
        target: Target,
        base: float = math.e,
    ) -> None:
        assert problem.variant is not None
        self.problem, self.target = problem, target
        self.batch, self.qo_len, self.kv_len = batch, qo_len, kv_len
        self._variant = problem.variant
        self._variant.check(problem.num_qo_heads, target.device)
        self._lse_scale = lse_scale(base)
        self._runs: dict[Any, Launch] = {}
        self.status = torch.zeros(1, dtype=torch.int32, device=target.device)
        self._sparsity = sparsity
        self._check_lists(sparsity)
        self._heads = Heads.of(sparsity.num_blocks.shape[1], problem.num_qo_heads, problem.num_kv_heads)
        if target.backend == "triton":
            self._tile = choose_block_tile(problem, self._heads, sparsity.block_size, target)
            self._num_workers = target.num_sms * self._tile.workers_per_sm
            self._tables: tuple[torch.Tensor, torch.Tensor] | None = (
                None  # indices and row tiles, made by the first plan
            )
            self._planner: DevicePlanner | None = None
            self._schedule: Plan | None = None
            self._workspace: Workspace | None = None
            self._plan(sparsity)

    def update(self, blocks: BlockMask | BlockSparsity) -> None:
        """Plan again for other lists of the same sizes. With lists on the device this never syncs, and a CUDA graph can capture it.

        Raises ValueError if their sizes, their device or the mask_mod are not those planned first.
        """
        new, old = BlockSparsity.of(blocks), self._sparsity
        for name in ("num_blocks", "indices"):
            got, want = getattr(new, name), getattr(old, name)
            if got.shape != want.shape or got.device != want.device:
                raise ValueError(
                    f"blocks: got {name} of shape {tuple(got.shape)} on {got.device}, want {tuple(want.shape)} on {want.device}"
                )
        if new.block_size != old.block_size or new.mask_mod is not old.mask_mod:
            raise ValueError("blocks: got another block size or mask_mod, want those planned first")
        self._check_lists(new)
        self._sparsity = new
        if self.target.backend == "triton":
            self._plan(new)

    def _check_lists(self, sparsity: BlockSparsity) -> None:
        if sparsity.device.type != "cpu" and sparsity.device != self.target.device:
            raise ValueError(f"blocks: got device {sparsity.device}, want {self.target.device} or cpu")
        sparsity.check(self.batch, self.problem.num_qo_heads, self.problem.num_kv_heads, self.qo_len, self.kv_len)

    def _plan(self, sparsity: BlockSparsity) -> None:
        tile, device = self._tile, self.target.device
        tiles, iterations = row_tiles(sparsity, self._heads, tile, self.batch, self.qo_len)
        if self._tables is None:
            self._tables = sparsity.indices.to(device, copy=True), tiles.to(device, copy=True)
        else:
            for table, values in zip(self._tables, (sparsity.indices, tiles), strict=True):
                table.copy_(values, non_blocking=True)
        space = RaggedSpace(iterations, 1, tile.overhead, tile.cut_cost)
        if sparsity.device.type == "cpu":
            schedule = make_plan(space, DEFAULT_POLICY, self._num_workers, out=self._schedule)
            self._schedule = schedule if self._schedule is not None else schedule.to(device)
        else:
            if self._planner is None:
                self._planner = DevicePlanner(space, DEFAULT_POLICY, self._num_workers)
            self._schedule = self._planner.plan(iterations)
        self.status.zero_()
        if self._workspace is None:
            elements = self._schedule.max_slots * launch.partial_elements(self.problem, tile)
            self._workspace = new_workspace(elements, self._schedule.max_counters, device)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """q [B, Sq, Hq, D], k [B, Skv, Hkv, D], v [B, Skv, Hkv, Dv] -> out [B, Sq, Hq, Dv], or (out, lse float32 [B, Sq, Hq]).

        Any strides, but the last is 1. out may be q itself. Never syncs. Raises ValueError or TypeError before anything is written.
        """
        try:
            layouts = [(t.shape, t.stride(), t.dtype, t.device) if t is not None else None for t in (q, k, v, out, lse)]
        except AttributeError:  # no tensor
            layouts = []
        key = (return_lse, *layouts)
        run = self._runs.get(key)
        if run is None:
            self._check(q, k, v, out, lse, return_lse)
        if out is None:
            out = torch.empty((*q.shape[:-1], self.problem.head_dim_v), dtype=q.dtype, device=q.device)
        if lse is None and return_lse:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        if self.target.backend == "cpu":
            reference.block_sparse_attention(self.problem, self._variant, self._sparsity, q, k, v, out, lse)
            if lse is not None:
                lse *= self._lse_scale / LN2
        elif out.numel():
            assert self._workspace is not None
            if run is None:
                if len(self._runs) >= MAX_LAYOUTS:
                    self._runs.clear()
                run = self._runs[key] = self._bind(q, k, v, out, lse)
            run(q, k, v, out, self._workspace.partials if lse is None else lse)
        return out if lse is None else (out, lse)

    def _bind(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> Launch:
        assert self._tables is not None
        assert self._schedule is not None
        assert self._workspace is not None
        return launch.bind(
            self.problem, self._heads, self._tile, self._sparsity, self._schedule, self._tables, self._workspace, self.status,
            q, k, v, out, lse, self._lse_scale,
        )  # fmt: skip

    def _check(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
    ) -> None:
        """Raise unless `run` can take these."""
        problem, device = self.problem, self.target.device
        q_shape = (self.batch, self.qo_len, problem.num_qo_heads)
        k_shape = (self.batch, self.kv_len, problem.num_kv_heads)
        check_tensor("q", q, (*q_shape, problem.head_dim), problem.dtype, device)
        check_tensor("k", k, (*k_shape, problem.head_dim), problem.dtype, device)
        check_tensor("v", v, (*k_shape, problem.head_dim_v), problem.dtype, device)
        if out is not None:
            check_tensor("out", out, (*q_shape, problem.head_dim_v), problem.dtype, device)
        if lse is not None:
            check_tensor("lse", lse, q_shape, torch.float32, device, unit_stride=False)
        if (lse is not None or return_lse) and not self._variant.softmax:
            raise ValueError("lse, return_lse: got one, want neither with a variant of softmax=False")

    @property
    def num_iterations(self) -> int:
        """Blocks of keys that a run visits, over all tiles: what its time is made of. Syncs."""
        assert self._schedule is not None, "the torch backend has no tiles"
        segments = self._schedule.segments[: int(self._schedule.worker_indptr[-1])]
        return int((segments[:, 2] - segments[:, 1]).sum())

    def check(self) -> None:
        """Raise RuntimeError if a run met a key block outside the keys: the rows that needed it are zero. Syncs."""
        if int(self.status.item()) & Status.BAD_INDEX:
            raise RuntimeError("block-sparse attention plan: a list has a key block outside the keys")

"""From a plan of latent attention and tensors to the kernel's launch. Holds no policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from evenshare.attention.kernels import mla as kernels
from evenshare.attention.launch import PIECE_BYTES, has_whole_pieces, key_box
from evenshare.attention.mla.problem import MLAProblem
from evenshare.attention.mla.tiles import MERGE_COLUMNS
from evenshare.attention.tiles import TileConfig, box_rows
from evenshare.device.launcher import Launch, get_launcher
from evenshare.device.workspace import Workspace
from evenshare.schedule.plan import Plan


@dataclass(frozen=True)
class MLALauncher:
    """The kernel of one plan, for all its layers and steps: it holds the plan's arrays, which stay."""

    problem: MLAProblem
    tile: TileConfig
    schedule: Plan
    tiles: torch.Tensor
    workspace: Workspace
    status: torch.Tensor

    def bind(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        num_indices: int,
        lse_scale: float,
    ) -> Launch:
        """A launch for tensors laid out like these; it is called with (q_nope, q_pe, ckv, kpe, out, lse, kv_indices).

        Without lse the call passes any other array, which the kernel does not touch.
        """
        call = (q_nope, q_pe, ckv, kpe, out, lse, num_indices, lse_scale)
        if self.tile.kernel == "mla":
            return self._bind_portable(self.tile, *call)
        portable = self._bind_portable(replace(self.tile, kernel="mla", num_warps=8), *call)
        if ckv.numel() == 0 or not all(has_whole_pieces(t) for t in (q_nope, q_pe, ckv, kpe, out)):
            return portable
        hopper = self._bind_hopper(*call)

        def launch(
            q_nope: torch.Tensor, q_pe: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor, out: torch.Tensor, *others: torch.Tensor
        ) -> None:  # fmt: skip
            # Addresses change from call to call, and the Hopper kernel copies pieces of 16 bytes.
            addresses = q_nope.data_ptr() | q_pe.data_ptr() | ckv.data_ptr() | kpe.data_ptr() | out.data_ptr()
            (portable if addresses % PIECE_BYTES else hopper)(q_nope, q_pe, ckv, kpe, out, *others)

        return launch

    def _bind_portable(
        self,
        tile: TileConfig,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        num_indices: int,
        lse_scale: float,
    ) -> Launch:
        dim = self.problem.head_dim_v
        launcher = get_launcher(
            kernels.mla,
            7,
            **self._constants(lse),
            DIM_CKV=dim,
            DIM_KPE=self.problem.head_dim_kpe,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_MERGE=min(dim, MERGE_COLUMNS),
            NUM_STAGES=tile.num_stages,
            PRECISION="ieee",
            num_warps=tile.num_warps,
        )
        sizes = (q_nope.shape[0], ckv.shape[0], num_indices)
        static = (*self._arrays(lse_scale), *sizes, *_strides(q_nope, q_pe, ckv, kpe, out, lse))
        return launcher.bind(q_nope.device, (self.schedule.num_workers,), static)

    def _bind_hopper(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        num_indices: int,
        lse_scale: float,
    ) -> Launch:
        from evenshare.attention.kernels import hopper_mla

        tile = self.tile
        box = box_rows(self.problem, tile.block_n)
        launcher = get_launcher(
            hopper_mla.mla,
            7,
            **self._constants(lse),
            BLOCK_N=tile.block_n,
            BOX=box,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
        boxes = {number: key_box(cache.unsqueeze(2), box) for number, cache in ((2, ckv), (3, kpe))}
        sizes = (q_nope.shape[0], ckv.shape[0], num_indices)
        static = (*self._arrays(lse_scale), *sizes, *_strides(q_nope, q_pe, out, lse))
        return launcher.bind(q_nope.device, (self.schedule.num_workers,), static, boxes)

    def _constants(self, lse: torch.Tensor | None) -> dict[str, Any]:
        problem = self.problem
        return {
            "GROUP": problem.group_size,
            "PAGE_SIZE": problem.page_size,
            "CAUSAL": problem.causal,
            "HAS_LSE": lse is not None,
        }

    def _arrays(self, lse_scale: float) -> tuple[Any, ...]:
        schedule, workspace = self.schedule, self.workspace
        partial_o = workspace.partials
        partial_lse = partial_o[schedule.max_slots * self.tile.block_m * self.problem.head_dim_v :]
        return (
            schedule.worker_indptr,
            schedule.segments,
            self.tiles,
            partial_o,
            partial_lse if schedule.max_slots else partial_o,
            workspace.counters,
            self.status,
            self.problem.sm_scale,
            lse_scale,
        )


def _strides(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """Of the first two dimensions each; (0, 0) for None."""
    return tuple(stride for t in tensors for stride in (t.stride()[:2] if t is not None else (0, 0)))

"""The two ways to run a plan of latent attention: plain torch on the CPU, and the portable Triton kernel.

Both plan a batch and `bind` a run: a function of (q_nope, q_pe, ckv, kpe, out, lse) for tensors laid out like those given, which
serves until the sizes of the plan's metadata change.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from evenshare.attention import reference
from evenshare.attention.executors import LN2, Capacity, DealtTiles, HostLengths, Run
from evenshare.attention.mla.launch import MLALauncher
from evenshare.attention.mla.problem import MLAProblem
from evenshare.attention.mla.tiles import choose_mla_tile
from evenshare.device.target import Target


class TorchMLA(HostLengths):
    """The CPU backend."""

    def bind(self, *tensors: torch.Tensor | None, lse_scale: float) -> Run:
        return partial(self._run, lse_scale)

    def _run(
        self,
        lse_scale: float,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        reference.paged_mla(
            q_nope,
            q_pe,
            ckv,
            kpe,
            self.qo_indptr,
            self.page_lists,
            self.kv_lens,
            causal=self.problem.causal,
            sm_scale=self.problem.sm_scale,
            out=out,
            lse=lse,
        )
        if lse is not None:
            lse *= lse_scale / LN2


class TritonMLA(DealtTiles):
    """The portable kernel."""

    problem: MLAProblem

    def __init__(
        self, problem: MLAProblem, capacity: Capacity, target: Target, policy: str | None, planner: str
    ) -> None:
        mean_qo_len = capacity.max_q_rows / max(capacity.max_batch, 1)
        tile = choose_mla_tile(problem, mean_qo_len, target.capability, target.interpreted)
        super().__init__(problem, tile, capacity, target, policy, planner)

    def partial_elements(self) -> int:
        """fp32 values of one partial: o [block_m, C], and an lse of each row for either half of its columns."""
        return self.tile.block_m * (self.problem.head_dim_v + 2)

    def bind(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        lse_scale: float,
    ) -> Run:
        assert self.schedule is not None
        assert self.workspace is not None
        if self.schedule.num_workers == 0 or self.tiles.shape[0] == 0 or out.numel() == 0:
            return _run_nothing
        launcher = MLALauncher(self.problem, self.tile, self.schedule, self.tiles, self.workspace, self.status)
        start = launcher.bind(q_nope, q_pe, ckv, kpe, out, lse, self.num_indices, lse_scale)
        no_lse = self.workspace.partials

        def run(q_nope: Any, q_pe: Any, ckv: Any, kpe: Any, out: Any, lse: Any) -> None:
            start(q_nope, q_pe, ckv, kpe, out, no_lse if lse is None else lse, self.kv_indices)

        return run


def _run_nothing(*_: torch.Tensor | None) -> None:
    pass

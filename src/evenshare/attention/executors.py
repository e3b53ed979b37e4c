"""The two ways to run a plan: plain torch on the CPU, and the portable Triton kernels. Both plan a batch, then run it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from evenshare.attention import launch, reference
from evenshare.attention.metadata import Batch, request_bounds, to_host
from evenshare.attention.problem import Problem, lse_scale
from evenshare.attention.tiles import TILE_COLUMNS, choose_tile, max_row_tiles, tile_table
from evenshare.device.target import Target
from evenshare.device.workspace import new_workspace
from evenshare.schedule import DevicePlanner, Plan, RaggedSpace, make_plan

# Cost of a tile's prologue and epilogue (q load, state, output), in iterations of one key block.
TILE_OVERHEAD = 1


@dataclass(frozen=True)
class Capacity:
    """Upper bounds that a plan's arrays are sized by. A CUDA graph replays any batch within them."""

    max_batch: int
    max_q_rows: int  # query tokens over all requests
    max_kv_blocks: int  # key blocks of one row tile; only policies that cut at fixed places need it


class TorchExecutor:
    """The CPU backend: lengths as Python ints, taken once per plan."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def plan(self, batch: Batch) -> None:
        host = to_host(batch)
        q_start, qo_len, kv_start, kv_len = (t.tolist() for t in request_bounds(host, self.problem.page_size))
        self.batch = host
        self.qo_indptr = [*q_start, q_start[-1] + qo_len[-1]] if q_start else [0]
        self.kv_start, self.kv_lens = kv_start, kv_len

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, base: float
    ) -> None:
        problem = self.problem
        options = {
            "causal": problem.causal, "window_left": problem.window_left, "sm_scale": problem.sm_scale,
            "logits_soft_cap": problem.logits_soft_cap or None,
        }  # fmt: skip
        if self.batch.form == "dense":
            for b in range(q.shape[0]):
                reference.ragged_attention(
                    q[b], k[b], v[b], [0, q.shape[1]], [0, self.kv_lens[b]], out=out[b], lse=None if lse is None else lse[b], **options
                )
        elif self.batch.form == "ragged":
            reference.ragged_attention(q, k, v, self.qo_indptr, [*self.kv_start, k.shape[0]], out=out, lse=lse, **options)
        else:
            raise NotImplementedError
        if lse is not None:
            lse *= lse_scale(base) / lse_scale(2.718281828459045)

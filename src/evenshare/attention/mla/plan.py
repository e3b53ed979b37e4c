"""Plan once per step, run in every layer: `plan_mla(...)` deals the batch's work, `MLAPlan.run` computes."""

from __future__ import annotations

import math
from typing import Any

import torch

from evenshare.attention.batch_plan import BatchPlan, choose_capacity, choose_target, planner_of
from evenshare.attention.executors import Capacity, Run
from evenshare.attention.metadata import Batch, make_batch
from evenshare.attention.mla.executors import TorchMLA, TritonMLA
from evenshare.attention.mla.problem import MLAProblem
from evenshare.attention.problem import check_tensor
from evenshare.device.target import Target

MAX_LAYOUTS = 64  # of the tensors of a run that a plan remembers


class MLAPlan(BatchPlan):
    """A batch's work dealt to workers; made by `plan_mla`. It owns its workspace: use it on one stream at a time.

    `update`, `status` and `check` are those of `AttentionPlan`.
    """

    problem: MLAProblem
    _executor: TorchMLA | TritonMLA

    def __init__(
        self,
        problem: MLAProblem,
        batch: Batch,
        capacity: Capacity,
        target: Target,
        *,
        base: float,
        policy: str | None,
        planner: str,
        debug: bool,
        metadata: dict[str, torch.Tensor | None],
    ) -> None:
        self._runs: dict[Any, Run] = {}  # by the extents of the metadata and the layouts of the tensors
        executor: TorchMLA | TritonMLA
        if target.backend == "cpu":
            executor = TorchMLA(problem)
        else:
            executor = TritonMLA(problem, capacity, target, policy, planner)
        super().__init__(problem, batch, capacity, target, executor, base=base, debug=debug, metadata=metadata)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Latent attention of the planned batch: out = softmax((q_nope . ckv + q_pe . kpe) * sm_scale) ckv.

        q_nope: [total_q, H, C], after the product with the up-projection of the keys; q_pe: [total_q, H, R]; ckv: [num_pages,
        page_size, C]; kpe: [num_pages, page_size, R]; all of the plan's dtype, any strides, but the last is 1 (ckv and kpe may be
        slices of one cache [num_pages, page_size, C + R]). out: [total_q, H, C]; it may be q_nope itself but must not overlap the
        inputs otherwise.
        lse: float32 [total_q, H], the logarithm to the plan's base. Rows of q past the last request are not computed.

        Returns out, or (out, lse) if `return_lse` or `lse` is given. A row without keys has out = 0 and lse = -inf. Never syncs.
        Raises ValueError or TypeError naming the argument, before anything is written.
        """
        try:
            layouts = [
                (t.shape, t.stride(), t.dtype, t.device) if t is not None else None
                for t in (q_nope, q_pe, ckv, kpe, out, lse)
            ]
        except AttributeError:  # no tensor
            self._check(q_nope, q_pe, ckv, kpe, out, lse)
            raise
        key = (self._extents, return_lse, *layouts)
        run = self._runs.get(key)
        if run is None:
            self._check(q_nope, q_pe, ckv, kpe, out, lse)
        if out is None:
            out = torch.empty(q_nope.shape, dtype=self.problem.dtype, device=q_nope.device)
        if lse is None and return_lse:
            lse = torch.empty(q_nope.shape[:-1], dtype=torch.float32, device=q_nope.device)
        if run is None:
            if len(self._runs) >= MAX_LAYOUTS:
                self._runs.clear()
            run = self._runs[key] = self._executor.bind(q_nope, q_pe, ckv, kpe, out, lse, lse_scale=self._lse_scale)
        run(q_nope, q_pe, ckv, kpe, out, lse)
        return out if lse is None else (out, lse)

    def _check(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> None:
        """Raise unless `run` can take these."""
        problem, device = self.problem, self.target.device
        dtype, dim, rotary = problem.dtype, problem.head_dim_v, problem.head_dim_kpe
        check_tensor("q_nope", q_nope, (None, problem.num_qo_heads, dim), dtype, device)
        check_tensor("q_pe", q_pe, (*q_nope.shape[:2], rotary), dtype, device)
        check_tensor("ckv", ckv, (None, problem.page_size, dim), dtype, device)
        check_tensor("kpe", kpe, (*ckv.shape[:2], rotary), dtype, device)
        if out is not None:
            check_tensor("out", out, q_nope.shape, dtype, device)
        if lse is not None:
            check_tensor("lse", lse, q_nope.shape[:2], torch.float32, device, unit_stride=False)
        if q_nope.shape[0] < self._extents[0]:
            raise ValueError(
                f"q_nope: got {q_nope.shape[0]} tokens, want at least the {self._extents[0]} of the planned batch"
            )


def plan_mla(
    *,
    num_heads: int,
    page_size: int,
    sm_scale: float,
    head_dim_ckv: int = 512,
    head_dim_kpe: int = 64,
    qo_indptr: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    base: float = math.e,
    max_batch: int | None = None,
    max_q_rows: int | None = None,
    max_kv_len: int | None = None,
    policy: str | None = None,
    planner: str | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
    debug: bool = False,
) -> MLAPlan:
    """Deal a batch's latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) to the device's workers in even shares.

    All num_heads query heads share one KV head, whose key is a latent of head_dim_ckv numbers beside head_dim_kpe rotary ones, and
    whose value is the latent. Dims are powers of two, from 16 to 512 and from 16 to 128.
    sm_scale: of the scores, by the head dim before the projection: 1 / sqrt(128 + 64) in DeepSeek-V3. Nothing here tells it.
    page_size: tokens of a page, any number from 1. The page table is kv_indptr, kv_indices and last_page_len, or block_table and
    kv_lens. These and the other arguments are those of `plan_attention`.

    Raises ValueError or TypeError naming the argument, what was got and what is wanted.

    >>> table, lens = torch.tensor([[3, 1], [5, 0]]), torch.tensor([20, 7])
    >>> plan = plan_mla(num_heads=4, page_size=16, sm_scale=192**-0.5, block_table=table, kv_lens=lens, dtype=torch.float32)
    >>> plan.run(torch.randn(2, 4, 512), torch.randn(2, 4, 64), torch.randn(6, 16, 512), torch.randn(6, 16, 64)).shape
    torch.Size([2, 4, 512])
    """
    metadata = {
        "qo_indptr": qo_indptr,
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "last_page_len": last_page_len,
        "block_table": block_table,
        "kv_lens": kv_lens,
    }
    batch = make_batch(**metadata)
    if batch.form == "ragged":
        raise ValueError("kv_indices: got None, want a page table (pages of one token for contiguous latents)")
    if not isinstance(page_size, int) or page_size < 1:
        raise ValueError(f"page_size: got {page_size!r}, want 1 or more")
    planner = planner_of(batch, planner)
    target = choose_target(batch, device, backend, policy)
    problem = MLAProblem.of(num_heads, head_dim_ckv, head_dim_kpe, dtype, page_size, causal, sm_scale)
    capacity = choose_capacity(batch, page_size, policy, max_batch, max_q_rows, max_kv_len)
    return MLAPlan(
        problem, batch, capacity, target, base=base, policy=policy, planner=planner, debug=debug, metadata=metadata
    )

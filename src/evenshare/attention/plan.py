"""Plan once per step, run in every layer: `plan_attention(...)` deals the batch's work, `AttentionPlan.run` computes."""

from __future__ import annotations

import math
from copy import copy
from typing import TYPE_CHECKING, Any

import torch

from evenshare.attention.batch_plan import BatchPlan, choose_capacity, choose_target, planner_of
from evenshare.attention.executors import Capacity, Run, TorchExecutor, TritonExecutor
from evenshare.attention.metadata import Batch, dense_batch, make_batch
from evenshare.attention.problem import FP8, Problem, check_tensor, default_causal, default_scale
from evenshare.device.checks import check_is_tensor
from evenshare.device.target import Target

if TYPE_CHECKING:
    from evenshare.attention.variants.variant import Variant

MAX_LAYOUTS = 64  # of q, k, v, out, lse and scales that a plan remembers
MAX_SCALES = 1024  # numbers that it keeps on the device
FP32 = torch.finfo(torch.float32)


class AttentionPlan(BatchPlan):
    """A batch's work dealt to workers; made by `plan_attention`. It owns its workspace: use it on one stream at a time."""

    _executor: TorchExecutor | TritonExecutor

    def __init__(
        self,
        problem: Problem,
        batch: Batch,
        capacity: Capacity,
        target: Target,
        *,
        kv_layout: str = "NHD",
        base: float = math.e,
        policy: str | None = None,
        planner: str | None = None,
        debug: bool = False,
        metadata: dict[str, torch.Tensor | None] | None = None,
    ) -> None:
        if problem.variant is not None:
            problem.variant.check(problem.num_qo_heads, target.device)
        self.kv_layout = kv_layout
        self._heads_first = problem.page_size > 0 and kv_layout == "HND"
        self._runs: dict[Any, Run] = {}  # by the extents of the metadata and the layouts of the tensors
        self._scales: dict[float, torch.Tensor] = {}
        executor: TorchExecutor | TritonExecutor
        if target.backend == "cpu":
            executor = TorchExecutor(problem)
        else:
            executor = TritonExecutor(problem, capacity, target, policy, planner_of(batch, planner))
        super().__init__(problem, batch, capacity, target, executor, base=base, debug=debug, metadata=metadata)

    def plan_dense(self, kv_len: int) -> None:
        """Plan a dense batch for `kv_len` keys a request; nothing to do if it was planned for as many."""
        batch = self._batch
        if batch.table_width != kv_len:
            qo_len = self.capacity.max_q_rows // max(batch.size, 1)
            self._plan(dense_batch(batch.size, qo_len, kv_len, batch.device))

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attention of the planned batch.

        q: [total_q, Hq, D]. k, v: pages [num_pages, page_size, Hkv, D] (NHD) or [num_pages, Hkv, page_size, D] (HND), or ragged
        [total_kv, Hkv, D]. Any strides, but the last is 1. out: [total_q, Hq, Dv] of the plan's dtype; it may be q itself but
        must not overlap the inputs otherwise.
        q_scale, k_scale, v_scale: what float8_e4m3fn codes of q, k and v are multiplied by: a number, or float32 on the device, of
        one element or [Hkv], the query heads of a KV head sharing theirs; None: 1. Above 0; values on the device are not read by
        the host.
        lse: float32 [total_q, Hq], the logarithm to the plan's base. Rows of q past the last request are not computed.

        Returns out, or (out, lse) if `return_lse` or `lse` is given. A row without keys has out = 0 and lse = -inf. Never syncs.
        Raises ValueError or TypeError naming the argument, before anything is written.
        """
        scales = self._scale_tensors(q_scale, k_scale, v_scale)
        # What these tensors' layouts ask for is checked and bound once, for all layers and steps.
        try:
            layouts = [
                (t.shape, t.stride(), t.dtype, t.device) if t is not None else None
                for t in (q, k, v, out, lse, *scales)
            ]
        except AttributeError:  # no tensor
            self._check(q, k, v, out, lse, return_lse, scales)
            raise
        key = (self._extents, return_lse, *layouts)
        run = self._runs.get(key)
        if run is None:
            self._check(q, k, v, out, lse, return_lse, scales)
        if self._heads_first:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        if out is None:
            out = torch.empty((*q.shape[:-1], self.problem.head_dim_v), dtype=self.problem.dtype, device=q.device)
        if lse is None and return_lse:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        if len(scales) == 3:  # scores want the product of the first and the last, and the kernels no more arguments
            scales = scales[0] * scales[2], scales[1]
        if run is None:
            if len(self._runs) >= MAX_LAYOUTS:
                self._runs.clear()
            run = self._runs[key] = self._executor.bind(q, k, v, out, lse, scales, self._lse_scale)
        run(q, k, v, out, lse, *scales)
        return out if lse is None else (out, lse)

    def _scale_tensors(
        self,
        q_scale: float | torch.Tensor | None,
        k_scale: float | torch.Tensor | None,
        v_scale: float | torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """(k_scale, v_scale) of fp8 keys, and q_scale after them unless the host has multiplied it into k_scale."""
        problem = self.problem
        if q_scale is not None and not problem.fp8_q:
            raise ValueError(f"q_scale: got a scale of {problem.dtype} queries, want None (or q_dtype={FP8})")
        if not problem.fp8_kv:
            for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
                if scale is not None:
                    raise ValueError(
                        f"{name}: got a scale of {problem.dtype} keys and values, want None (or kv_dtype={FP8})"
                    )
            return ()
        if not isinstance(q_scale, torch.Tensor) and not isinstance(k_scale, torch.Tensor):
            product = _number("q_scale", q_scale) * _number("k_scale", k_scale)
            q_scale, k_scale = None, _number("q_scale * k_scale", product)
        kv_scales = self._on_device("k_scale", k_scale), self._on_device("v_scale", v_scale)
        return kv_scales if q_scale is None else (*kv_scales, self._on_device("q_scale", q_scale))

    def _on_device(self, name: str, scale: float | torch.Tensor | None) -> torch.Tensor:
        """The scale as a tensor; a number's is made once and kept."""
        if isinstance(scale, torch.Tensor):
            return scale
        value = _number(name, scale)
        kept = self._scales.get(value)
        if kept is not None:
            return kept
        device = self.target.device
        made = torch.full((1,), value, dtype=torch.float32, device=device)
        # One that a graph captures has no value before the first replay. None is ever dropped: a graph may read it.
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if len(self._scales) < MAX_SCALES and not capturing:
            self._scales[value] = made
        return made

    def _check(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        scales: tuple[torch.Tensor, ...],
    ) -> None:
        """Raise unless `run` can take these."""
        problem, device = self.problem, self.target.device
        num_q_tokens, num_kv_tokens, table_width, _ = self._extents
        dense, heads = self._batch.form == "dense", problem.num_qo_heads
        leading: tuple[int | None, ...] = (self._batch.size, None) if dense else (None,)
        check_tensor("q", q, (*leading, heads, problem.head_dim), problem.q_dtype or problem.dtype, device)
        if problem.page_size:
            k, v = self._token_major("k", k), self._token_major("v", v)
            leading = (None, problem.page_size)
        elif dense:
            leading = (self._batch.size, table_width)
        kv_dtype = problem.kv_dtype or problem.dtype
        check_tensor("k", k, (*leading, problem.num_kv_heads, problem.head_dim), kv_dtype, device)
        check_tensor("v", v, (*k.shape[:-1], problem.head_dim_v), kv_dtype, device)
        for name, scale in zip(("k_scale", "v_scale", "q_scale"), scales, strict=False):
            shape = () if scale.dim() == 0 else (1 if scale.numel() == 1 else problem.num_kv_heads,)
            check_tensor(name, scale, shape, torch.float32, device, unit_stride=False)
        if out is not None:
            check_tensor("out", out, (*q.shape[:-1], problem.head_dim_v), problem.dtype, device)
        if lse is not None:
            check_tensor("lse", lse, q.shape[:-1], torch.float32, device, unit_stride=False)
        if (lse is not None or return_lse) and problem.variant is not None and not problem.variant.softmax:
            raise ValueError(
                "lse, return_lse: got one, want neither with a variant of softmax=False, which has no denominator"
            )
        if q.shape[0] < num_q_tokens:
            raise ValueError(f"q: got {q.shape[0]} tokens, want at least the {num_q_tokens} of the planned batch")
        if not problem.page_size and k.shape[0] < num_kv_tokens:
            raise ValueError(f"k: got {k.shape[0]} tokens, want at least the {num_kv_tokens} of the planned batch")

    def _token_major(self, name: str, pages: torch.Tensor) -> torch.Tensor:
        check_is_tensor(**{name: pages})
        if pages.dim() != 4:
            raise ValueError(
                f"{name}: got shape {tuple(pages.shape)}, want four dimensions in the {self.kv_layout} layout"
            )
        return pages.transpose(1, 2) if self._heads_first else pages

    def timed(self) -> tuple[AttentionPlan, TritonExecutor]:
        """The same plan, whose runs also note when they do what, and its executor, which keeps the times; for `evenshare.profile`.

        It shares this plan's arrays and workspace, so it runs on the same stream.
        """
        assert isinstance(self._executor, TritonExecutor)
        twin = copy(self)
        twin._executor = executor = self._executor.timed()
        twin._runs = {}
        return twin, executor


def _number(name: str, scale: Any) -> float:
    value = 1.0 if scale is None else scale
    if not isinstance(value, int | float):
        raise TypeError(f"{name}: got {type(value).__name__}, want a number, a float32 tensor or None")
    if not FP32.tiny <= value <= FP32.max:
        raise ValueError(f"{name}: got {value}, want a finite number above 0 in float32")
    return value


def plan_attention(
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    qo_indptr: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    page_size: int | None = None,
    kv_layout: str = "NHD",
    causal: bool | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    variant: Variant | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    q_dtype: torch.dtype | None = None,
    base: float = math.e,
    max_batch: int | None = None,
    max_q_rows: int | None = None,
    max_kv_len: int | None = None,
    policy: str | None = None,
    planner: str | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
    debug: bool = False,
) -> AttentionPlan:
    """Deal a batch's attention to the device's workers in even shares (FlashInfer, section 3.3; Stream-K, section 4).

    The batch, int32 tensors (int64 is converted) on the host or on the device:
      qo_indptr [B + 1]: request r has the query tokens [qo_indptr[r], qo_indptr[r + 1]); None: one token each.
      Keys in one of three forms: pages by kv_indptr [B + 1], kv_indices, last_page_len [B] (1..page_size); pages by
      block_table [B, max_pages] and kv_lens [B]; ragged by kv_indptr [B + 1] alone.
    page_size: keys of a page, any number from 1; wanted with pages. kv_layout: "NHD" or "HND", the order inside a page.
    causal: bottom-right aligned; None: True, unless the variant has a mask_mod, which then says alone who sees what.
    window_left: keys to the left that a row sees, inclusive; -1: all.
    logits_soft_cap: cap * tanh(score / cap); None: off. sm_scale: None means 1 / sqrt(head_dim). base: of the lse.
    variant: what else happens to scores, in the user's own functions (`evenshare.Variant`).
    dtype: of q and the output. kv_dtype: of k and v: None (dtype) or, if dtype is 16-bit, float8_e4m3fn; see `run` for scales. Or
    int8 or uint8, whose codes the variant's key and value make numbers of.
    q_dtype: of q: None (dtype) or, with such k and v, float8_e4m3fn as well; dtype is then that of the output alone.
    max_batch: capacity in requests, for later updates; None: those of this batch.
    max_q_rows: capacity in query tokens; wanted if qo_indptr is on a GPU, whose values are never read.
    max_kv_len: capacity in keys per request; wanted for batch_invariant if the metadata is on a GPU.
    policy: how work is dealt, a name of `evenshare.schedule`; None: by the tile (`attention.tiles`).
    planner: "host", "device" or None (where the metadata is).
    device: where q, k, v are; None: where the metadata is. backend: None, "cpu" or "triton".
    debug: validate the values of device metadata too, with a sync.

    With device metadata planning launches kernels and never syncs; capture `plan.update()` and `plan.run(...)` in a CUDA
    graph, change lengths and page tables in place, and replay. Impossible device values set bits of `plan.status`.

    Raises ValueError or TypeError naming the argument, what was got and what is wanted.

    >>> plan = plan_attention(qo_indptr=torch.tensor([0, 2, 3]), kv_indptr=torch.tensor([0, 4, 9]),
    ...                       num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    >>> plan.run(torch.randn(3, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)).shape
    torch.Size([3, 4, 8])
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
        if page_size is not None:
            raise ValueError(f"page_size: got {page_size} for ragged keys, want None (or kv_indices and last_page_len)")
    elif page_size is None or page_size < 1:
        raise ValueError(f"page_size: got {page_size}, want 1 or more for paged keys")
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: got {kv_layout!r}, want 'NHD' or 'HND'")
    planner = planner_of(batch, planner)
    target = choose_target(batch, device, backend, policy)
    problem = Problem(
        num_qo_heads,
        num_kv_heads,
        head_dim,
        head_dim if head_dim_v is None else head_dim_v,
        dtype,
        page_size or 0,
        default_causal(variant) if causal is None else causal,
        window_left,
        logits_soft_cap or 0.0,
        default_scale(head_dim) if sm_scale is None else sm_scale,
        kv_dtype,
        q_dtype,
        variant,
    )
    capacity = choose_capacity(batch, problem.page_size, policy, max_batch, max_q_rows, max_kv_len)
    return AttentionPlan(
        problem,
        batch,
        capacity,
        target,
        kv_layout=kv_layout,
        base=base,
        policy=policy,
        planner=planner,
        debug=debug,
        metadata=metadata,
    )

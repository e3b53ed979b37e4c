"""Attention without a plan of one's own: `attention` (dense and ragged) and `paged_attention`."""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from evenshare.attention.executors import Capacity
from evenshare.attention.metadata import dense_batch
from evenshare.attention.plan import AttentionPlan, plan_attention
from evenshare.attention.problem import CODES, FP8, Problem, default_scale
from evenshare.attention.sparse.pages import paged_attention_by_head
from evenshare.device.checks import check_is_tensor
from evenshare.device.target import Target, select_target

if TYPE_CHECKING:
    from evenshare.attention.variants.variant import Variant


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    qo_indptr: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    causal: bool = False,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    variant: Variant | None = None,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    return_lse: bool = False,
    base: float = math.e,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
    debug: bool = False,
) -> Any:
    """Softmax attention over a dense or a ragged batch (FlashInfer, section 3).

    Dense: q [B, Sq, Hq, D], k [B, Skv, Hkv, D], v [B, Skv, Hkv, Dv]. Ragged, with qo_indptr and kv_indptr (int32 [B + 1]):
    q [total_q, Hq, D], k [total_kv, Hkv, D], v [total_kv, Hkv, Dv]. float32, float16 or bfloat16; Hq a multiple of Hkv;
    D and Dv up to 256; any strides, but the last is 1.
    causal: bottom-right aligned: query i of n sees key j of m iff j <= m - n + i. window_left: keys to the left that a row
    sees, inclusive; -1: all. logits_soft_cap: cap * tanh(score / cap). sm_scale: None means 1 / sqrt(D).
    variant: what else happens to scores, in the user's own functions (`evenshare.Variant`).
    Beside a 16-bit q, k and v may be float8_e4m3fn, codes that k_scale and v_scale multiply (`AttentionPlan.run`); and then q
    too, with q_scale. out_dtype: of the output of such a q, float16 or bfloat16; None: that of `out`, or bfloat16.

    Returns out, like q with Dv, or (out, lse) if `return_lse` or `lse` is given; lse is float32, the logarithm to `base`.
    A row without keys has out = 0 and lse = -inf.
    Raises ValueError or TypeError naming the argument, what was got and what is wanted, before anything is written.

    >>> q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    >>> attention(q, k, v, causal=True).shape
    torch.Size([2, 3, 4, 8])
    """
    _check_dims(q, k, v, 4 if qo_indptr is None else 3)
    if (qo_indptr is None) != (kv_indptr is None):
        raise ValueError("qo_indptr, kv_indptr: want both (ragged) or neither (dense)")
    dtypes = _dtypes(q, k, out, out_dtype)
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    if qo_indptr is not None:
        plan = plan_attention(
            num_qo_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[2],
            head_dim_v=v.shape[2],
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            causal=causal,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            variant=variant,
            **dtypes,
            base=base,
            max_q_rows=q.shape[0],
            device=q.device,
            backend=backend,
            debug=debug,
        )
        return plan.run(q, k, v, **scales, out=out, lse=lse, return_lse=return_lse)
    target = select_target(q.device, backend)
    problem = Problem(
        q.shape[2],
        k.shape[2],
        q.shape[3],
        v.shape[3],
        dtypes["dtype"],
        0,
        causal,
        window_left,
        logits_soft_cap or 0.0,
        default_scale(q.shape[3]) if sm_scale is None else sm_scale,
        dtypes["kv_dtype"],
        dtypes["q_dtype"],
        variant,
    )
    stream = torch.cuda.current_stream(target.device).cuda_stream if target.device.type == "cuda" else 0
    make = _dense_plan.__wrapped__ if stream and torch.cuda.is_current_stream_capturing() else _dense_plan
    plan = make(problem, q.shape[0], q.shape[1], target, base, stream, threading.get_ident())
    plan.plan_dense(k.shape[1])
    return plan.run(q, k, v, **scales, out=out, lse=lse, return_lse=return_lse)


# A prefill's workspace is some 20 MB, so few are kept.
@lru_cache(maxsize=16)
def _dense_plan(
    problem: Problem, batch: int, qo_len: int, target: Target, base: float, stream: int, thread: int
) -> AttentionPlan:
    """A dense batch's plan, planned again when the number of keys changes.

    One per stream, whose launches alone may share its workspace, and per thread: nobody plans between another's plan and run.
    """
    return AttentionPlan(
        problem, dense_batch(batch, qo_len, 0, target.device), Capacity(batch, batch * qo_len), target, base=base
    )


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    qo_indptr: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    causal: bool | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    variant: Variant | None = None,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    return_lse: bool = False,
    base: float = math.e,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
    debug: bool = False,
) -> Any:
    """Softmax attention of a ragged batch over a paged KV cache: decode, append and prefill requests in one batch.

    q: [total_q, Hq, D]. k_cache, v_cache: NHD [num_pages, page_size, Hkv, D] or HND [num_pages, Hkv, page_size, D], any page
    size from 1, any strides but the last. The page table is kv_indptr, kv_indices and last_page_len (FlashInfer's form) or
    block_table and kv_lens; see `plan_attention`, also for the options. qo_indptr None: one query token per request. A decode step
    may have a block_table [B, Hkv, pages] and kv_lens [B, Hkv] of each KV head's own, such as those of `sparse.select_pages`.
    Beside a 16-bit q, the cache may be float8_e4m3fn, codes that k_scale and v_scale multiply (`AttentionPlan.run`); and then q
    too, with q_scale. out_dtype: of the output of such a q, float16 or bfloat16; None: that of `out`, or bfloat16.

    Returns out [total_q, Hq, Dv], or (out, lse [total_q, Hq]) if `return_lse` or `lse` is given.
    A row without keys has out = 0 and lse = -inf.
    Raises ValueError or TypeError naming the argument, what was got and what is wanted, before anything is written.

    >>> q, cache = torch.randn(2, 4, 8), torch.randn(6, 16, 2, 8)
    >>> table, lens = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32), torch.tensor([20, 7], dtype=torch.int32)
    >>> paged_attention(q, cache, cache, block_table=table, kv_lens=lens).shape
    torch.Size([2, 4, 8])
    """
    _check_dims(q, k_cache, v_cache, 3, 4)
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: got {kv_layout!r}, want 'NHD' or 'HND'")
    page_dim, head_dim = (1, 2) if kv_layout == "NHD" else (2, 1)
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    if isinstance(block_table, torch.Tensor) and block_table.dim() == 3:
        others: dict[str, Any] = {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "last_page_len": last_page_len,
        }
        others |= {"variant": variant, "window_left": None if window_left == -1 else window_left}
        others |= {name: s for name, s in scales.items() if isinstance(s, torch.Tensor) and s.numel() > 1}
        for name, given in others.items():
            if given is not None:
                raise ValueError(f"{name}: got one beside a block_table of each KV head, want it left out")
        return paged_attention_by_head(
            q,
            k_cache,
            v_cache,
            block_table,
            kv_lens,
            kv_layout,
            out,
            lse,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            **scales,
            return_lse=return_lse,
            base=base,
            out_dtype=out_dtype,
            backend=backend,
            debug=debug,
        )
    if block_table is None and kv_indices is None:
        raise ValueError(
            "kv_indices: got None, want a page table (kv_indptr, kv_indices and last_page_len, or block_table and kv_lens)"
        )
    plan = plan_attention(
        num_qo_heads=q.shape[1],
        num_kv_heads=k_cache.shape[head_dim],
        head_dim=q.shape[2],
        head_dim_v=v_cache.shape[3],
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        last_page_len=last_page_len,
        block_table=block_table,
        kv_lens=kv_lens,
        page_size=k_cache.shape[page_dim],
        kv_layout=kv_layout,
        causal=causal,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        variant=variant,
        **_dtypes(q, k_cache, out, out_dtype),
        base=base,
        max_q_rows=q.shape[0],
        device=q.device,
        backend=backend,
        debug=debug,
    )
    return plan.run(q, k_cache, v_cache, **scales, out=out, lse=lse, return_lse=return_lse)


def _dtypes(q: torch.Tensor, k: torch.Tensor, out: Any, out_dtype: torch.dtype | None) -> dict[str, Any]:
    """dtype, q_dtype and kv_dtype of the problem."""
    if q.dtype != FP8:
        if out_dtype not in (None, q.dtype):
            raise TypeError(f"out_dtype: got {out_dtype}, want None or q's {q.dtype}")
        # Keys of any other dtype are compared with q's by the run.
        return {"dtype": q.dtype, "q_dtype": None, "kv_dtype": k.dtype if k.dtype in (FP8, *CODES) else None}
    name, dtype = "out_dtype", out_dtype or torch.bfloat16
    if out_dtype is None and isinstance(out, torch.Tensor):
        name, dtype = "out", out.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"{name}: got {dtype}, want torch.float16 or torch.bfloat16 beside q of {FP8}")
    return {"dtype": dtype, "q_dtype": FP8, "kv_dtype": k.dtype}


def _check_dims(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_dims: int, kv_dims: int | None = None) -> None:
    for name, tensor, dims in (("q", q, q_dims), ("k", k, kv_dims or q_dims), ("v", v, kv_dims or q_dims)):
        check_is_tensor(**{name: tensor})
        if tensor.dim() != dims:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want {dims} dimensions")

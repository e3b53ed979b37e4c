"""Batches of latent attention amid NaN, and their oracle: that of attention over keys [ckv | kpe] and values ckv."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from evenshare.attention import MLAPlan, plan_mla
from tests.attention.helpers import Batch, Pages, Place, assert_matches, int32, move, random_batch, to_pages

ROTARY = 64
PADDING = 2  # rows behind the batch's last one


@dataclass(frozen=True)
class Case:
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int = 16
    dim: int = 512
    page_size: int = 16
    causal: bool = True
    form: str = "indptr"  # or "block_table"
    planner: str = "host"
    base: float = math.e
    with_lse: bool = True
    policy: str | None = None

    @property
    def sm_scale(self) -> float:
        return 192**-0.5


def make_batch(case: Case, place: Place) -> Batch:
    """Keys are the latents with rotary numbers behind, values the latents."""
    batch = random_batch(case.qo_lens, case.kv_lens, (case.heads, 1), case.dim + ROTARY)
    return move(replace(batch, v=batch.k[..., : case.dim]), place)


def plan_case(case: Case, place: Place, batch: Batch, pages: Pages, dtype: torch.dtype, **options: Any) -> MLAPlan:
    where = place.device if case.planner == "device" else "cpu"
    return plan_mla(
        num_heads=case.heads, page_size=case.page_size, sm_scale=case.sm_scale, head_dim_ckv=case.dim, head_dim_kpe=ROTARY,
        qo_indptr=int32(batch.qo_indptr, where), **pages.table(case.form, where), causal=case.causal, dtype=dtype, base=case.base,
        max_q_rows=sum(case.qo_lens), max_kv_len=max(case.kv_lens, default=0), policy=case.policy, planner=case.planner,
        device=place.device, backend=place.backend, **options,
    )  # fmt: skip


def split(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(latent, rotary) views."""
    return x[..., :dim], x[..., dim:]


def check(case: Case, place: Place, dtype: torch.dtype) -> MLAPlan:
    """Run it twice amid NaN, compare with the oracle and bit for bit, and see that nothing else was written."""
    batch = make_batch(case, place)
    typed = move(batch, place, dtype)
    pages = to_pages(typed, case.page_size)
    q = torch.cat([typed.q, typed.q.new_full((PADDING, *typed.q.shape[1:]), math.nan)])
    tensors = *split(q, case.dim), *split(pages.k.squeeze(2), case.dim)
    plan = plan_case(case, place, batch, pages, dtype)
    runs = []
    for _ in range(2):
        if place.backend == "triton":
            plan._executor.workspace.partials.fill_(math.nan)  # type: ignore[union-attr]
        out = torch.full_like(q[..., : case.dim], math.nan)
        lse = q.new_full(q.shape[:2], math.nan, dtype=torch.float32) if case.with_lse else None
        plan.run(*tensors, out=out, lse=lse)
        runs.append((out, lse))
        if place.backend == "triton":
            assert not plan._executor.workspace.counters.any(), "counters are left as they were found"  # type: ignore[union-attr]
    plan.check()
    (out, lse), again = runs
    rows = sum(case.qo_lens)
    assert_matches(
        out[:rows], None if lse is None else lse[:rows], batch, base=case.base, causal=case.causal, sm_scale=case.sm_scale
    )  # fmt: skip
    if place.backend == "triton":
        assert out[rows:].isnan().all(), "written outside"
    assert same_bits(out, again[0])
    if lse is not None:
        assert same_bits(lse, again[1])
    return plan


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def lengths(*pairs: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """(query rows, keys) of each request -> qo_lens and kv_lens."""
    qo_lens, kv_lens = zip(*pairs, strict=True)
    return {"qo_lens": qo_lens, "kv_lens": kv_lens}

"""An attention call with everything that may vary: run by the kernels amid NaN, compared with the oracle, repeated bit for bit."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from evenshare.attention import AttentionPlan, attention, plan_attention
from evenshare.schedule.policies import DEVICE_POLICIES, POLICIES
from tests.attention.helpers import Batch, Place, assert_matches, int32, move, random_batch, to_pages

# Elements before and after each row of a tensor that is a view of a wider one. "strided": heads are apart as well; "odd": most rows
# begin at no multiple of 16 bytes; "shifted": all begin 2 or 4 bytes after one.
MARGINS = {"packed": (0, 0), "strided": (8, 8), "odd": (1, 2), "shifted": (1, 7)}
PADDING = 3  # rows behind the batch's last one


@dataclass(frozen=True)
class Case:
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: tuple[int, int] = (8, 2)
    dim: int = 64
    dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    form: str = "ragged"  # or "indptr" or "block_table", of pages, or "dense"
    page_size: int = 16
    kv_layout: str = "NHD"
    causal: bool = True
    window_left: int = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    base: float | None = math.e  # of the lse; None: without lse
    layout: str = "packed"  # or another of MARGINS
    policy: str | None = None
    planner: str = "host"

    @property
    def mask(self) -> dict[str, Any]:
        """Options of the oracle."""
        options: dict[str, Any] = {name: getattr(self, name) for name in ("causal", "window_left", "logits_soft_cap")}
        return options if self.sm_scale is None else options | {"sm_scale": self.sm_scale}


# Prefill, append, decode, no query, no key, more queries than keys; ends inside tiles of 128 rows and blocks of 64 and 128 keys.
PREFILL = Case((1, 300, 0, 130, 70, 200), (500, 300, 40, 700, 0, 129))
DECODE = Case((1, 2, 0, 1, 1, 8), (700, 300, 40, 0, 1500, 3))


def embed(x: torch.Tensor, layout: str, padding: int = 0) -> torch.Tensor:
    """x and `padding` rows of NaN behind it, as a view of a larger tensor that is NaN all around."""
    before, after = MARGINS[layout]
    apart = 2 if layout == "strided" else 1
    *outer, heads, dim = x.shape
    shape = (outer[0] + padding + 2, *outer[1:], apart * heads, before + dim + after)
    view = x.new_full(shape, math.nan)[1:-1, ..., ::apart, before : before + dim]
    view[: outer[0]] = x
    return view


class Outputs:
    """`out` and `lse`, `padding` rows longer than the batch, in larger tensors that are NaN and stay so around the batch."""

    def __init__(self, case: Case, batch: Batch, padding: int = PADDING) -> None:
        num_rows, heads = batch.q.shape[:2]
        before, after = MARGINS[case.layout]
        shape = (num_rows + padding + 2, heads, before + batch.v.shape[2] + after)
        self.wide = batch.q.new_full(shape, math.nan, dtype=case.dtype)
        self.wide_lse = batch.q.new_full((heads, num_rows + padding + 2), math.nan, dtype=torch.float32)
        self.out = self.wide[1:-1, :, before : before + batch.v.shape[2]]
        self.lse = self.wide_lse[:, 1:-1].t()
        self.num_rows, self.padding, self.with_lse = num_rows, padding, case.base is not None

    def arguments(self, num_requests: int | None = None) -> dict[str, torch.Tensor]:
        """Of a dense call for `num_requests`, or of a ragged one."""
        tensors = {"out": self.out} | ({"lse": self.lse} if self.with_lse else {})
        if num_requests is None:
            return tensors
        return {name: t.unflatten(0, (num_requests, -1)) for name, t in tensors.items()}

    def check(self, batch: Batch, base: float | None, **mask: Any) -> None:
        """The batch's rows are right, and nothing else was written."""
        out, lse = self.out[: self.num_rows], self.lse[: self.num_rows] if self.with_lse else None
        assert_matches(out, lse, batch, base=base, **mask)
        for written, tensor in ((out, self.wide), (lse, self.wide_lse)):
            assert int((~torch.isnan(tensor)).sum()) == (0 if written is None else written.numel()), "written outside"


def make_plan(case: Case, place: Place, metadata: dict[str, torch.Tensor], **options: Any) -> AttentionPlan:
    return plan_attention(
        num_qo_heads=case.heads[0], num_kv_heads=case.heads[1], head_dim=case.dim, head_dim_v=case.dim_v, dtype=case.dtype,
        page_size=None if case.form == "ragged" else case.page_size, kv_layout=case.kv_layout, base=case.base or math.e,
        sm_scale=case.sm_scale, causal=case.causal, window_left=case.window_left, logits_soft_cap=case.logits_soft_cap,
        policy=case.policy, planner=case.planner, device=place.device, backend=place.backend, **metadata, **options,
    )  # fmt: skip


def metadata_device(case: Case, place: Place) -> torch.device | str:
    return place.device if case.planner == "device" else "cpu"


def poison(plan: AttentionPlan) -> None:
    """Partials of the launch before must not be taken for this one's."""
    plan._executor.workspace.partials.fill_(math.nan)


def make_batch(case: Case, place: Place) -> Batch:
    return move(random_batch(case.qo_lens, case.kv_lens, case.heads, case.dim, case.dim_v), place)


def check(case: Case, place: Place, oracle_on: str | None = None) -> AttentionPlan | None:
    """Run it twice and compare with the oracle, computed there. Returns the plan, which a dense call does not have."""
    batch = make_batch(case, place)
    judged = batch if oracle_on is None else move(batch, replace(place, device=torch.device(oracle_on)))
    if case.form == "dense":
        _check_runs(case, judged, _run_dense(case, place, batch))
        return None
    typed = move(batch, place, case.dtype)
    where = metadata_device(case, place)
    metadata = {"qo_indptr": int32(batch.qo_indptr, where)}
    if case.form == "ragged":
        metadata["kv_indptr"] = int32(batch.kv_indptr, where)
        k, v = (embed(x, case.layout, padding=5) for x in (typed.k, typed.v))
    else:
        pages = to_pages(typed, case.page_size, case.kv_layout)
        metadata |= pages.table(case.form, where)
        k, v = embed(pages.k, case.layout), embed(pages.v, case.layout)
    q = embed(typed.q, case.layout, PADDING)
    plan = make_plan(case, place, metadata, max_q_rows=sum(case.qo_lens), max_kv_len=max(case.kv_lens, default=0))
    runs = [Outputs(case, batch) for _ in range(2)]
    for outputs in runs:
        poison(plan)
        plan.run(q, k, v, **outputs.arguments())
        assert not plan._executor.workspace.counters.any(), "counters are left as they were found"
    _check_runs(case, judged, runs)
    plan.check()
    return plan


def _run_dense(case: Case, place: Place, batch: Batch) -> list[Outputs]:
    size = len(case.qo_lens)
    typed = move(batch, place, case.dtype)
    # NaN between the requests as well as around them.
    q, k, v = (
        embed(F.pad(x.unflatten(0, (size, -1)), (0, 0, 0, 0, 2, 3), value=math.nan), case.layout)[:, 2:-3]
        for x in (typed.q, typed.k, typed.v)
    )
    options = case.mask | ({} if case.base is None else {"base": case.base})
    runs = [Outputs(case, batch, padding=0) for _ in range(2)]
    for outputs in runs:
        attention(q, k, v, backend=place.backend, **options, **outputs.arguments(size))
    return runs


def _check_runs(case: Case, batch: Batch, runs: list[Outputs]) -> None:
    runs[0].check(batch, case.base, **case.mask)
    for name in ("wide", "wide_lse"):
        first, second = (getattr(outputs, name) for outputs in runs)
        assert torch.equal(first.isnan(), second.isnan())
        assert torch.equal(first.nan_to_num(), second.nan_to_num()), "not the same bits"


def random_case(seed: int, place: Place) -> Case:
    """Decode, append, prefill or all in one batch, and everything else drawn as well; short where the interpreter runs it."""
    rng = random.Random(seed)
    small = place.device.type == "cpu"
    longest_q, longest_kv = (20, 50) if small else (400, 900)
    heads = rng.choice([(2, 2), (8, 2), (8, 2), (7, 1), (8, 1), (12, 1), (28, 4), (6, 2), (71, 1)])
    longest_q = min(longest_q, max(longest_q * 16 // heads[0], 8))
    dim, dim_v = rng.choice([(64, None)] * 3 + [(128, None)] * 3 + [(72, None), (80, None), (96, None), (20, None)]
                            + [(256, None), (192, None), (192, 128), (64, 128)])  # fmt: skip
    form = rng.choice(["ragged", "indptr", "block_table", "dense"])
    shape = rng.choice(["decode", "append", "prefill", "mixed"])
    planner = rng.choice(["host", "device"])

    def lengths(kind: str) -> tuple[int, int]:
        if kind == "mixed":
            kind = rng.choice(["decode", "append", "prefill", "empty"])
        if kind == "decode":
            return rng.randint(1, 8), rng.randint(0, 3 * longest_kv)
        if kind == "append":
            return rng.randint(0, longest_q), rng.randint(0, longest_kv)
        length = rng.randint(1, longest_q)
        return (length, length) if kind == "prefill" else rng.choice([(0, 0), (0, length), (1, 0)])

    size = rng.randint(1, 9)
    lens = [lengths(shape)] * size if form == "dense" else [lengths(shape) for _ in range(size)]
    qo_lens, kv_lens = (tuple(x) for x in zip(*lens, strict=True))
    policies = [None, None, *(DEVICE_POLICIES if planner == "device" else POLICIES)]
    return Case(
        qo_lens,
        kv_lens,
        heads,
        dim,
        dim_v,
        dtype=rng.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float16, torch.float32][2 * small :]),
        form=form,
        page_size=rng.choice([1, 3, 16, 16, 24, 64, 256]),
        kv_layout=rng.choice(["NHD", "HND"]) if form in ("indptr", "block_table") else "NHD",
        causal=rng.random() < 0.7,
        window_left=rng.choice([-1, -1, -1, 0, rng.randint(1, longest_kv), 2**30]),
        logits_soft_cap=rng.choice([None, None, None, 20.0]),
        sm_scale=rng.choice([None, None, 0.05, -0.1]),
        base=rng.choice([math.e, 2.0, None]),
        layout=rng.choice(["packed", "packed", "strided", "odd", "shifted"]),
        policy=None if form == "dense" else rng.choice(policies),
        planner=planner,
    )

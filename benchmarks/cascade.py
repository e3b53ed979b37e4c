"""Decode of requests that share a prefix, in bf16, pages of 16, 32/8 heads: a cascade against paged attention, which reads the
prefix for each request. TB/s count each key once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import harness
from benchmarks.masks import MAX_ERROR
from evenshare import CascadeLevel, detect_shared_prefixes, plan_attention, plan_cascade

PAGE_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128
NUM_SAMPLED = 5  # requests that are compared


@dataclass(frozen=True)
class Case:
    """A batch in equal groups: a request has `shared` keys in common with all, `grouped` with its group, and its own."""

    batch: int
    shared: int
    grouped: int
    own: int
    groups: int = 1

    @property
    def title(self) -> str:
        middle = f" + {self.grouped} in each of {self.groups} groups" if self.grouped else ""
        return f"B={self.batch}, {self.shared} shared{middle} + {self.own}"


CASES = [
    Case(16, 8192, 0, 512),
    Case(64, 8192, 0, 512),
    Case(256, 2048, 0, 256),
    Case(64, 32768, 0, 1024),
    Case(128, 4096, 4096, 512, groups=8),
]


@dataclass(frozen=True)
class Requests:
    """q [B, Hq, D], caches [num_pages, page_size, Hkv, D], and whole page lists, without a page that is not full but the last."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    kv_lens: torch.Tensor
    levels: list[CascadeLevel]

    def sampled(self) -> torch.Tensor:
        return torch.linspace(0, self.q.shape[0] - 1, NUM_SAMPLED, device=self.q.device).long()

    def reference(self) -> torch.Tensor:
        """float64 [sampled, Hq, D]."""
        rows = []
        for r in self.sampled().tolist():
            length = int(self.kv_lens[r])
            pages = self.block_table[r, : -(-length // PAGE_SIZE)].long()
            k, v = (x[pages].flatten(0, 1)[:length].double() for x in (self.k, self.v))
            q = self.q[r].double().unflatten(0, (k.shape[1], -1))
            scores = torch.einsum("hgd,lhd->hgl", q, k) * q.shape[2] ** -0.5
            rows.append(torch.einsum("hgl,lhd->hgd", scores.softmax(-1), v).flatten(0, 1))
        return torch.stack(rows)


def make_requests(
    case: Case, device: torch.device, heads: tuple[int, int] = (HEADS, KV_HEADS), dim: int = HEAD_DIM
) -> Requests:
    """Pages in random order."""
    counts = case.shared // PAGE_SIZE, case.grouped // PAGE_SIZE, -(-case.own // PAGE_SIZE)
    num_pages = counts[0] + counts[1] * case.groups + counts[2] * case.batch
    pages = torch.randperm(num_pages, dtype=torch.int32, device=device)
    shared, grouped, own = pages.split([counts[0], counts[1] * case.groups, counts[2] * case.batch])
    grouped, own = grouped.view(case.groups, -1), own.view(case.batch, -1)
    per_group = case.batch // case.groups
    whole = torch.cat([shared.expand(case.batch, -1), grouped.repeat_interleave(per_group, 0), own], 1)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    levels = [CascadeLevel(ints(0, case.batch), shared[None], ints(case.shared))]
    if case.grouped:
        rows = torch.arange(case.groups + 1, dtype=torch.int32, device=device) * per_group
        levels.append(CascadeLevel(rows, grouped, ints(*[case.grouped] * case.groups)))
    levels.append(CascadeLevel(None, own, ints(*[case.own] * case.batch)))
    q = torch.randn(case.batch, heads[0], dim, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(num_pages, PAGE_SIZE, heads[1], dim, dtype=torch.bfloat16, device=device) for _ in range(2))
    lens = ints(*[case.shared + case.grouped + case.own] * case.batch)
    return Requests(q, k, v, whole, lens, levels)


def measure(bench: harness.Bench, case: Case, heads: tuple[int, int] = (HEADS, KV_HEADS), dim: int = HEAD_DIM) -> None:
    """The levels given; those that are found, with tall tiles for one group and with a launch for both; and no cascade."""
    requests = make_requests(case, bench.device, heads, dim)
    options: dict[str, Any] = {
        "num_qo_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": dim,
        "page_size": PAGE_SIZE,
    }
    metadata = requests.block_table, requests.kv_lens

    def found(max_groups: int | None) -> list[CascadeLevel]:
        return detect_shared_prefixes(*metadata, PAGE_SIZE, max_groups=max_groups)

    plans: dict[str, Any] = {
        "ours": plan_cascade(requests.levels, **options, max_q_rows=case.batch),
        "found": plan_cascade(found(case.groups), **options, max_q_rows=case.batch),
        "found, one launch": plan_cascade(found(None), **options, max_q_rows=case.batch),
        "paged": plan_attention(block_table=metadata[0], kv_lens=metadata[1], **options),
    }

    def call(plan: Any) -> harness.Call:
        out = torch.full_like(requests.q, float("nan"))
        return lambda: plan.run(requests.q, requests.k, requests.v, out=out)

    calls = {name: call(plan) for name, plan in plans.items()}
    row = bench.compare(
        case.title,
        calls.pop("ours"),
        lambda name: None,
        requests.reference(),
        MAX_ERROR,
        variants=calls,
        sample=lambda output: output[requests.sampled()],
        bytes=requests.k.numel() * 2 * requests.k.element_size(),
    )
    for plan in plans.values():
        plan.check()
    bench.add_rate(row, "TB/s")
    for name in plans:
        if name != "paged":
            bench.add_speed(row, name, "paged")
    bench.add_time(f"{case.title}: finding and planning", lambda: plans["found"].update(found(case.groups)))


def fill(bench: harness.Bench) -> None:
    bench.measure_all(CASES, measure)


if __name__ == "__main__":
    harness.run("cascade", __doc__, fill, ())

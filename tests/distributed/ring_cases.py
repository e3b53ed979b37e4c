"""Prefill whose tokens are dealt to ranks, against the float64 oracle over all tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from evenshare import append_paged_kv_cache
from evenshare.distributed import plan_context_attention, plan_ring_attention
from tests.attention.helpers import int32, random_batch
from tests.distributed.context_cases import PLACEMENTS, assert_close
from tests.distributed.spawn import Case, Place

LENGTHS = [64, 3, 0, 37, 131, 1]


def check(
    place: Place,
    lengths: list[int] = LENGTHS,
    heads: tuple[int, int] = (4, 2),
    dim_v: int = 32,
    min_chunk: int = 8,
    dtypes: tuple[torch.dtype, ...] = (),
    backend: str | None = None,
    **mask: Any,
) -> None:
    """A batch of prompts in every dtype; a rank's rows of the result, and the whole result gathered."""
    for dtype in dtypes or place.dtypes:
        torch.manual_seed(0)  # the same batch on every rank
        batch = random_batch(lengths, lengths, heads, 32, dim_v)
        options = {"logits_soft_cap": mask.get("logits_soft_cap")}
        plan = plan_ring_attention(
            qo_indptr=int32(batch.qo_indptr),
            num_qo_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=32,
            head_dim_v=dim_v,
            dtype=dtype,
            min_chunk=min_chunk,
            device=place.device,
            backend=backend,
            **mask,
        )
        assert plan.num_tokens == len(plan.tokens)
        starts = torch.tensor(batch.qo_indptr[:-1]).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        assert torch.equal((plan.tokens.cpu() - starts[plan.tokens.cpu()]), plan.positions.cpu())
        q, k, v = (plan.shard(x.to(place.device, dtype)) for x in (batch.q, batch.k, batch.v))
        out, lse = plan.run(q, k, v, return_lse=True)
        again, lse_again = plan.run(q, k, v, return_lse=True)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)
        everything = plan.gather(out), plan.gather(lse)
        assert_close(*everything, batch, dtype, slice(None), slice(None), **mask | options)


def check_prefill_then_decode(place: Place, placement: str) -> None:
    """Keys move from the ring's layout to their pages; then requests get tokens, one and then three, which every rank computes."""
    torch.manual_seed(0)
    prompts, page_size, heads = [50, 3, 21], 4, (4, 2)
    new_tokens = [1, 3]
    batch = random_batch(prompts, [n + sum(new_tokens) for n in prompts], heads, 32)
    kv_indptr = torch.tensor(batch.kv_indptr)
    dealt = PLACEMENTS[placement](torch.tensor(prompts), place.size)
    sizes = {
        "num_qo_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": 32,
        "dtype": torch.float32,
        "device": place.device,
    }
    ring = plan_ring_attention(qo_indptr=int32(batch.qo_indptr), min_chunk=4, **sizes)
    rows = ring.positions.cpu() + kv_indptr[ring.layout.requests(place.rank)]
    k, v = (x.to(place.device) for x in (batch.k, batch.v))
    table = torch.arange(len(prompts) * 16, dtype=torch.int32, device=place.device).view(len(prompts), 16)
    caches = torch.full((2, table.numel(), page_size, heads[1], 32), float("nan"), device=place.device)
    move = ring.move_to(dealt)
    moved = move.run(k[rows.to(place.device)], v[rows.to(place.device)])
    append_paged_kv_cache(*moved, move.batch_indices, move.positions, *caches, block_table=table)
    lens = torch.tensor(prompts, dtype=torch.int32)
    for count in new_tokens:
        request = torch.arange(len(prompts)).repeat_interleave(count)
        position = lens[request] + torch.arange(count).repeat(len(prompts))
        lens += count
        qo_lens = [count] * len(prompts)
        step = random_batch(qo_lens, lens.tolist(), heads, 32)
        seen = torch.cat([torch.arange(n) + begin for n, begin in zip(lens.tolist(), batch.kv_indptr, strict=False)])
        step = replace(step, k=batch.k[seen], v=batch.v[seen])
        plan = plan_context_attention(
            placement=dealt, block_table=table.cpu(), kv_lens=lens, qo_indptr=int32(step.qo_indptr), **sizes
        )
        own = plan.own_positions(position, request)
        new = (position + kv_indptr[request]).to(place.device)
        places = request.to(place.device), own.to(place.device)
        append_paged_kv_cache(k[new], v[new], *places, *caches, block_table=table)
        out, lse = plan.run(step.q.to(place.device), *caches, return_lse=True)
        assert_close(out, lse, step, torch.float32, slice(None), slice(None))


CASES: dict[str, Case] = {
    **{f"ring, then decode, {name}": partial(check_prefill_then_decode, placement=name) for name in PLACEMENTS},
    "ring": check,
    "ring, every request cut": partial(check, min_chunk=1),
    "ring, no request cut": partial(check, min_chunk=1000),
    "ring, one request": partial(check, lengths=[50], min_chunk=1),
    "ring, ranks without tokens": partial(check, lengths=[5]),
    "ring, heads in groups of 3, values of another size": partial(check, heads=(6, 2), dim_v=16),
    "ring, no tokens": partial(check, lengths=[0, 0]),
    "ring, no requests": partial(check, lengths=[]),
    **{
        f"ring, portable kernels, {name}": partial(
            check, lengths=[24, 3], dtypes=(torch.float32,), backend="triton", min_chunk=3, **mask
        )
        for name, mask in {"causal": {}, "window": {"window_left": 5}}.items()
    },
    "ring, no mask": partial(check, causal=False),
    "ring, soft cap": partial(check, logits_soft_cap=5.0),
    **{f"ring, window of {window}": partial(check, window_left=window, min_chunk=4) for window in (0, 5, 16, 63, 200)},
}

"""Prefill whose tokens are dealt to ranks, against the float64 oracle over all tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from evenshare.distributed import plan_ring_attention
from tests.attention.helpers import int32, random_batch
from tests.distributed.context_cases import assert_close
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


CASES: dict[str, Case] = {
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

"""Arguments that cannot be are named before anything is computed or sent; a group of one rank is enough to say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evenshare import distributed
from evenshare.distributed import RoundRobin
from evenshare.quant import QuantLinear
from tests.quant.helpers import random_weight

LENS = torch.tensor([9, 3], dtype=torch.int32)
TABLE = torch.arange(6, dtype=torch.int32).view(2, 3)
SIZES: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def context(**changed: Any) -> Any:
    arguments = {"placement": RoundRobin(4, 1), "block_table": TABLE, "kv_lens": LENS} | SIZES | changed
    return distributed.plan_context_attention(**arguments)


def ring(**changed: Any) -> Any:
    return distributed.plan_ring_attention(**{"qo_indptr": torch.tensor([0, 9, 12])} | SIZES | changed)


def run_append(k_strides: tuple[int, ...]) -> Any:
    """Two new tokens of the first request over a cache of these strides."""
    plan = context(qo_indptr=torch.tensor([0, 2, 3]))
    cache = torch.zeros(1000).as_strided((6, 4, 2, 16), k_strides)
    return plan.run(torch.zeros(3, 4, 16), cache, torch.zeros(6, 4, 2, 16))


def row_parallel(x: torch.Tensor, residual: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    return distributed.RowParallelLinear(nn.Linear(4, 6), **options)(x, residual)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: context(placement=RoundRobin(4, 2)), "placement: got one for 2 ranks, want the group's 1"),
        (lambda: context(output="rows"), "output: got 'rows', want one of all, heads, tokens"),
        (lambda: context(window_left=-2), "window_left: got -2"),
        (lambda: context(kv_lens=LENS[:1]), r"block_table, kv_lens: got shapes \(2, 3\) and \(1,\)"),
        (lambda: context(num_kv_heads=3), "num_qo_heads, num_kv_heads: got 4 and 3"),
        (lambda: context(kv_layout="DHN"), "kv_layout: got 'DHN'"),
        (lambda: context(kv_lens=LENS * 5), r"kv_lens\[0\]: got 45, want 0 to 12"),
        (
            lambda: run_append((129, 32, 16, 1)),
            "k_cache: got strides .*, want pages whose stride is a multiple of a key's",
        ),
        (lambda: run_append((160, 32, 16, 1)), "v_cache: got pages 4 keys apart, want 5"),
        (lambda: ring(qo_indptr=torch.tensor([0, 3, 2])), r"qo_indptr: got \[0, 3, 2\], want 0 and then"),
        (lambda: ring(qo_indptr=torch.tensor([1, 3])), r"qo_indptr: got \[1, 3\], want 0 and then"),
        (lambda: ring(qo_indptr=torch.zeros(2, 2)), r"qo_indptr: got shape \(2, 2\)"),
        (lambda: ring(window_left=3, causal=False), "window_left: got 3 with causal=False"),
        (lambda: ring(min_chunk=0), "min_chunk: got 0"),
        (lambda: ring().run(*torch.zeros(3, 11, 4, 16)), r"q: got shape \(11, 4, 16\), want \[12, heads, dim\]"),
        (lambda: ring().move_to(RoundRobin(4, 3)), "placement: got one for 3 ranks, want the group's 1"),
        (lambda: distributed.ColumnParallelLinear(nn.Linear(4, 6), parts=4), "parts: got 4 for a weight of 6 rows"),
        (lambda: distributed.ColumnParallelLinear(nn.Linear(4, 6), unit=4), "unit: got 4 for a size of 6"),
        (
            lambda: distributed.ColumnParallelLinear(nn.Linear(4, 6), parts=2, gather_output=True),
            "gather_output: got True",
        ),
        (
            lambda: distributed.RowParallelLinear(nn.Linear(4, 6), reduce="sum"),
            "reduce: got 'sum', want one of all, tokens",
        ),
        (lambda: distributed.RowParallelLinear(nn.Linear(4, 6), num_chunks=0), "num_chunks: got 0"),
        (lambda: row_parallel(torch.zeros(3, 4), torch.zeros(2, 6)), r"residual: got shape \(2, 6\), want \(3, 6\)"),
        (
            lambda: row_parallel(torch.zeros(1, 3, 4), reduce="tokens"),
            r"x: got shape \(1, 3, 4\), want \[m, k\] with m a multiple",
        ),
        (lambda: distributed.parallelize(nn.Sequential(nn.Linear(4, 6)), {"0": "row"}), r"plan\['0'\]: got 'row'"),
        (
            lambda: distributed.parallelize(nn.Sequential(nn.Linear(4, 6)), {"1": "rowwise"}),
            "plan: got 1, want patterns",
        ),
    ],
)
def test_values(alone: None, call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: context(base=2.0),
            "base: got an option that attention over ranks does not have, want one of head_dim_v",
        ),
        (lambda: context(variant=None), "variant: got an option"),
        (lambda: ring(kv_dtype=torch.float8_e4m3fn), "kv_dtype: got an option"),
        (lambda: context(kv_lens=[9, 3]), "kv_lens: got list, want a tensor"),
        (lambda: context().run([1], TABLE, TABLE), "q: got list, want a tensor"),
        (lambda: ring(qo_indptr=[0, 3]), "qo_indptr: got list, want a tensor"),
        (lambda: ring().run(torch.zeros(12, 4, 16), None, None), "k: got NoneType, want a tensor"),
        (
            lambda: distributed.RowParallelLinear(nn.Conv1d(4, 4, 1)),
            "linear: got Conv1d, want an nn.Linear or a QuantLinear",
        ),
        (lambda: distributed.ColumnParallelLinear(random_weight(4, 32, 16)), "linear: got QuantizedWeight"),
    ],
)
def test_types(alone: None, call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_without_ranks() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised, want torchrun"):
        context()


def test_a_group_of_one(alone: None) -> None:
    """Nothing is sent, and the state dict of a layer is that of its share."""
    q, cache = torch.randn(2, 4, 16), torch.randn(6, 4, 2, 16)
    out = context().run(q, cache, cache)
    assert out.is_contiguous()
    assert torch.isfinite(out).all()
    context().check()
    layer = QuantLinear(random_weight(6, 32, 16, "zeros"), torch.randn(6))
    part = distributed.RowParallelLinear(layer)
    x = torch.randn(3, 32)
    assert torch.equal(part(x), layer(x))
    assert {name.removeprefix("local.") for name in part.state_dict()} == set(layer.state_dict())

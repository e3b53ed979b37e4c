"""Latent attention against the float64 oracle: lengths, pages, heads, masks, planners, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from evenshare.attention import mla_attention, plan_mla
from evenshare.attention.mla.problem import MLAProblem
from evenshare.attention.mla.tiles import choose_mla_tile
from evenshare.schedule.policies import DEVICE_POLICIES
from tests.attention.helpers import Place, assert_matches, int32, move, to_pages
from tests.attention.mla.helpers import Case, check, lengths, make_batch, plan_case, same_bits, split

# Decode, append, no query, no key, more queries than keys; ends inside tiles of 16 rows and blocks of 16 keys.
DECODE = Case(**lengths((1, 33), (1, 0), (1, 1), (1, 70)))
APPEND = Case(**lengths((3, 50), (0, 20), (1, 17), (5, 3), (2, 0), (4, 4)), heads=5, dim=64)
# For a GPU: blocks of 32 and 64 keys, and enough of them for every worker.
LONG = Case(**lengths((1, 3000), (1, 0), (2, 129), (1, 777), (1, 8000), (7, 300), (3, 2)))


def dtypes(place: Place) -> tuple[torch.dtype, ...]:
    """bf16 on a GPU; elsewhere the interpreter's, which knows no bf16."""
    return (torch.bfloat16, torch.float32) if place.device.type == "cuda" else place.dtypes[:2]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [16, 128])
def test_decode(place: Place, heads: int, page_size: int) -> None:
    for dtype in dtypes(place):
        check(replace(DECODE, heads=heads, page_size=page_size), place, dtype)


@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
@pytest.mark.parametrize("causal", [True, False])
def test_append(place: Place, causal: bool, page_size: int) -> None:
    for dtype in dtypes(place):
        check(replace(APPEND, causal=causal, page_size=page_size, base=2.0), place, dtype)


@pytest.mark.parametrize("form", ["indptr", "block_table"])
@pytest.mark.parametrize("policy", DEVICE_POLICIES)
def test_device_planner_and_policies(kernel_place: Place, policy: str, form: str) -> None:
    check(replace(APPEND, planner="device", policy=policy, form=form), kernel_place, torch.float16)


def test_without_lse(place: Place) -> None:
    check(replace(APPEND, with_lse=False), place, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_long_on_a_gpu(kernel_place: Place, causal: bool, heads: int, page_size: int) -> None:
    if kernel_place.device.type != "cuda":
        pytest.skip("takes the interpreter minutes")
    for dtype in (torch.bfloat16, torch.float16):
        for planner in ("host", "device"):
            case = replace(LONG, heads=heads, page_size=page_size, causal=causal, planner=planner)
            check(case, kernel_place, dtype)


def test_slices_of_one_cache_and_output_over_the_queries(place: Place) -> None:
    """[latent | rotary] in one tensor, as engines keep them, read in place; out is q_nope itself."""
    batch = make_batch(APPEND, place)
    typed = move(batch, place, torch.float16)
    pages = to_pages(typed, 16)
    ckv, kpe = split(pages.k.squeeze(2), APPEND.dim)
    assert ckv.stride(1) == kpe.stride(1) == APPEND.dim + 64
    q_nope, q_pe = (x.contiguous() for x in split(typed.q, APPEND.dim))
    table = pages.table("block_table", place.device)
    out = mla_attention(
        q_nope, q_pe, ckv, kpe, sm_scale=APPEND.sm_scale, qo_indptr=int32(batch.qo_indptr, place.device), **table,
        out=q_nope, backend=place.backend,
    )  # fmt: skip
    assert out is q_nope
    assert_matches(out, None, batch, sm_scale=APPEND.sm_scale)


def test_update_and_equal_results_of_both_tables(place: Place) -> None:
    batch = make_batch(APPEND, place)
    typed = move(batch, place, torch.float32)
    pages = to_pages(typed, 16)
    tensors = *split(typed.q, APPEND.dim), *split(pages.k.squeeze(2), APPEND.dim)
    by_indptr = plan_case(APPEND, place, batch, pages, torch.float32)
    by_table = plan_case(replace(APPEND, form="block_table"), place, batch, pages, torch.float32)
    assert same_bits(by_indptr.run(*tensors), by_table.run(*tensors))
    shorter = replace(batch, kv_lens=tuple(max(n - 1, 0) for n in batch.kv_lens))
    by_table.update(kv_lens=int32(shorter.kv_lens))
    keys = [i for r, n in enumerate(shorter.kv_lens) for i in range(batch.kv_indptr[r], batch.kv_indptr[r] + n)]
    shorter = replace(shorter, k=batch.k[keys], v=batch.v[keys])
    out, lse = by_table.run(*tensors, return_lse=True)
    assert_matches(out, lse, shorter, sm_scale=APPEND.sm_scale)


def test_a_page_outside_the_cache(kernel_place: Place) -> None:
    """Only the rows that need it become zero, and `check` tells."""
    batch = make_batch(DECODE, kernel_place)
    typed = move(batch, kernel_place, torch.float32)
    pages = to_pages(typed, 16)
    case = replace(DECODE, form="block_table", planner="device")
    pages.block_table[0, 1] = 10**6
    plan = plan_case(case, kernel_place, batch, pages, torch.float32)
    out, lse = plan.run(*split(typed.q, 512), *split(pages.k.squeeze(2), 512), return_lse=True)
    assert (out[0] == 0).all()
    assert torch.isneginf(lse[0]).all()
    assert out[3].abs().max() > 0
    assert not torch.isnan(out).any()
    with pytest.raises(RuntimeError, match="outside the cache"):
        plan.check()


def test_an_empty_batch(place: Place) -> None:
    empty = torch.zeros(0, dtype=torch.int32)
    plan = plan_mla(num_heads=16, page_size=16, sm_scale=1.0, kv_indptr=int32([0]), kv_indices=empty, last_page_len=empty,
                    dtype=torch.float32, device=place.device, backend=place.backend)  # fmt: skip
    q, cache = torch.randn(0, 16, 576, device=place.device), torch.randn(2, 16, 576, device=place.device)
    assert plan.run(*split(q, 512), *split(cache, 512)).shape == (0, 16, 512)


def test_tiles() -> None:
    def tile(heads: int, qo_len: float, capability: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Any:
        return choose_mla_tile(MLAProblem.of(heads, 512, 64, dtype, 64, True, 1.0), qo_len, capability)

    assert tile(16, 1, (8, 0)).block_m == 16
    assert tile(128, 1, (8, 0)).block_m == 32
    assert tile(128, 1, (8, 9)).block_m == 16, "99 KB of shared memory"
    assert tile(128, 1, (9, 0), torch.float32).block_n == 16


PLAN: dict[str, Any] = {"num_heads": 4, "page_size": 16, "sm_scale": 0.1, "dtype": torch.float32}
TABLE = {"block_table": torch.tensor([[0, 1], [2, 0]]), "kv_lens": torch.tensor([20, 7])}


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"num_heads": 0}, ValueError, "num_heads: got 0, want 1 or more"),
        ({"page_size": 0}, ValueError, "page_size: got 0, want 1 or more"),
        ({"sm_scale": None}, TypeError, "sm_scale: got None, want a number"),
        ({"sm_scale": math.inf}, ValueError, "sm_scale: got inf, want a finite number"),
        ({"head_dim_ckv": 576}, ValueError, "head_dim_ckv: got 576, want a power of two from 16 to 512"),
        ({"head_dim_kpe": 192}, ValueError, "head_dim_kpe: got 192, want a power of two from 16 to 128"),
        ({"dtype": torch.float64}, TypeError, "got torch.float64, want one of"),
        ({"policy": "fair"}, ValueError, "fair"),
        ({"planner": "gpu"}, ValueError, "planner: got 'gpu', want 'host', 'device' or None"),
        ({"kv_lens": torch.tensor([20, 33])}, ValueError, "kv_lens[1]: got 33, want 0 to 32"),
        ({"max_batch": 1}, ValueError, "max_batch: got 1, want at least the 2 requests"),
        ({"base": 1.0}, ValueError, "base: got 1.0, want a finite number above 1"),
    ],
)
def test_what_planning_refuses(wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        plan_mla(**(PLAN | TABLE | wrong))
    assert text in str(caught.value)


def test_ragged_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_indices: got None, want a page table"):
        plan_mla(**PLAN, kv_indptr=torch.tensor([0, 4]))


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("q_nope", torch.randn(2, 4, 256), "q_nope: got shape (2, 4, 256), want [any, 4, 512]"),
        ("q_nope", torch.randn(1, 4, 512), "q_pe: got shape (2, 4, 64), want [1, 4, 64]"),
        ("q_nope", torch.randn(2, 4, 1024)[..., ::2], "q_nope: got stride 2 in the last dimension, want 1"),
        ("q_pe", torch.randn(2, 4, 64).half(), "q_pe: got dtype torch.float16, want torch.float32"),
        ("ckv", torch.randn(3, 16, 1, 512), "ckv: got shape (3, 16, 1, 512), want [any, 16, 512]"),
        ("kpe", torch.randn(2, 16, 64), "kpe: got shape (2, 16, 64), want [3, 16, 64]"),
        ("out", torch.randn(2, 4, 576), "out: got shape (2, 4, 576), want [2, 4, 512]"),
        ("lse", torch.randn(4, 2), "lse: got shape (4, 2), want [2, 4]"),
        ("ckv", None, "ckv: got NoneType, want a tensor"),
    ],
)
def test_what_running_refuses(name: str, tensor: Any, text: str) -> None:
    plan = plan_mla(**PLAN, **TABLE)
    tensors: dict[str, Any] = {
        "q_nope": torch.randn(2, 4, 512),
        "q_pe": torch.randn(2, 4, 64),
        "ckv": torch.randn(3, 16, 512),
        "kpe": torch.randn(3, 16, 64),
    }
    with pytest.raises((ValueError, TypeError)) as caught:
        plan.run(**(tensors | {name: tensor}))
    assert str(caught.value) == text

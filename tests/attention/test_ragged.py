"""Dense and ragged attention: heads, head dims, lengths, strides, dtypes."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import evenshare
from evenshare.attention import attention
from tests.attention.helpers import (
    Place,
    assert_matches,
    check_ragged,
    int32,
    low_precision,
    move,
    nan_outputs,
    oracle,
    random_batch,
    run_ragged,
)

MIXED = ((1, 5, 0, 3, 1, 2), (9, 2, 4, 0, 33, 2))  # decode, more queries than keys, no query, no key, decode, prefill


@pytest.mark.parametrize("causal", [False, True])
def test_mixed_lengths(place: Place, causal: bool) -> None:
    check_ragged(random_batch(*MIXED, heads=(4, 2)), place, causal=causal)


@pytest.mark.parametrize("heads", [(28, 4), (40, 8), (9, 3), (71, 1), (8, 8), (12, 1)])
def test_any_ratio_of_heads(place: Place, heads: tuple[int, int]) -> None:
    check_ragged(random_batch((1, 2), (21, 3), heads=heads), place)


@pytest.mark.parametrize("dim", [8, 32, 56, 72, 80, 96, 112, 128, 256])
def test_any_head_dim(place: Place, dim: int) -> None:
    check_ragged(random_batch((2, 1), (19, 6), dim=dim), place)


@pytest.mark.parametrize("dims", [(192, 128), (24, 40)])
def test_values_of_another_dim(place: Place, dims: tuple[int, int]) -> None:
    check_ragged(random_batch((2, 1), (19, 6), dim=dims[0], dim_v=dims[1]), place)


@pytest.mark.parametrize("heads", [(8, 2), (6, 2)])
def test_low_precision(place: Place, heads: tuple[int, int]) -> None:
    batch = random_batch((1, 3, 17), (40, 18, 17), heads=heads, dim=64)
    for dtype in place.dtypes:
        check_ragged(batch, place, dtype)


def test_the_budget_of_low_precision_can_fail() -> None:
    """The budget is not so wide that a wrong scale or a lost key would pass."""
    batch = random_batch((4,), (30,), dim=64)
    for wrong in ({"sm_scale": 64**-0.5 * 1.05}, {"window_left": 20}):
        out = low_precision(batch, torch.float16, **wrong)
        with pytest.raises(AssertionError):
            assert_matches(out, None, batch)


@pytest.mark.parametrize(("qo_len", "kv_len"), [(1, 1), (3, 20), (20, 20), (7, 3), (2, 0), (0, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_is_ragged(place: Place, causal: bool, qo_len: int, kv_len: int) -> None:
    batch = random_batch((qo_len,) * 2, (kv_len,) * 2, heads=(4, 2), dim=16)
    want, want_lse = run_ragged(batch, place, causal=causal)
    moved = move(batch, place)
    q, k, v = (x.view(2, -1 if x.numel() else 0, *x.shape[1:]) for x in (moved.q, moved.k, moved.v))
    out, lse = attention(q, k, v, causal=causal, return_lse=True, backend=place.backend)
    assert (out.shape, lse.shape) == ((2, qo_len, 4, 16), (2, qo_len, 4))
    assert torch.equal(out.flatten(0, 1), want)
    assert want_lse is not None
    assert torch.equal(lse.flatten(0, 1), want_lse)


def test_empty_batch(place: Place) -> None:
    zero = int32([0], place.device)
    q, kv = torch.empty(0, 4, 16, device=place.device), torch.empty(0, 2, 16, device=place.device)
    out, lse = attention(q, kv, kv, qo_indptr=zero, kv_indptr=zero, return_lse=True, backend=place.backend)
    assert (out.shape, lse.shape) == ((0, 4, 16), (0, 4))
    assert attention(q.unsqueeze(0), kv.unsqueeze(0), kv.unsqueeze(0), backend=place.backend).shape == (1, 0, 4, 16)
    none = torch.empty(0, 3, 4, 16, device=place.device)
    assert attention(none, none, none, backend=place.backend).shape == (0, 3, 4, 16)


def test_one_query_token_each_by_default(place: Place) -> None:
    batch = random_batch((1, 1, 1), (5, 0, 18), heads=(4, 2))
    moved = move(batch, place)
    out = attention(
        moved.q, moved.k, moved.v, qo_indptr=int32([0, 1, 2, 3], place.device), kv_indptr=int32(batch.kv_indptr, place.device),
        causal=True, backend=place.backend,
    )  # fmt: skip
    assert_matches(out, None, batch)


def test_strides_are_honoured(place: Place) -> None:
    """q, k, v slices of one fused projection; only every second row of it; outputs with strides of their own.

    Around all of them is NaN: it is not read, and around the outputs it is not overwritten, also where 24 dims make half a tile.
    """
    batch = random_batch((2, 4), (19, 4), heads=(4, 2), dim=24)
    device = place.device
    fused_q = torch.full((2 * 6, 4 + 2, 24), math.nan, device=device)
    fused_kv = torch.full((2 * 23, 2 + 2 + 1, 24), math.nan, device=device)
    fused_q[::2, :4] = batch.q.to(device)
    fused_kv[::2, 1:3], fused_kv[::2, 3:] = batch.k.to(device), batch.v.to(device)
    large_out, large_lse = torch.full((4, 8, 48), math.nan, device=device), torch.full((4, 8), math.nan, device=device)
    out, lse = large_out[:, 1:7, 12:36].transpose(0, 1), large_lse[:, 1:7].t()
    attention(
        fused_q[::2, :4], fused_kv[::2, 1:3], fused_kv[::2, 3:], qo_indptr=int32(batch.qo_indptr, device),
        kv_indptr=int32(batch.kv_indptr, device), causal=True, out=out, lse=lse, backend=place.backend,
    )  # fmt: skip
    assert_matches(out, lse, batch)
    assert int(torch.isnan(large_out).sum()) == large_out.numel() - out.numel()
    assert int(torch.isnan(large_lse).sum()) == large_lse.numel() - lse.numel()


def test_dense_strides_are_honoured(place: Place) -> None:
    """[B, H, S, D] tensors seen as [B, S, H, D], as torch's own functions lay them out."""
    batch = random_batch((3, 3), (18, 18), heads=(4, 2), dim=16)
    moved = move(batch, place)
    q, k, v = (
        x.view(2, -1, *x.shape[1:]).transpose(1, 2).contiguous().transpose(1, 2) for x in (moved.q, moved.k, moved.v)
    )
    out = torch.full_like(q, math.nan)
    got = attention(q, k, v, causal=True, out=out, backend=place.backend)
    assert got is out
    assert_matches(out.reshape(6, 4, 16), None, batch)


def test_keys_of_other_requests_are_not_seen(place: Place) -> None:
    """NaN in a neighbour's keys and values, in front and behind, and in rows that no request owns."""
    batch = random_batch((1, 2, 1), (5, 18, 5), heads=(4, 2))
    moved = move(batch, place)
    k, v = moved.k.clone(), moved.v.clone()
    for x in (k, v):
        x[:5], x[23:] = math.nan, math.nan
    outputs = nan_outputs(batch, place, torch.float32)
    options = {"qo_indptr": int32(batch.qo_indptr, place.device), "causal": True, "backend": place.backend}
    attention(moved.q, k, v, kv_indptr=int32(batch.kv_indptr, place.device), **outputs, **options)
    want, _ = oracle(batch)
    torch.testing.assert_close(outputs["out"][1:3].cpu().double(), want[1:3], atol=2e-5, rtol=0)
    # The middle request alone, by an indptr that does not start at zero.
    out = torch.full((3, 4, 32), math.nan, device=place.device)
    attention(
        moved.q[:3], k, v, qo_indptr=int32([0, 0, 2], place.device), kv_indptr=int32([5, 5, 23], place.device),
        causal=True, out=out, backend=place.backend,
    )  # fmt: skip
    alone = random_batch((2,), (18,), heads=(4, 2))
    alone = type(alone)((2,), (18,), batch.q[:2], batch.k[5:23], batch.v[5:23])
    assert_matches(out[:2], None, alone)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integer_metadata_of_both_widths(place: Place, dtype: torch.dtype) -> None:
    batch = random_batch((1, 3), (9, 4))
    moved = move(batch, place)
    indptrs = {
        name: torch.tensor(getattr(batch, name), dtype=dtype, device=place.device)
        for name in ("qo_indptr", "kv_indptr")
    }
    out = attention(moved.q, moved.k, moved.v, causal=True, backend=place.backend, **indptrs)
    assert_matches(out, None, batch)


def test_host_metadata_with_tensors_elsewhere(place: Place) -> None:
    batch = random_batch((1, 3), (9, 4))
    moved = move(batch, place)
    indptrs = {"qo_indptr": int32(batch.qo_indptr), "kv_indptr": int32(batch.kv_indptr)}
    out = attention(moved.q, moved.k, moved.v, causal=True, backend=place.backend, **indptrs)
    assert_matches(out, None, batch)


def test_bits_do_not_change_between_runs(kernel_place: Place) -> None:
    batch = random_batch((1, 2, 1), (90, 35, 60), heads=(4, 2), dim=16)
    first, first_lse = run_ragged(batch, kernel_place)
    for _ in range(2):
        again, again_lse = run_ragged(batch, kernel_place)
        assert torch.equal(first, again)
        assert first_lse is not None
        assert again_lse is not None
        assert torch.equal(first_lse, again_lse)


def test_names_at_the_top() -> None:
    q = torch.randn(1, 2, 2, 8)
    assert torch.equal(evenshare.attention(q, q, q), attention(q, q, q))


def test_threads_do_not_share_a_dense_plan() -> None:
    """Same shapes but for the number of keys, at once: each thread must see its own plan."""
    cases = [tuple(torch.randn(1, n, h, 16) for n, h in ((3, 4), (length, 2), (length, 2))) for length in (5, 40)]
    want = [attention(*case) for case in cases]

    def run(case: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        return [attention(*case) for _ in range(200)]

    with ThreadPoolExecutor(2) as pool:
        for result, expected in zip(pool.map(run, cases), want, strict=True):
            assert all(torch.equal(out, expected) for out in result)

"""Variants in every backend against FlexAttention and the formula: the ready-made ones, and what is particular to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention, or_masks

import evenshare
from evenshare import Variant
from evenshare.attention import variants
from tests.attention.helpers import Batch, Place, int32, random_batch, run_paged, run_ragged
from tests.attention.variants.helpers import assert_close, check, formula_oracle

QO_LENS, KV_LENS, HEADS = (5, 1, 20), (38, 17, 20), (4, 2)
DRAFT = [[-1, 0, 0, 1, 3], [-1, -1, 0, 1, 2], [-1, 0, 1, 2, 3]]


def batch_of(qo_lens: tuple[int, ...] = QO_LENS, kv_lens: tuple[int, ...] = KV_LENS) -> Batch:
    return random_batch(qo_lens, kv_lens, HEADS, dim=16)


def table(*shape: int, device: torch.device) -> torch.Tensor:
    """The same numbers on every device."""
    return torch.linspace(-1, 1, math.prod(shape)).view(shape).roll(1, 0).to(device)


def packed(device: torch.device) -> Callable[..., Any]:
    generator = torch.Generator().manual_seed(1)
    masks = [torch.rand(n, m, generator=generator) < 0.4 for n, m in zip(QO_LENS, KV_LENS, strict=True)]
    bits, indptr = variants.pack_masks(masks)
    return variants.packed_mask(
        bits.to(device), indptr.to(device), int32(QO_LENS, device), int32(KV_LENS, device).long()
    )


def everything(device: torch.device) -> Variant:
    capped, biased = variants.soft_cap(2.0), variants.alibi(table(4, device=device))
    near = and_masks(variants.causal, variants.sliding_window(9))
    return Variant(
        score_mod=lambda score, *positions: biased(capped(score, *positions), *positions),
        mask_mod=or_masks(near, lambda b, h, q_idx, kv_idx: kv_idx < b + h),
        sinks=table(4, device=device),
    )


READY_MADE: dict[str, Callable[[torch.device], Variant]] = {
    "causal": lambda device: Variant(mask_mod=variants.causal),
    "sliding window": lambda device: Variant(mask_mod=variants.sliding_window(7)),
    "dilated window": lambda device: Variant(mask_mod=variants.dilated_window(4, 3)),
    "prefix lm": lambda device: Variant(mask_mod=variants.prefix_lm(int32([9, 0, 12], device))),
    "documents": lambda device: Variant(mask_mod=variants.documents(torch.arange(40, device=device) // 9)),
    "documents of each request": lambda device: Variant(
        mask_mod=variants.documents(torch.arange(120, device=device).view(3, 40) // 7 % 3)
    ),
    "packed mask": lambda device: Variant(mask_mod=packed(device)),
    "tree": lambda device: Variant(mask_mod=variants.tree(int32(DRAFT, device), int32(KV_LENS, device))),
    "soft cap": lambda device: Variant(score_mod=variants.soft_cap(0.5)),
    "alibi": lambda device: Variant(score_mod=variants.alibi(variants.alibi_slopes(4, device))),
    "relative bias": lambda device: Variant(score_mod=variants.relative_bias(table(4, 11, device=device))),
    "sinks": lambda device: Variant(sinks=4 * table(4, device=device)),
    "sigmoid": lambda device: variants.sigmoid_attention(-1.0, variants.causal),
    "everything": everything,
}


@pytest.mark.parametrize("name", READY_MADE)
def test_ready_made(place: Place, name: str) -> None:
    check(batch_of(), place, READY_MADE[name])


@pytest.mark.parametrize("name", ["alibi", "everything", "sigmoid"])
def test_beside_the_calls_own_causal_mask(place: Place, name: str) -> None:
    """Rows of the third request begin before its first key: their positions are negative."""
    check(batch_of((5, 1, 20), (38, 17, 13)), place, READY_MADE[name], causal=True)


def test_soft_cap_of_the_call_comes_first(place: Place) -> None:
    batch = batch_of()
    twice = Variant(score_mod=lambda score, *positions: torch.exp(0.1 * torch.tanh(score)))
    variant = Variant(score_mod=lambda score, *positions: torch.exp(0.1 * score))
    got = run_ragged(batch, place, variant=variant, causal=False, logits_soft_cap=1.0)
    assert_close(got, formula_oracle(batch, twice), batch)


def test_approximate_tanh(place: Place) -> None:
    """In Triton's interpreter it is exact, and so in torch; the instruction's error is 2^-10.9."""
    batch = batch_of()
    variant = Variant(score_mod=variants.soft_cap(0.5, approximate=True))
    out, _ = run_ragged(batch, place, variant=variant, causal=False)
    want, _ = formula_oracle(batch, Variant(score_mod=variants.soft_cap(0.5)))
    torch.testing.assert_close(out.cpu().double(), want, atol=4e-3, rtol=0)


@pytest.mark.parametrize("softmax", [True, False])
def test_long_requests_are_split_and_merged(place: Place, softmax: bool) -> None:
    """One row of many keys in two heads: every worker has a part, and sinks count once."""
    batch = random_batch((1, 2), (211, 3), (2, 1), dim=16)

    def make(device: torch.device) -> Variant:
        slopes = table(2, device=device)
        return Variant(
            score_mod=lambda score, b, h, q_idx, kv_idx: score + slopes[h] * 0.01 * (kv_idx % 50),
            mask_mod=lambda b, h, q_idx, kv_idx: kv_idx % 3 != b,
            softmax=softmax,
            sinks=slopes if softmax else None,
        )

    check(batch, place, make)


@pytest.mark.parametrize("with_sinks", [True, False])
def test_rows_all_of_whose_keys_are_hidden(place: Place, with_sinks: bool) -> None:
    sinks = torch.tensor([3.0, -3.0], device=place.device) if with_sinks else None
    variant = Variant(mask_mod=lambda b, h, q_idx, kv_idx: (q_idx % 2 == 0) & (kv_idx != 5), sinks=sinks)
    batch = random_batch((4,), (20,), (2, 1), dim=16)
    out, lse = run_ragged(batch, place, variant=variant, causal=False)
    assert lse is not None
    assert (out[1::2] == 0).all()
    assert torch.isneginf(lse[1::2]).all()
    assert torch.isfinite(lse[::2]).all()
    hidden = Variant(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx < 0, softmax=False)
    out, _ = run_ragged(batch, place, variant=hidden, causal=False, with_lse=False)
    assert (out == 0).all()


def test_values_of_captured_tensors_may_change(place: Place) -> None:
    batch = batch_of()
    slopes, sinks = table(4, device=place.device), table(4, device=place.device)
    variant = Variant(score_mod=variants.alibi(slopes), sinks=sinks)
    text = variant.source()
    for _ in range(2):
        got = run_ragged(batch, place, variant=variant, causal=False)
        judged = Variant(score_mod=variants.alibi(slopes.cpu()), sinks=sinks.cpu())
        assert_close(got, formula_oracle(batch, judged), batch)
        slopes.mul_(-0.5)
        sinks.add_(1)
    assert variant.source() == text


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.float64])
def test_dtypes_and_strides_of_captured_tensors(place: Place, dtype: torch.dtype) -> None:
    batch = batch_of()

    def make(device: torch.device) -> Variant:
        numbers = (torch.arange(8 * 24, device=device) % 3).view(24, 8).to(dtype).t()[::2]

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + 0.25 * numbers[h][kv_idx // 2] - numbers[-1, 3].float() * (b + 1)

        return Variant(score_mod=score_mod)

    check(batch, place, make, chained=True)


def test_an_index_counts_from_the_end_if_negative(place: Place) -> None:
    batch = batch_of()
    biases = table(64, device=place.device)
    judged = biases.cpu()
    variant = Variant(score_mod=lambda score, b, h, q_idx, kv_idx: score + biases[q_idx - kv_idx])
    want = formula_oracle(batch, Variant(score_mod=lambda score, b, h, q_idx, kv_idx: score + judged[q_idx - kv_idx]))
    assert_close(run_ragged(batch, place, variant=variant, causal=False), want, batch)


def test_an_index_outside_reads_zero(kernel_place: Place) -> None:
    """In kernels, which have no way to raise; what lies around the tensor is not read."""
    batch = batch_of()
    wide = torch.full((30,), math.nan, device=kernel_place.device)
    biases = wide[10:20]
    biases.fill_(2.0)
    variant = Variant(score_mod=lambda score, b, h, q_idx, kv_idx: score + biases[kv_idx] * 1.0)
    inside = Variant(score_mod=lambda score, b, h, q_idx, kv_idx: score + torch.where(kv_idx < 10, 2.0, 0.0))
    assert_close(run_ragged(batch, kernel_place, variant=variant, causal=False), formula_oracle(batch, inside), batch)
    few = torch.full((10,), 2.0)
    variant = Variant(score_mod=lambda score, b, h, q_idx, kv_idx: score + few[kv_idx])
    with pytest.raises(IndexError):
        run_ragged(batch, Place(torch.device("cpu"), "cpu", ()), variant=variant, causal=False)


def test_dense_batches_and_block_masks(place: Place) -> None:
    """FlexAttention's own block mask of the same function, and its own layout of tensors."""
    q = torch.randn(2, 4, 24, 16)
    k, v = torch.randn(2, 2, 2, 24, 16)
    ids = torch.arange(48).view(2, 24) // 10
    mask_mod = and_masks(variants.causal, variants.documents(ids))
    mask = create_block_mask(mask_mod, 2, None, 24, 24, device="cpu", BLOCK_SIZE=8)
    want = flex_attention(q.double(), k.double(), v.double(), block_mask=mask, enable_gqa=True).transpose(1, 2)
    moved = variants.documents(ids.to(place.device))
    variant = Variant(mask_mod=moved)
    q, k, v = (x.transpose(1, 2).to(place.device) for x in (q, k, v))
    for _ in range(2):
        got = evenshare.attention(q, k, v, causal=True, variant=variant, backend=place.backend)
        torch.testing.assert_close(got.cpu().double(), want, atol=2e-5, rtol=0)


def test_a_variant_of_nothing_is_softmax_attention(place: Place) -> None:
    batch = batch_of()
    plain, with_variant = (run_paged(batch, place, variant=variant) for variant in (None, Variant()))
    torch.testing.assert_close(with_variant[0], plain[0], atol=1e-6, rtol=0)


def test_fp8_keys(place: Place) -> None:
    batch = batch_of()
    q, k, v = (x.to(place.device) for x in (batch.q, batch.k, batch.v))
    dtype, codes = torch.float16, [x.to(torch.float8_e4m3fn) for x in (k, v)]
    variant = everything(place.device)
    metadata = {"qo_indptr": int32(batch.qo_indptr, place.device), "kv_indptr": int32(batch.kv_indptr, place.device)}
    options = metadata | {"variant": variant, "backend": place.backend}
    got = evenshare.attention(q.to(dtype), *codes, k_scale=0.5, v_scale=2.0, **options)
    same = evenshare.attention(q.to(dtype), codes[0].to(dtype) * 0.5, codes[1].to(dtype) * 2.0, **options)
    torch.testing.assert_close(got, same, atol=2e-2, rtol=0)

"""Transforms of queries, keys, values and outputs in every backend, against tensors that were transformed beforehand in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import evenshare
from evenshare import Variant, VariantError
from evenshare.attention import variants
from evenshare.attention.tiles import choose_tile
from evenshare.attention.variants.eager import transformed
from evenshare.ops import RopeScaling, apply_rope
from tests.attention.helpers import Batch, Place, int32, move, random_batch, run_paged, run_ragged
from tests.attention.variants.helpers import assert_close, flex_oracle, formula_oracle

QO_LENS, KV_LENS, HEADS, DIM = (5, 1, 0, 4), (38, 17, 3, 2), (4, 2), 24
LLAMA = RopeScaling(1.0, 4.0, 16)
WEIGHTS = torch.linspace(0.5, 2, DIM), torch.linspace(1.5, -1, DIM)


def batch_of() -> Batch:
    return random_batch(QO_LENS, KV_LENS, HEADS, DIM)


def positions(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Of query and key tokens."""
    pairs = zip(batch.qo_lens, batch.kv_lens, strict=True)
    return (
        torch.cat([torch.arange(m - n, m) for n, m in pairs]),
        torch.cat([torch.arange(m) for m in batch.kv_lens]),
    )


def rotated(batch: Batch, rotary_dim: int, interleave: bool = False, theta: float = 1e4, **scaling: Any) -> Batch:
    """Complex numbers times powers of i: another way than the code's."""

    def rotate(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x, half = x.double().clone(), rotary_dim // 2
        frequency = theta ** (-torch.arange(half).double() / half)
        if scaling:
            factor, llama = scaling["rope_scale"], scaling["scaling"]
            smooth = (frequency * llama.old_context_len / (2 * math.pi) - llama.low_freq_factor) / (
                llama.high_freq_factor - llama.low_freq_factor
            )
            smooth = smooth.clamp(0, 1)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        turns = torch.polar(torch.ones(()).double(), position[:, None].double() * frequency)[:, None]
        first, second = (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)) if interleave else (
            slice(0, half), slice(half, rotary_dim))  # fmt: skip
        turned = torch.complex(x[..., first].contiguous(), x[..., second].contiguous()) * turns
        x[..., first], x[..., second] = turned.real, turned.imag
        return x

    q, k = (rotate(x, at) for x, at in zip((batch.q, batch.k), positions(batch), strict=True))
    return replace(batch, q=q, k=k)


def normed(batch: Batch) -> Batch:
    q, k = (
        x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()
        for x, w in zip((batch.q, batch.k), WEIGHTS, strict=True)
    )
    return replace(batch, q=q, k=k)


def both(turn: Callable[..., Any]) -> dict[str, Any]:
    return {"query": turn, "key": turn}


def norms(device: torch.device, *after: Callable[..., Any]) -> dict[str, Any]:
    return {
        name: variants.in_turn(variants.rms_norm(w.to(device)), *after)
        for name, w in zip(("query", "key"), WEIGHTS, strict=True)
    }


def cached(device: torch.device) -> torch.Tensor:
    """Cosines and sines of 40 positions, 16 dims."""
    angles = torch.arange(40).double()[:, None] * 1e4 ** (-torch.arange(8).double() / 8)
    return torch.cat([angles.cos(), angles.sin()], 1).float().to(device)


TRANSFORMS: dict[str, tuple[Callable[[torch.device], dict[str, Any]], Callable[[Batch], Batch]]] = {
    "rope": (lambda device: both(variants.rope(DIM, device=device)), lambda batch: rotated(batch, DIM)),
    "interleaved": (
        lambda device: both(variants.rope(DIM, interleave=True, rope_theta=100, device=device)),
        lambda batch: rotated(batch, DIM, True, 100),
    ),
    "partial": (lambda device: both(variants.rope(16, device=device)), lambda batch: rotated(batch, 16)),
    "partial, interleaved": (
        lambda device: both(variants.rope(10, interleave=True, device=device)),
        lambda batch: rotated(batch, 10, True),
    ),
    "stretched": (
        lambda device: both(variants.rope(DIM, rope_scale=8.0, rope_theta=5e5, scaling=LLAMA, device=device)),
        lambda batch: rotated(batch, DIM, theta=5e5, rope_scale=8.0, scaling=LLAMA),
    ),
    "from a table": (
        lambda device: both(variants.rope_with_cos_sin_cache(cached(device))),
        lambda batch: rotated(batch, 16),
    ),
    "norm": (norms, normed),
    "norm, then rope": (
        lambda device: norms(device, variants.rope(DIM, device=device)),
        lambda batch: rotated(normed(batch), DIM),
    ),
    "values": (
        lambda device: {"value": lambda x, b, h, kv_idx, d: x[DIM - 1 - d] * (h + 1) - x.amax() + d + kv_idx + b},
        lambda batch: replace(
            batch,
            v=batch.v.double().flip(-1) * torch.tensor([[1.0], [2.0]]) - batch.v.amax(-1, keepdim=True)
            + torch.arange(DIM) + (positions(batch)[1] + torch.arange(4).repeat_interleave(torch.tensor(KV_LENS)))[:, None, None],
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform(place: Place, name: str) -> None:
    """Rows before the first key are among them: causal, in the last request."""
    make, plain = TRANSFORMS[name]
    batch, variant = batch_of(), Variant(**make(place.device))
    wants = [oracle(plain(batch), Variant(), causal=True) for oracle in (flex_oracle, formula_oracle)]
    for got in (run_ragged(batch, place, variant=variant), run_paged(batch, place, page_size=4, variant=variant)):
        for want in wants:
            assert_close(got, want, batch)


@pytest.mark.parametrize("softmax", [True, False])
def test_an_output(place: Place, softmax: bool) -> None:
    """After the sinks; rows without keys stay 0."""
    bias = torch.linspace(-1, 1, DIM, device=place.device)
    sinks = torch.linspace(-1, 1, 4) if softmax else None
    variant = Variant(
        output=lambda x, b, h, q_idx, d: x / (1 + x.abs().sum()) + bias[d] * (h + q_idx),
        softmax=softmax,
        sinks=None if sinks is None else sinks.to(place.device),
    )
    batch = batch_of()
    out, lse = formula_oracle(batch, Variant(softmax=softmax, sinks=sinks), causal=True)
    heads, at = torch.arange(4)[:, None], positions(batch)[0][:, None, None]
    want = out / (1 + out.abs().sum(-1, keepdim=True)) + bias.cpu().double() * (heads + at)
    want[at.flatten() < 0] = 0
    got = run_ragged(batch, place, variant=variant, with_lse=softmax)
    assert_close(got, (want, lse), batch)


def test_an_output_where_the_mask_hides_all_keys(place: Place) -> None:
    batch = batch_of()
    variant = Variant(mask_mod=lambda b, h, q_idx, kv_idx: h != 1, output=lambda x, b, h, q_idx, d: x + 1)
    out, lse = run_ragged(batch, place, variant=variant, causal=False)
    assert (out[:, 1] == 0).all()
    assert lse is not None
    assert torch.isneginf(lse[:, 1]).all()
    want = formula_oracle(batch, Variant())[0]
    torch.testing.assert_close(out[:, 2].cpu().double(), want[:, 2] + 1, atol=2e-5, rtol=0)


@pytest.mark.parametrize("codes", [torch.int8, torch.uint8])
def test_codes_of_integers(place: Place, codes: torch.dtype) -> None:
    """Scales by token and head, from a table; zero points by dim."""
    batch, paged = batch_of(), codes == torch.int8
    scales = torch.rand(2, sum(KV_LENS), device=place.device) + 0.5
    zeros = torch.arange(DIM, device=place.device)
    first = torch.tensor(batch.kv_indptr, device=place.device)

    def dequantised(x: Any, b: Any, h: Any, kv_idx: Any, d: Any) -> Any:
        return (x - zeros[d]) * scales[h, first[b] + kv_idx] / 16

    coded = [torch.randint(0, 2 * DIM, x.shape).to(codes) for x in (batch.k, batch.v)]
    k, v = ((x.double() - zeros.cpu()) * scales.cpu().t()[..., None].double() / 16 for x in coded)
    want = formula_oracle(replace(batch, k=k, v=v), Variant(), causal=True)
    run = run_paged if paged else run_ragged
    mixed = replace(batch, k=coded[0].float(), v=coded[1].float())
    variant = Variant(key=dequantised, value=dequantised)
    if paged:
        got = run(mixed, place, variant=variant)
        assert_close(got, want, mixed)
    moved = move(mixed, place)
    out = evenshare.attention(
        moved.q, moved.k.to(codes), moved.v.to(codes), qo_indptr=int32(batch.qo_indptr, place.device), causal=True,
        kv_indptr=int32(batch.kv_indptr, place.device), variant=variant, backend=place.backend,
    )  # fmt: skip
    assert_close((out, None), want, mixed)


def test_codes_without_transforms() -> None:
    q, codes = torch.randn(1, 2, 2, 16), torch.zeros(1, 3, 2, 16, dtype=torch.int8)
    for variant in (None, Variant(key=lambda x, b, h, i, d: x)):
        with pytest.raises(
            TypeError, match=r"kv_dtype: got torch\.int8, want it only beside a variant with key and value"
        ):
            evenshare.attention(q, codes, codes, variant=variant)


def test_16_bits_and_fp8_keys(place: Place) -> None:
    """The transform sees the code; the scale multiplies what it makes."""
    batch, dtype = batch_of(), torch.float16
    q, k, v = (x.to(place.device) for x in (batch.q, batch.k, batch.v))
    options: dict[str, Any] = {
        "qo_indptr": int32(batch.qo_indptr, place.device), "kv_indptr": int32(batch.kv_indptr, place.device), "causal": True,
        "variant": Variant(**both(variants.rope(DIM, device=place.device))), "backend": place.backend,
    }  # fmt: skip
    codes = [x.to(torch.float8_e4m3fn) for x in (k, v)]
    got = evenshare.attention(q.to(dtype), *codes, k_scale=0.5, v_scale=2.0, **options)
    held = replace(batch, k=codes[0].float().cpu() * 0.5, v=codes[1].float().cpu() * 2.0)
    want, _ = formula_oracle(rotated(held, DIM), Variant(), causal=True)
    torch.testing.assert_close(got.cpu().double(), want, atol=2e-2, rtol=0)


@pytest.mark.parametrize("interleave", [True, False])
def test_rope_far_away_is_that_of_apply_rope(interleave: bool) -> None:
    x = torch.randn(3, 2, DIM)
    turn = variants.rope(16, interleave=interleave, rope_theta=1e6)
    for first in (0, 1_000_000, 2**31 - 3):
        positions = torch.arange(first, first + 3)
        want, _ = apply_rope(x, x, torch.arange(first, first + 3), rotary_dim=16, interleave=interleave, rope_theta=1e6)
        torch.testing.assert_close(transformed(turn, x, 0, torch.arange(2), positions), want, atol=1e-6, rtol=0)


def test_a_table_that_ends(place: Place) -> None:
    """Positions past it are not rotated."""
    table = cached(place.device)[:20]
    batch = batch_of()
    turned, far = rotated(batch, 16), [at >= 20 for at in positions(batch)]
    q, k = (
        torch.where((skip | (at < 0))[:, None, None], x.double(), y)
        for skip, at, x, y in zip(far, positions(batch), (batch.q, batch.k), (turned.q, turned.k), strict=True)
    )
    want = formula_oracle(replace(batch, q=q, k=k), Variant(), causal=True)
    variant = Variant(**both(variants.rope_with_cos_sin_cache(table)))
    assert_close(run_ragged(batch, place, variant=variant), want, batch)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_elements_are_indexed_as_in_torch(place: Place, name: str) -> None:
    """From the end if negative, one for all, and of what was computed before; vectors along rows and along columns of a tile."""
    batch = batch_of()

    def moved(x: Any, b: Any, h: Any, position: Any, d: Any) -> Any:
        y = x * (d + 1) - x.mean() + x.amin() - torch.amax(x, -1)
        return y[d - 3] + x[-1] + y[2] * 0.5 + y[(d * 5 + 1) % 24] * x.square().sum()

    x = getattr(batch, name[0]).double()
    d = torch.arange(DIM)
    y = x * (d + 1) - x.mean(-1, keepdim=True) + x.amin(-1, keepdim=True) - x.amax(-1, keepdim=True)
    moved_x = (
        y.roll(3, -1) + x[..., -1:] + y[..., 2:3] * 0.5 + y[..., (d * 5 + 1) % 24] * x.square().sum(-1, keepdim=True)
    )
    scale = float(moved_x.abs().max())
    factors = {"query": 1 / scale, "key": 1 / scale, "value": 1.0}
    want = formula_oracle(replace(batch, **{name[0]: moved_x * factors[name]}), Variant())
    variant = Variant(**{name: lambda *arguments: moved(*arguments) * factors[name]})
    assert_close(run_ragged(batch, place, variant=variant, causal=False), want, batch)


def test_a_constant_becomes_a_vector(place: Place) -> None:
    batch = batch_of()
    want = formula_oracle(replace(batch, v=torch.ones_like(batch.v) * 3), Variant())
    assert_close(run_ragged(batch, place, variant=Variant(value=lambda *_: 3), causal=False), want, batch)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"output": lambda x, b, h, i, d: x[d ^ 1]}, "an index of the output"),
    ({"query": lambda x, b, h, i, d: h.sum()}, "sum of a single number, want a vector"),
    ({"query": lambda x, b, h, i, d: x.sum(1)}, "sum: got dim=1, want the only one"),
    ({"key": lambda x, b, h, i, d: x[x > 0]}, "an index of kind bool, want integers"),
    ({"key": lambda x, b, h, i, d: x[:4]}, "slice"),
    ({"key": lambda x, b, h, i, d: b[d]}, "an index of a traced value, which is one number"),
    ({"value": lambda x, b, h, i, d: x * WEIGHTS[0]}, r"captured tensor of shape \(24,\) with 1 dimensions not indexed"),
    ({"value": lambda x, b, h, i, d: x if x.sum() > 0 else -x}, "`if`"),
]  # fmt: skip


@pytest.mark.parametrize(("transforms", "message"), REFUSED)
def test_what_cannot_be_traced(transforms: dict[str, Any], message: str) -> None:
    with pytest.raises(VariantError, match=message) as caught:
        Variant(**transforms)
    assert "test_transforms.py:" in str(caught.value)


def test_impossible_arguments() -> None:
    for make, message in (
        (lambda: Variant(query=3), "query: got int, want a function or None"),
        (lambda: variants.rope(7), "rotary_dim: got 7, want an even number"),
        (lambda: variants.rope(8, rope_theta=0), "rope_theta: got 0, want a finite number above 0"),
        (lambda: variants.rms_norm(torch.ones(2, 2)), "weight: got torch.float32 of shape"),
        (lambda: variants.rms_norm(torch.ones(2), eps=-1), "eps: got -1"),
        (lambda: variants.rope_with_cos_sin_cache(torch.ones(4, 3)), "cos_sin_cache: got shape"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            make()


def test_transforms_run_on_the_portable_kernel_and_are_part_of_the_text() -> None:
    plan = evenshare.plan_attention(
        num_qo_heads=4, num_kv_heads=2, head_dim=64, kv_indptr=torch.tensor([0, 9]), variant=Variant(key=variants.rope(64)),
        backend="cpu",
    )  # fmt: skip
    assert choose_tile(plan.problem, 1.0, (9, 0)).kernel == "forward"
    one, two, three = (Variant(key=lambda x, b, h, i, d, n=n: x * n) for n in (2, 2, 3))
    assert one == two
    assert one != three
    assert "row_mean" not in one.source()

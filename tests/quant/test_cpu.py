"""The CPU backend against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

from evenshare.quant import cpu, prepare, quantize
from evenshare.quant.encodings import CODEBOOKS
from tests.quant.helpers import ZERO_FORMS, assert_product, product, random_permutation, random_weight

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("zero_form", ZERO_FORMS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(48, 96, 32), (40, 72, 16), (32, 256, -1), (16, 256, 128), (1, 33, 32)]
)
def test_products(n: int, k: int, group_size: int, bits: int, zero_form: str) -> None:
    for dtype in DTYPES:
        weight = random_weight(n, k, group_size, zero_form, bits)
        for m in (1, 3, 17, 130):
            x = torch.randn(m, k).to(dtype)
            y = product(x, weight)
            assert y.dtype == dtype
            assert y.shape == (m, n)
            assert_product(y, x, weight)


@pytest.mark.parametrize("padding", [None, 0, 32])
@pytest.mark.parametrize(("bits", "zero_form"), [(4, "nf4"), (4, "e2m1"), (4, "offsets"), (8, "zeros")])
def test_tables_and_permutations(bits: int, zero_form: str, padding: int | None) -> None:
    permutation = None if padding is None else random_permutation(96, padding)
    for dtype in DTYPES:
        weight = random_weight(48, 96, 32, zero_form, bits, permutation=permutation)
        for m in (0, 1, 3, 130):
            x = torch.randn(m, 96).to(dtype)
            y = product(x, weight)
            assert y.shape == (m, 48)
            if m:
                assert_product(y, x, weight)
    taken = zero_form not in CODEBOOKS
    assert isinstance(cpu.pack(weight, torch.float32), torch.Tensor)
    assert isinstance(cpu.pack(weight, torch.bfloat16), torch.Tensor) != taken
    # Whoever takes an Int4Weight as it is must not get one that wants another order of x.
    assert isinstance(cpu.pack(weight, torch.bfloat16), cpu.Int4Weight) == (taken and permutation is None)


@pytest.mark.parametrize(
    ("n", "k", "group_size", "expected"),
    [
        (48, 96, 32, 32),
        (48, 256, -1, 256),
        (48, 96, -1, 32),
        (48, 128, 16, 0),
        (40, 96, 32, 0),
        (48, 100, 32, 0),
        (0, 96, 32, 0),
    ],
)
def test_what_the_int4_kernel_takes(n: int, k: int, group_size: int, expected: int) -> None:
    assert cpu.int4_group_size(random_weight(n, k, group_size)) == expected


@pytest.mark.parametrize("bits", [4, 8])
def test_long_inputs_are_dequantised_in_chunks(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "DEQUANTIZE_ELEMENTS", 20 * 64)
    weight = random_weight(48, 64, 32, "offsets", bits)
    x = torch.randn(cpu.INT4_MAX_ROWS + 1, 64).bfloat16()
    assert_product(product(x, weight), x, weight)


def test_8_bit_codes_as_two_4_bit_ones_lose_nothing_but_the_scale() -> None:
    weight = random_weight(16, 64, 32, bits=8, dtype=torch.bfloat16)
    identity = torch.eye(64).bfloat16()
    assert torch.equal(product(identity, weight), weight.dequantize(torch.bfloat16).T)


def test_prepare_packs_once() -> None:
    weight = quantize(torch.randn(16, 64), 32)
    assert prepare(weight, torch.bfloat16) is weight
    packed = dict(weight.packed)
    assert packed
    x = torch.randn(2, 64).bfloat16()
    product(x, weight)
    assert all(weight.packed[key] is value for key, value in packed.items())
    assert len(weight.packed) == len(packed)
    with pytest.raises(TypeError, match=r"dtype: got torch.float64, want float32, float16 or bfloat16"):
        prepare(weight, torch.float64)

"""The canonical weight: what its fields mean, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from evenshare.quant import QuantizedWeight, concatenate, w4a16_matmul
from evenshare.quant.encodings import CODEBOOKS
from tests.quant.helpers import FORMS, ZERO_FORMS, random_permutation, random_weight

# e2m1 by its bits: sign, exponent with bias 1, mantissa; nf4 from its paper, in float32.
E2M1 = [
    (-1.0) ** (c >> 3) * ((c & 1) / 2 if c & 6 == 0 else 2.0 ** ((c >> 1 & 3) - 1) * (1 + (c & 1) / 2))
    for c in range(16)
]
TABLES = {"e2m1": torch.tensor(E2M1), "nf4": torch.tensor(CODEBOOKS["nf4"])}


def by_definition(weight: QuantizedWeight) -> torch.Tensor:
    """Element by element, from the docstring."""
    n, k = weight.shape
    out = torch.zeros(n, k, dtype=torch.float32)
    for row in range(n):
        for column in range(weight.stored_k):
            at = column if weight.permutation is None else int(weight.permutation[column])
            if at == -1:
                continue
            if weight.bits == 4:
                q = int(weight.codes[row, column // 2]) >> (4 * (column % 2)) & 15
            else:
                q = int(weight.codes[row, column])
            group = column // weight.group_size
            scale = weight.scales[row, group].float()
            if weight.encoding != "integer":
                out[row, at] = TABLES[weight.encoding][q] * scale
            elif weight.offsets is not None:
                out[row, at] = q * scale + weight.offsets[row, group].float()
            elif weight.zeros is not None:
                out[row, at] = (q - int(weight.zeros[row, group])) * scale
            else:
                out[row, at] = (q - (1 << (weight.bits - 1))) * scale
    return out


@pytest.mark.parametrize(("bits", "zero_form"), [(4, form) for form in FORMS] + [(8, form) for form in ZERO_FORMS])
@pytest.mark.parametrize(("k", "group_size"), [(32, 16), (33, 16), (20, 32), (21, 21), (40, -1)])
def test_dequantize_is_the_definition(k: int, group_size: int, bits: int, zero_form: str) -> None:
    for permutation in (None, random_permutation(k), random_permutation(k, 7)):
        size = -1 if group_size == k else group_size
        weight = random_weight(3, k, size, zero_form, bits, permutation=permutation)
        assert weight.stored_k == (k if permutation is None else permutation.numel())
        assert torch.equal(weight.dequantize(), by_definition(weight))
        assert torch.equal(weight.dequantize(torch.float16), by_definition(weight).half())


def test_nf4_holds_the_quantiles_of_its_paper() -> None:
    """arXiv 2305.14314, section 3: means of neighbouring quantiles of N(0, 1), 8 of them above zero and 7 below, scaled to 1."""
    offset = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    normal = torch.distributions.Normal(0.0, 1.0)
    above = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    below = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat((below, torch.zeros(1), above.flip(0))) / above.max()
    # The published values are of scipy's quantiles rounded to float32.
    assert torch.allclose(values, torch.tensor(CODEBOOKS["nf4"], dtype=torch.float64), rtol=0, atol=2e-7)


def test_a_missing_column_is_zero() -> None:
    weight = random_weight(2, 20, 16, permutation=torch.arange(16, dtype=torch.int32))
    assert (weight.dequantize()[:, 16:] == 0).all()
    assert (weight.dequantize()[:, :16] != 0).any()


def test_minus_one_is_one_group_per_row() -> None:
    weight = random_weight(4, 48, -1)
    assert weight.group_size == 48
    assert weight.num_groups == 1
    same = QuantizedWeight(weight.codes, weight.scales, 48, 48)
    x = torch.randn(3, 48)
    assert torch.equal(w4a16_matmul(x, weight), w4a16_matmul(x, same))


def test_a_zero_scale_keeps_its_offset() -> None:
    weight = QuantizedWeight(
        torch.randint(0, 256, (2, 16), dtype=torch.uint8),
        torch.zeros(2, 1),
        32,
        32,
        offsets=torch.tensor([[0.25], [-3.0]]),
    )
    assert torch.equal(weight.dequantize(), torch.tensor([[0.25], [-3.0]]).expand(2, 32))


@pytest.mark.parametrize("padding", [None, 0, 4])
@pytest.mark.parametrize("zero_form", FORMS)
def test_rows(zero_form: str, padding: int | None) -> None:
    permutation = None if padding is None else random_permutation(33, padding)
    weight = random_weight(10, 33, 16, zero_form, permutation=permutation)
    dense = weight.dequantize()
    index = torch.tensor([7, 0, 7, 9])
    assert torch.equal(weight.take_rows(index).dequantize(), dense[index])
    assert torch.equal(weight.lookup(index.view(2, 2)), dense[index].view(2, 2, 33))
    assert torch.equal(weight.narrow(2, 5).dequantize(), dense[2:5])
    assert weight.narrow(2, 5).codes.data_ptr() == weight.codes[2:].data_ptr()
    assert torch.equal(concatenate([weight.narrow(3, 10), weight.narrow(0, 3)]).dequantize(), dense.roll(-3, 0))


def test_sizes() -> None:
    weight = random_weight(4, 33, 16, "zeros")
    assert weight.shape == (4, 33)
    assert weight.nbytes == 4 * 17 + 4 * 3 * 2 + 4 * 3
    permuted = random_weight(4, 33, 16, permutation=random_permutation(33, 15))
    assert permuted.shape == (4, 33)
    assert permuted.num_groups == 3
    assert permuted.nbytes == 4 * 24 + 4 * 3 * 2 + 4 * 48


def test_moved_with_every_field() -> None:
    for weight in (
        random_weight(4, 32, 16, "nf4", permutation=random_permutation(32)),
        random_weight(4, 32, 16, "zeros"),
    ):
        moved = weight.to("meta")
        assert (moved.device.type, moved.encoding, moved.group_size) == ("meta", weight.encoding, 16)
        assert (moved.permutation is None) == (weight.permutation is None)
        assert weight.to("cpu") is weight


def test_packed_forms_stay_with_their_weight() -> None:
    weight = random_weight(16, 32, 32)
    w4a16_matmul(torch.randn(1, 32), weight)
    assert weight.packed
    assert not weight.take_rows(torch.arange(16)).packed


def test_concatenate_refuses_another_form() -> None:
    with pytest.raises(ValueError, match=r"weights\[1\]: got .*zeros.* want .*symmetric"):
        concatenate([random_weight(4, 32, 16), random_weight(4, 32, 16, "zeros")])
    with pytest.raises(ValueError, match=r"weights\[1\]: got .*nf4.* want .*e2m1"):
        concatenate([random_weight(4, 32, 16, "e2m1"), random_weight(4, 32, 16, "nf4")])
    with pytest.raises(ValueError, match="weights: got an empty sequence"):
        concatenate([])


def test_concatenate_takes_one_permutation() -> None:
    order = torch.arange(32, dtype=torch.int32)
    same = [random_weight(4, 32, 16, permutation=permutation) for permutation in (order, order, order.clone())]
    assert torch.equal(concatenate(same).dequantize(), torch.cat([weight.dequantize() for weight in same]))
    for other in (None, order.flip(0)):
        with pytest.raises(ValueError, match=r"weights\[1\]: got another permutation than weights\[0\]"):
            concatenate([same[0], random_weight(4, 32, 16, permutation=other)])


CODES = torch.zeros(4, 16, dtype=torch.uint8)
SCALES = torch.ones(4, 2)
ORDER = torch.arange(32, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"bits": 3}, ValueError, "bits: got 3, want 4 or 8"),
        ({"k": 0}, ValueError, "k: got 0, want at least 1"),
        ({"group_size": 24}, ValueError, "group_size: got 24, want one of"),
        ({"k": 40}, ValueError, r"codes: got shape \(4, 16\), want \(4, 20\)"),
        ({"group_size": 32}, ValueError, r"scales: got shape \(4, 2\), want \(4, 1\)"),
        ({"codes": CODES.int()}, TypeError, "codes: got torch.int32, want torch.uint8"),
        ({"codes": CODES[0]}, ValueError, "codes: got shape"),
        ({"scales": SCALES.double()}, TypeError, "scales: got torch.float64, want float16"),
        ({"zeros": SCALES}, TypeError, "zeros: got torch.float32, want torch.uint8"),
        ({"zeros": CODES[:, :1]}, ValueError, "zeros: got shape"),
        ({"offsets": SCALES.half()}, TypeError, "offsets: got torch.float16, want torch.float32"),
        ({"offsets": SCALES, "zeros": CODES[:, :2]}, ValueError, "zeros, offsets: got both"),
        ({"scales": SCALES.to("meta")}, ValueError, "scales: got device meta, want that of codes, cpu"),
        ({"encoding": "fp4"}, ValueError, "encoding: got 'fp4', want one of integer, e2m1, nf4"),
        ({"encoding": "nf4", "bits": 8}, ValueError, "bits: got 8, want 4 for the encoding 'nf4'"),
        ({"encoding": "e2m1", "offsets": SCALES}, ValueError, "zeros, offsets: got one, want none for the encoding"),
        ({"permutation": ORDER.long()}, TypeError, "permutation: got torch.int64, want torch.int32"),
        ({"permutation": ORDER[None]}, ValueError, r"permutation: got shape \(1, 32\), want \[stored_k\]"),
        ({"permutation": ORDER[:0]}, ValueError, r"permutation: got shape \(0,\), want \[stored_k\]"),
        ({"permutation": ORDER.to("meta")}, ValueError, "permutation: got device meta, want that of codes, cpu"),
        (
            {"permutation": ORDER + 1},
            ValueError,
            "permutation: got values from 1 to 32, want -1 or a column below k = 32",
        ),
        ({"permutation": ORDER - 2}, ValueError, "permutation: got values from -2 to 29"),
        ({"permutation": ORDER // 2}, ValueError, "permutation: got a column more than once"),
        ({"permutation": ORDER[:20]}, ValueError, r"codes: got shape \(4, 16\), want \(4, 10\) for k = 20"),
    ],
)
def test_refuses(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    valid = {"codes": CODES, "scales": SCALES, "k": 32, "group_size": 16}
    with pytest.raises(error, match=message):
        QuantizedWeight(**(valid | arguments))  # type: ignore[arg-type]


def test_row_methods_refuse() -> None:
    weight = random_weight(4, 32, 16)
    with pytest.raises(TypeError, match=r"index: got torch.float32 \(2,\), want an integer tensor"):
        weight.take_rows(torch.zeros(2))
    with pytest.raises(ValueError, match="start, stop: got 3, 5, want 0 <= start <= stop <= n = 4"):
        weight.narrow(3, 5)

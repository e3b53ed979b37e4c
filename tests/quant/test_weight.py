"""The canonical weight: what its fields mean, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from evenshare.quant import QuantizedWeight, concatenate, w4a16_matmul
from tests.quant.helpers import ZERO_FORMS, random_weight


def by_definition(weight: QuantizedWeight) -> torch.Tensor:
    """Element by element, from the docstring."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=torch.float32)
    for row in range(n):
        for column in range(k):
            if weight.bits == 4:
                q = int(weight.codes[row, column // 2]) >> (4 * (column % 2)) & 15
            else:
                q = int(weight.codes[row, column])
            group = column // weight.group_size
            scale = weight.scales[row, group].float()
            if weight.offsets is not None:
                out[row, column] = q * scale + weight.offsets[row, group].float()
            elif weight.zeros is not None:
                out[row, column] = (q - int(weight.zeros[row, group])) * scale
            else:
                out[row, column] = (q - (1 << (weight.bits - 1))) * scale
    return out


@pytest.mark.parametrize("zero_form", ZERO_FORMS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("k", "group_size"), [(32, 16), (33, 16), (20, 32), (21, 21), (40, -1)])
def test_dequantize_is_the_definition(k: int, group_size: int, bits: int, zero_form: str) -> None:
    weight = random_weight(3, k, group_size, zero_form, bits)
    assert torch.equal(weight.dequantize(), by_definition(weight))
    assert torch.equal(weight.dequantize(torch.float16), by_definition(weight).half())


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


@pytest.mark.parametrize("zero_form", ZERO_FORMS)
def test_rows(zero_form: str) -> None:
    weight = random_weight(10, 33, 16, zero_form)
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


def test_packed_forms_stay_with_their_weight() -> None:
    weight = random_weight(16, 32, 32)
    w4a16_matmul(torch.randn(1, 32), weight)
    assert weight.packed
    assert not weight.take_rows(torch.arange(16)).packed


def test_concatenate_refuses_another_form() -> None:
    with pytest.raises(ValueError, match=r"weights\[1\]: got .*zeros.* want .*symmetric"):
        concatenate([random_weight(4, 32, 16), random_weight(4, 32, 16, "zeros")])
    with pytest.raises(ValueError, match="weights: got an empty sequence"):
        concatenate([])


CODES = torch.zeros(4, 16, dtype=torch.uint8)
SCALES = torch.ones(4, 2)


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

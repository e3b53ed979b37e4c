"""The formats as a family: what holds for each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from evenshare.quant import QuantizedWeight, quantize, quantize_codebook
from evenshare.quant.formats.registry import FORMATS, find_format, format_named
from tests.quant.formats.helpers import make_weight

WRITERS = [form.name for form in FORMATS if form.describe is not None]


def test_names_are_unique() -> None:
    assert len({form.name for form in FORMATS}) == len(FORMATS)


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_writer_describes_is_found_again(name: str) -> None:
    form = format_named(name)
    weight = make_weight(8, 64, 64, encoding="nf4" if name == "bitsandbytes" else "integer")
    assert form.describe is not None
    assert find_format(form.describe({"layer": weight}, [])) is form


@pytest.mark.parametrize("name", WRITERS)
def test_names_of_written_tensors_are_the_formats(name: str) -> None:
    form = format_named(name)
    weight = make_weight(8, 64, 64, encoding="nf4" if name == "bitsandbytes" else "integer")
    written = set(form.write(weight))
    assert set(form.required) <= written <= {*form.required, *form.optional}


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("gptq", quantize),
        ("awq", lambda dense: quantize(dense, symmetric=False)),
        ("compressed-tensors", lambda dense: quantize_codebook(dense, "nvfp4")),
        ("compressed-tensors", lambda dense: quantize_codebook(dense, "mxfp4")),
        ("hqq", lambda dense: quantize(dense, symmetric=False, zero_points="float")),
        ("bitsandbytes", lambda dense: quantize_codebook(dense, "nf4")),
    ],
)
def test_a_shape_is_judged_without_data(name: str, make: Callable[[torch.Tensor], QuantizedWeight]) -> None:
    assert format_named(name).refusal(make(torch.randn(16, 256)).to("meta")) is None
    assert format_named(name).refusal(make(torch.randn(15, 257)).to("meta")) is not None


@pytest.mark.parametrize("table", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("refine", [False, True])
def test_quantised_weights_fit(table: str, refine: bool) -> None:
    weight = quantize_codebook(torch.randn(40, 256), table, refine=refine)
    form = format_named("compressed-tensors")
    assert torch.equal(form.read(form.write(weight), {}).dequantize(), weight.dequantize())

"""Quantisation to tables of numbers: the nearest number, and scales that each format can hold."""

from __future__ import annotations

import pytest
import torch

from evenshare.quant import quantize_codebook
from evenshare.quant.codebook import TABLES
from evenshare.quant.encodings import CODEBOOKS, NF4
from tests.quant.test_refine import group_errors, heavy_tailed


@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("k", [64, 50])
def test_codes_are_the_nearest(table: str, k: int, refine: bool) -> None:
    dense = torch.cat((torch.randn(6, k), heavy_tailed(6, k), torch.zeros(1, k)))
    weight = quantize_codebook(dense, table, refine=refine)
    scale = weight.scales.double().repeat_interleave(weight.group_size, 1)[:, :k, None]
    nearest = (torch.tensor(CODEBOOKS[weight.encoding], dtype=torch.float64) * scale - dense[..., None]).abs().amin(-1)
    error = (weight.dequantize().double() - dense).abs()
    # A value at the middle between two numbers may go to either; the quotient that decides is rounded to float32.
    torch.testing.assert_close(
        error, nearest, rtol=0, atol=4 * torch.finfo(torch.float32).eps * float(dense.abs().max())
    )
    assert (weight.dequantize()[-1] == 0).all()
    assert (weight.group_size, weight.shape) == (TABLES[table].group_size, (13, k))


@pytest.mark.parametrize("refine", [False, True])
def test_scales_are_the_formats_own(refine: bool) -> None:
    dense = torch.randn(8, 64) * torch.logspace(-3, 3, 8)[:, None]
    mxfp4, nvfp4, nf4 = (quantize_codebook(dense, table, refine=refine).scales for table in ("mxfp4", "nvfp4", "nf4"))
    assert (torch.frexp(mxfp4).mantissa == 0.5).all()
    e4m3 = nvfp4 * (6 * 448 / dense.abs().max())
    # A float32 quotient times its divisor is within two roundings of the number that was divided.
    torch.testing.assert_close(e4m3.to(torch.float8_e4m3fn).float(), e4m3, rtol=2.5e-7, atol=0)
    if not refine:
        assert torch.equal(nf4[:, 0], dense.abs().amax(1))


def test_numbers_of_a_table_are_kept() -> None:
    e2m1 = torch.tensor(CODEBOOKS["e2m1"]).repeat(2, 2) * torch.tensor([[0.25], [4.0]])
    for table in ("mxfp4", "nvfp4"):
        assert torch.equal(quantize_codebook(e2m1, table).dequantize(), e2m1)
    nf4 = torch.tensor(NF4).repeat(2, 4) * torch.tensor([[0.5], [2.0]])
    assert torch.equal(quantize_codebook(nf4, "nf4").dequantize(), nf4)


# Squared error against the usual scale; measured 0.94, 0.78, 0.89 (normal) and 0.94, 0.85, 0.92 (heavy-tailed).
@pytest.mark.parametrize(("table", "factor"), [("mxfp4", 0.96), ("nvfp4", 0.88), ("nf4", 0.94)])
@pytest.mark.parametrize("heavy", [False, True])
def test_refined_scales(table: str, factor: float, heavy: bool) -> None:
    dense = heavy_tailed(64, 512) if heavy else torch.randn(64, 512)
    plain, refined = (group_errors(quantize_codebook(dense, table, refine=r), dense) for r in (False, True))
    assert (refined <= plain * (1 + 1e-5)).all()
    assert refined.sum() < factor * plain.sum()


@pytest.mark.parametrize("table", TABLES)
def test_a_shape_without_data(table: str) -> None:
    dense = torch.randn(6, 50)
    outline, weight = (quantize_codebook(d, table, refine=True) for d in (dense.to("meta"), dense))
    assert (outline.device.type, outline.codes.shape, outline.scales.shape) == (
        "meta",
        weight.codes.shape,
        weight.scales.shape,
    )


def test_no_rows() -> None:
    assert quantize_codebook(torch.empty(0, 64), "nvfp4").shape == (0, 64)


@pytest.mark.parametrize(
    ("weight", "table", "error", "message"),
    [
        (torch.zeros(4, 32), "fp4", ValueError, "table: got 'fp4', want one of mxfp4, nvfp4, nf4"),
        (torch.zeros(4, 32, dtype=torch.int8), "nf4", TypeError, "weight: got torch.int8, want a floating-point"),
        (torch.zeros(32), "nf4", ValueError, r"weight: got shape \(32,\), want \[n, k\]"),
        (torch.full((4, 32), float("inf")), "nf4", ValueError, "weight: got values that are not finite"),
    ],
)
def test_refuses(weight: torch.Tensor, table: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize_codebook(weight, table)

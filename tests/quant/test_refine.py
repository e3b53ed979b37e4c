"""Refined levels: never worse than those that cover the range, and better by what was measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evenshare.quant import QuantizedWeight, chunks, quantize, quantize_codebook
from evenshare.quant.levels import Form, Levels
from evenshare.quant.refine import _fit

FORMS: dict[str, dict[str, Any]] = {
    "symmetric": {},
    "zeros": {"symmetric": False},
    "offsets": {"symmetric": False, "zero_points": "float"},
}


def heavy_tailed(n: int, k: int) -> torch.Tensor:
    """Student's t with 4 degrees of freedom."""
    return torch.randn(n, k) / (torch.randn(n, k, 4).square().mean(-1).sqrt() + 1e-3)


def group_errors(weight: QuantizedWeight, dense: torch.Tensor) -> torch.Tensor:
    """Squared error of each group, float64 [n, num_groups]."""
    error = (weight.dequantize().double() - dense.double()).square()
    error = torch.nn.functional.pad(error, (0, weight.num_groups * weight.group_size - weight.k))
    return error.unflatten(1, (weight.num_groups, -1)).sum(-1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("bits", "k", "group_size"), [(4, 256, 64), (4, 50, 16), (8, 96, 32), (4, 33, -1)])
def test_no_group_is_worse(form: str, scale_dtype: torch.dtype, bits: int, k: int, group_size: int) -> None:
    dense = torch.cat((torch.randn(16, k), heavy_tailed(16, k), torch.rand(16, k) + 1, torch.zeros(1, k)))
    dense[0, :16], dense[1, :16] = 0.0, 0.75
    plain, refined = (
        quantize(dense, group_size, bits=bits, scale_dtype=scale_dtype, refine=refine, **FORMS[form])
        for refine in (False, True)
    )
    # The errors are compared in float32 sums of at most 64 squares of differences, themselves rounded.
    slack = 64 * torch.finfo(torch.float32).eps * dense.square().amax()
    assert (group_errors(refined, dense) <= group_errors(plain, dense) * (1 + 1e-5) + slack**2).all()
    assert refined.scales.dtype == scale_dtype
    assert torch.equal(plain.dequantize()[-1], refined.dequantize()[-1])


# Squared error against plain rounding at group 128; measured 0.68, 0.90, 0.86 and 0.67, 0.90, 0.85.
@pytest.mark.parametrize(("form", "factor"), [("symmetric", 0.70), ("zeros", 0.92), ("offsets", 0.88)])
@pytest.mark.parametrize("draw", [torch.randn, heavy_tailed])
def test_error_falls(draw: Any, form: str, factor: float) -> None:
    dense = draw(64, 1024)
    plain, refined = (group_errors(quantize(dense, 128, refine=r, **FORMS[form]), dense).sum() for r in (False, True))
    assert refined < factor * plain


@pytest.mark.parametrize("form", [Form.SYMMETRIC, Form.OFFSETS])
def test_fit_is_least_squares(form: Form) -> None:
    """Against torch's solver in float64, group by group."""
    values, codes = torch.randn(3, 2, 48), torch.randint(0, 16, (3, 2, 48)).float()
    start = Levels(torch.ones(3, 2, 1), torch.full((3, 2, 1), 8.0))
    found = _fit(values, codes, start, 4, form)
    one_column = form is Form.SYMMETRIC
    for row in range(3):
        for group in range(2):
            q = codes[row, group].double()
            columns = (q - 8)[:, None] if one_column else torch.stack((q, torch.ones(48)), 1)
            want = torch.linalg.lstsq(columns, values[row, group].double()[:, None]).solution.flatten()
            got = [found.scale[row, group, 0], found.shift[row, group, 0]][: len(want)]
            torch.testing.assert_close(torch.stack(got).double(), want, rtol=1e-4, atol=1e-5)


def test_one_sided_groups_want_float_zero_points() -> None:
    dense = torch.rand(8, 64) + 10
    integer, real = (
        quantize(dense, 64, symmetric=False, zero_points=zero, refine=True) for zero in ("integer", "float")
    )
    assert group_errors(real, dense).sum() < 0.05 * group_errors(integer, dense).sum()


@pytest.mark.parametrize("form", FORMS)
def test_chunks_do_not_show(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, seen = torch.randn(37, 64), []
    whole = quantize(dense, 32, refine=True, **FORMS[form])
    monkeypatch.setattr(chunks, "CPU_ELEMENTS", 10 * 64)
    parts = quantize(dense, 32, refine=True, progress=lambda done, n: seen.append((done, n)), **FORMS[form])
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.scales, parts.scales)
    assert seen == [(10, 37), (20, 37), (30, 37), (37, 37)]


def test_threads_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is the caller's again, also after an error; inference mode and gradients are the caller's all along."""
    monkeypatch.setattr(chunks, "CPU_ELEMENTS", 256)
    threads = torch.get_num_threads()
    with torch.inference_mode():
        assert quantize(torch.randn(64, 64), 32, refine=True).codes.is_inference()
    parameter = torch.nn.Parameter(torch.randn(64, 64))
    assert not quantize(parameter, 32, refine=True).scales.requires_grad
    assert not quantize_codebook(parameter, "nf4").scales.requires_grad
    with pytest.raises(ValueError, match="got a group of range nan"):
        quantize(torch.full((64, 64), float("nan")), 32)
    assert torch.get_num_threads() == threads


def test_meta_tensors_give_the_shape() -> None:
    weight = quantize(torch.empty(8, 64, device="meta"), 32, symmetric=False, refine=True)
    assert weight.device.type == "meta"
    assert weight.zeros is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"zero_points": "half", "symmetric": False}, "zero_points: got 'half', want 'integer' or 'float'"),
        ({"zero_points": "float"}, "zero_points: got 'float' of a symmetric weight, want symmetric=False"),
    ],
)
def test_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(torch.zeros(4, 32), 16, **arguments)


@pytest.mark.parametrize("function", [quantize, lambda weight: quantize_codebook(weight, "nf4")])
def test_wants_a_tensor(function: Any) -> None:
    with pytest.raises(TypeError, match="weight: got list, want a tensor"):
        function([1.0])

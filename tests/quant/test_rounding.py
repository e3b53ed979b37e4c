"""Round to nearest: no code is further from its weight than half a step."""

from __future__ import annotations

import pytest
import torch

from evenshare.quant import quantize


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("k", "group_size"), [(64, 16), (64, 64), (50, 16), (33, -1), (20, 32)])
def test_error_is_at_most_half_a_step(k: int, group_size: int, bits: int, symmetric: bool) -> None:
    dense = torch.randn(8, k) + 0.5
    weight = quantize(dense, group_size, bits=bits, symmetric=symmetric, scale_dtype=torch.float32)
    step = weight.scales.repeat_interleave(weight.group_size, 1)[:, :k]
    # An asymmetric range cut at a rounded zero point misses its far end by half a step more.
    limit = 0.5 if symmetric else 1.0
    assert ((weight.dequantize() - dense).abs() <= step * limit * (1 + 1e-5)).all()
    assert weight.shape == dense.shape


def test_codes_are_the_nearest_for_the_rounded_scale() -> None:
    dense = torch.randn(4, 32)
    weight = quantize(dense, 32)
    scale = weight.scales.float()
    candidates = (torch.arange(16) - 8) * scale[..., None]  # [n, 1, 16]
    best = (candidates - dense[..., None]).abs().amin(-1)
    assert torch.allclose((weight.dequantize() - dense).abs(), best, atol=1e-7)


def test_values_on_the_grid_are_kept() -> None:
    grid = torch.arange(-7, 8).repeat(3, 2)[:, :16] * torch.tensor([[1.0], [0.25], [8.0]])
    assert torch.equal(quantize(grid, 16).dequantize(), grid)
    unsigned = torch.arange(16).repeat(2, 1) * torch.tensor([[0.5], [2.0]])
    assert torch.equal(quantize(unsigned, 16, symmetric=False).dequantize(), unsigned)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_stay_zero(symmetric: bool) -> None:
    dense = torch.randn(4, 64)
    dense[:, 16:32] = 0
    dense[0, 0] = 0
    got = quantize(dense, 16, symmetric=symmetric).dequantize()
    assert (got[:, 16:32] == 0).all()
    assert got[0, 0] == 0


def test_no_rows() -> None:
    assert quantize(torch.empty(0, 32), 16).shape == (0, 32)


@pytest.mark.parametrize(
    ("weight", "arguments", "error", "message"),
    [
        (torch.zeros(4, 32, dtype=torch.int32), {}, TypeError, "weight: got torch.int32, want a floating-point tensor"),
        (torch.zeros(32), {}, ValueError, r"weight: got shape \(32,\), want \[n, k\]"),
        (torch.zeros(4, 32), {"group_size": 20}, ValueError, "group_size: got 20"),
        (torch.zeros(4, 32), {"bits": 5}, ValueError, "bits: got 5, want 4 or 8"),
        (torch.zeros(4, 32), {"scale_dtype": torch.float64}, TypeError, "scale_dtype: got torch.float64"),
        (torch.full((4, 32), 1e6), {}, ValueError, "weight: got a group of range .* want finite values"),
        (torch.full((4, 32), float("nan")), {}, ValueError, "weight: got a group of range nan"),
    ],
)
def test_refuses(weight: torch.Tensor, arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize(weight, **({"group_size": 16} | arguments))  # type: ignore[arg-type]

"""Results that are computed in fp32 and rounded once, against a float64 oracle."""

from __future__ import annotations

import torch


def assert_rounded_once(got: torch.Tensor, want: torch.Tensor, largest: float | None = None) -> None:
    """Half a unit in the last place of each value for the rounding, and 32 fp32 roundings of the largest intermediate."""
    assert got.shape == want.shape
    assert not torch.isnan(got).any(), "NaN in the result"
    want = want.to(got.device)
    largest = float(want.abs().max()) if largest is None and want.numel() else largest or 0.0
    half_ulp = torch.finfo(got.dtype).eps / 2 * want.abs() + torch.finfo(got.dtype).smallest_normal
    budget = half_ulp * 1.01 + 32 * torch.finfo(torch.float32).eps * max(largest, 1.0)
    error = (got.double() - want).abs()
    assert (error <= budget).all(), f"{float((error - budget).max())} over the budget"


def dtypes_of(place: tuple[torch.device, str]) -> tuple[torch.dtype, ...]:
    """bf16 is wrong in the interpreter."""
    device, backend = place
    interpreted = (device.type, backend) == ("cpu", "triton")
    return (torch.float32, torch.float16) if interpreted else (torch.float32, torch.float16, torch.bfloat16)

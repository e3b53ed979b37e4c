"""Device activations against torch's in float64, and one set of names on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from evenshare.device import activations, epilogue


@triton.jit
def apply(x_ptr, y_ptr, n, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    y = ACTIVATION(tl.load(x_ptr + i, mask=i < n, other=0.0))
    tl.store(y_ptr + i, y, mask=i < n)


def applied(x: torch.Tensor, name: str | None) -> torch.Tensor:
    y = torch.empty_like(x)
    block = triton.next_power_of_2(x.numel())
    apply[(1,)](x, y, x.numel(), ACTIVATION=epilogue.get_activation(name), BLOCK=block)
    return y


def test_the_same_names_in_torch_and_on_the_device() -> None:
    assert list(epilogue.ACTIVATIONS) == list(activations.ACTIVATIONS)


@pytest.mark.parametrize("name", list(activations.ACTIVATIONS))
def test_values(name: str | None, device: torch.device) -> None:
    x = torch.cat((torch.linspace(-30, 30, 241), torch.tensor([-1e4, 1e4, 1e-30, -1e-30]))).to(device)
    want = activations.get_activation(name)(x.double())
    error = (applied(x, name).double() - want).abs()
    # Each formula multiplies x by a factor in [0, 1] that a few roundings leave within some eps of 1.
    assert (error <= 8 * torch.finfo(torch.float32).eps * x.double().abs()).all()


@pytest.mark.parametrize("name", list(activations.ACTIVATIONS))
def test_nan_stays_nan(name: str | None, device: torch.device) -> None:
    assert applied(torch.full((1,), float("nan"), device=device), name).isnan().all()


@pytest.mark.parametrize("module", [epilogue, activations])
def test_unknown_name(module: Any) -> None:
    with pytest.raises(ValueError, match="activation: got 'swish', want one of None, relu, gelu, gelu_tanh, silu"):
        module.get_activation("swish")

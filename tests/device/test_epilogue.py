"""Device activations against torch's in float64, and one set of names on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from evenshare.device import activations, epilogue

PLAIN = [name for name in activations.ACTIVATIONS if not activations.is_gated(name)]
GATED = [name for name in activations.ACTIVATIONS if activations.is_gated(name)]


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


@pytest.mark.parametrize("name", PLAIN)
def test_values(name: str | None, device: torch.device) -> None:
    x = torch.cat((torch.linspace(-30, 30, 241), torch.tensor([-1e4, 1e4, 1e-30, -1e-30]))).to(device)
    want = activations.get_activation(name)(x.double())
    error = (applied(x, name).double() - want).abs()
    # Each formula multiplies x by a factor in [0, 1] that a few roundings leave within some eps of 1.
    assert (error <= 8 * torch.finfo(torch.float32).eps * x.double().abs()).all()


@pytest.mark.parametrize("name", PLAIN)
def test_nan_stays_nan(name: str | None, device: torch.device) -> None:
    assert applied(torch.full((1,), float("nan"), device=device), name).isnan().all()


@pytest.mark.parametrize("name", GATED)
def test_gated_names_are_of_the_gate(name: str) -> None:
    plain = name.removesuffix("_and_multiply")
    assert epilogue.get_activation(name) is epilogue.get_activation(plain)
    gate, up = torch.randn(2, 3, 4).double()
    y = activations.get_activation(name)(torch.cat((gate, up), dim=1))
    torch.testing.assert_close(y, activations.get_activation(plain)(gate) * up, rtol=1e-14, atol=0.0)


@triton.jit
def list_columns(out_ptr, n, BLOCK_N: tl.constexpr, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = tl.program_id(0)
    at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + at, epilogue.tile_columns(tile, n, BLOCK_N, GATED))


@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 30])
def test_tiles_of_gated_products_hold_both_columns(n: int, device: torch.device) -> None:
    tiles = -(-2 * n // 16)
    columns = torch.empty(tiles, 2, 8, dtype=torch.int32, device=device)
    list_columns[(tiles,)](columns, n, BLOCK_N=16, GATED=True)
    gate = torch.arange(tiles * 8, device=device)
    assert torch.equal(columns[:, 0].flatten(), gate.int())
    assert torch.equal(columns[:, 1].flatten(), (gate + n).int())
    assert columns[:, 0].max() >= n - 1


@pytest.mark.parametrize("module", [epilogue, activations])
def test_unknown_name(module: Any) -> None:
    with pytest.raises(ValueError, match="activation: got 'swish', want one of None, relu, gelu, gelu_tanh, silu"):
        module.get_activation("swish")

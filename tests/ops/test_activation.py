"""Gated activations against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from evenshare.ops import activate_and_multiply
from tests.ops.helpers import assert_rounded_once, dtypes_of

Place = tuple[torch.device, str]
ORACLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda y: y / (1 + torch.exp(-y)),
    "gelu": lambda y: y * 0.5 * torch.erfc(-y / 2**0.5),
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
}


def oracle(x: torch.Tensor, name: str) -> torch.Tensor:
    gate, up = x.double().chunk(2, -1)
    return ORACLES[name](gate) * up


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("shape", [(3, 64), (1, 2), (5, 3, 34), (2, 3, 2, 8), (18,), (2, 2600)], ids=str)
def test_against_float64(place: Place, shape: tuple[int, ...], name: str) -> None:
    device, backend = place
    for dtype in dtypes_of(place):
        x = (torch.randn(shape, device=device) * 3).to(dtype)
        got = activate_and_multiply(x, name, backend=backend)
        assert got.dtype == dtype
        assert_rounded_once(got, oracle(x, name), largest=float(x.double().square().max()))


def test_extreme_values(place: Place) -> None:
    device, backend = place
    x = torch.tensor([[-1e4, -90.0, 1e4, 0.0, 2.0, 2.0, 2.0, float("inf")]], device=device)
    for name in ORACLES:
        got = activate_and_multiply(x, name, backend=backend)
        assert got[0, 0] == 0
        assert abs(float(got[0, 1])) < 1e-30
        assert float(got[0, 2]) == 2e4
        assert torch.isnan(got[0, 3])  # 0 * inf


def test_any_strides_and_in_place(place: Place) -> None:
    device, backend = place
    wide = torch.randn(4, 6, 40, device=device)
    for x in (wide[::2, 1:4, 3:35], wide.transpose(0, 1)[..., ::4], wide[:1].expand(5, 6, 40)):
        out = torch.full((x.shape[-1] // 2, x.shape[1], x.shape[0]), float("nan"), device=device).permute(2, 1, 0)
        activate_and_multiply(x, "silu", out=out, backend=backend)
        assert_rounded_once(out, oracle(x, "silu"), largest=20.0)
    x = wide.clone()
    activate_and_multiply(x, "gelu", out=x[..., :20], backend=backend)
    assert_rounded_once(x[..., :20], oracle(wide, "gelu"), largest=20.0)
    assert torch.equal(x[..., 20:], wide[..., 20:])
    out = torch.empty(3, 2, 4, 20, device=device).permute(2, 1, 0, 3)
    x = torch.randn(4, 2, 3, 40, device=device)
    assert activate_and_multiply(x, "gelu", out=out, backend=backend) is out
    assert_rounded_once(out, oracle(x, "gelu"), largest=20.0)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8)])
def test_empty(place: Place, shape: tuple[int, ...]) -> None:
    device, backend = place
    got = activate_and_multiply(torch.ones(shape, device=device), "silu", backend=backend)
    assert got.shape == (*shape[:-1], shape[-1] // 2)


X = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: activate_and_multiply(3, "silu"), TypeError, "x: got int, want a tensor"),
        (
            lambda: activate_and_multiply(X, "relu"),
            ValueError,
            "activation: got 'relu', want one of silu, gelu, gelu_tanh",
        ),
        (lambda: activate_and_multiply(X[:, :7], "silu"), ValueError, "x: got 7 columns, want an even number"),
        (lambda: activate_and_multiply(X, "silu", out=X), ValueError, r"out: got shape \(2, 8\), want \(2, 4\)"),
    ],
)
def test_errors_name_the_argument(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()

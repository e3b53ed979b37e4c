"""Rotary embedding against complex multiplication in float64: every position exact, strides, in place, tables, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from evenshare.ops import RopeScaling, apply_rope, apply_rope_with_cos_sin_cache
from evenshare.ops.rope import token_requests
from tests.ops.helpers import assert_rounded_once, dtypes_of

Place = tuple[torch.device, str]
POSITIONS = [0, 1, 17, 4095, 131071, 2**30, 3, 999_983]


def angles(positions: torch.Tensor, rotary_dim: int, scale: float = 1.0, theta: float = 1e4,
           scaling: RopeScaling | None = None) -> torch.Tensor:  # fmt: skip
    """float64 [n, rotary_dim / 2], one frequency after the other."""
    radians = []
    for i in range(rotary_dim // 2):
        plain = theta ** (-2 * i / rotary_dim)
        frequency = plain / scale
        if scaling is not None:
            wavelength = 2 * math.pi / plain
            if wavelength < scaling.old_context_len / scaling.high_freq_factor:
                frequency = plain
            elif wavelength <= scaling.old_context_len / scaling.low_freq_factor:
                share = (scaling.old_context_len / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                frequency = (1 - share) * plain / scale + share * plain
        radians.append(positions.double() * frequency)
    return torch.stack(radians, -1)


def turn(x: torch.Tensor, radians: torch.Tensor, interleave: bool) -> torch.Tensor:
    """Pairs as complex numbers times e^(i angle)."""
    rotary_dim = 2 * radians.shape[-1]
    out = x.double().clone()
    first, second = (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)) if interleave else (
        slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim))  # fmt: skip
    z = torch.complex(out[..., first], out[..., second]) * torch.polar(torch.ones_like(radians), radians)[:, None]
    out[..., first], out[..., second] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (64, 32), (80, 80), (24, 6), (2, 2), (8, 0)])
def test_against_complex_multiplication(place: Place, dim: int, rotary_dim: int, interleave: bool) -> None:
    device, backend = place
    positions = torch.tensor(POSITIONS, device=device)
    for dtype in dtypes_of(place):
        q, k = (torch.randn(len(POSITIONS), heads, dim, device=device).to(dtype) for heads in (3, 1))
        got = apply_rope(q, k, positions, rotary_dim=rotary_dim, interleave=interleave, backend=backend)
        if rotary_dim == 0:
            assert torch.equal(got[0], q)
            continue
        # In float64 an angle of 2^30 radians is exact to 1e-7.
        radians = angles(positions, rotary_dim)
        for x, g in zip((q, k), got, strict=True):
            assert g.dtype == dtype
            assert_rounded_once(g, turn(x, radians, interleave), largest=8.0)
            assert torch.equal(g[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize(
    "options",
    [
        {"rope_scale": 4.0},
        {"rope_scale": 0.1, "rope_theta": 5e5},
        {"rope_scale": 8.0, "rope_theta": 5e5, "scaling": RopeScaling()},
        {"rope_scale": 3.0, "rope_theta": 1e4, "scaling": RopeScaling(0.5, 16.0, 512)},
    ],
    ids=str,
)
def test_scales(place: Place, options: dict[str, Any]) -> None:
    device, backend = place
    q, k = torch.randn(5, 4, 32, device=device), torch.randn(5, 2, 32, device=device)
    positions = torch.tensor([0, 3, 700, 8191, 100_000], dtype=torch.int32, device=device)
    got = apply_rope(q, k, positions, backend=backend, **options)
    names = {"rope_scale": "scale", "rope_theta": "theta", "scaling": "scaling"}
    radians = angles(positions, 32, **{names[name]: value for name, value in options.items()})
    for x, g in zip((q, k), got, strict=True):
        assert_rounded_once(g, turn(x, radians, False), largest=8.0)


@pytest.mark.parametrize("interleave", [False, True])
def test_strides_and_in_place(place: Place, interleave: bool) -> None:
    """q and k sliced from a fused projection and rotated where they lie; strided positions; nothing else is touched."""
    device, backend = place
    fused = torch.randn(6, 4 + 2 + 2, 16, device=device)
    before = fused.clone()
    positions = torch.tensor([[5, 0], [9, 0], [2, 0]], device=device)[:, 0]
    q, k = fused[::2, :4], fused[::2, 4:6]
    got = apply_rope(q, k, positions, rotary_dim=8, interleave=interleave, q_out=q, k_out=k, backend=backend)
    assert got[0] is q
    assert_rounded_once(fused[::2, :6], turn(before[::2, :6], angles(positions, 8), interleave), largest=8.0)
    assert torch.equal(fused[1::2], before[1::2])
    assert torch.equal(fused[:, 6:], before[:, 6:])
    q, k = (torch.randn(16, heads, 3, device=device).permute(2, 1, 0) for heads in (4, 1))
    out = apply_rope(q, k, positions, interleave=interleave, q_out=torch.empty_like(q), backend=backend)[0]
    assert_rounded_once(out, turn(q, angles(positions, 16), interleave), largest=8.0)


@pytest.mark.parametrize("interleave", [False, True])
def test_cos_sin_cache(place: Place, interleave: bool) -> None:
    device, backend = place
    q, k = torch.randn(5, 3, 16, device=device), torch.randn(5, 1, 16, device=device)
    radians = angles(torch.arange(20), 12).to(device)
    table = torch.cat((radians.cos(), radians.sin()), -1).float()
    positions = torch.tensor([0, 19, 7, -1, 20], device=device)
    got = apply_rope_with_cos_sin_cache(q, k, positions, table, interleave=interleave, backend=backend)
    for x, g in zip((q, k), got, strict=True):
        assert_rounded_once(g[:3], turn(x[:3], radians[positions[:3]], interleave), largest=8.0)
        assert torch.equal(g[3:], x[3:])  # no such position
    strided = torch.stack((table, table), -1)[..., 0]
    again = apply_rope_with_cos_sin_cache(q, k, positions, strided, interleave=interleave, backend=backend)
    assert torch.equal(again[0], got[0])


def test_empty(place: Place) -> None:
    device, backend = place
    q, none = torch.randn(2, 3, 8, device=device), torch.empty(0, 3, 8, device=device)
    no_heads = torch.empty(2, 0, 8, device=device)
    nowhere, at = torch.empty(0, dtype=torch.int32, device=device), torch.tensor([1, 2], device=device)
    assert apply_rope(none, none, nowhere, backend=backend)[0].shape == (0, 3, 8)
    out, rotated = apply_rope(no_heads, q, at, backend=backend)
    assert out.shape == (2, 0, 8)
    assert_rounded_once(rotated, turn(q, angles(at, 8), False), largest=8.0)
    empty_table = torch.empty(0, 8, device=device)
    assert torch.equal(apply_rope_with_cos_sin_cache(q, q, at, empty_table, backend=backend)[0], q)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_token_requests(dtype: torch.dtype) -> None:
    request, place = token_requests(torch.tensor([1, 3, 3, 6], dtype=dtype), 8)
    assert request.tolist() == [-1, 0, 0, 2, 2, 2, -1, -1]
    assert place.tolist() == [-1, 0, 1, 0, 1, 2, -1, -1]
    assert token_requests(torch.tensor([0], dtype=dtype), 2)[0].tolist() == [-1, -1]


Q, AT = torch.ones(2, 3, 8), torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: apply_rope(None, Q, AT), TypeError, "q: got NoneType, want a tensor"),
        (lambda: apply_rope(Q[0], Q, AT), ValueError, r"q: got shape \(3, 8\), want \[tokens, heads, head_dim\]"),
        (lambda: apply_rope(Q, Q[:1], AT), ValueError, r"k: got shape \(1, 3, 8\), want \(2, 3, 8\)"),
        (lambda: apply_rope(Q, Q.half(), AT), TypeError, "k: got dtype torch.float16, want torch.float32, as q"),
        (lambda: apply_rope(Q, Q, AT.float()), TypeError, "positions: got dtype torch.float32, want int32 or int64"),
        (lambda: apply_rope(Q, Q, AT[:1]), ValueError, r"positions: got shape \(1,\), want \[2\]"),
        (lambda: apply_rope(Q, Q, AT, rotary_dim=7), ValueError, "rotary_dim: got a rotary dim of 7, want an even"),
        (lambda: apply_rope(Q, Q, AT, rotary_dim=10), ValueError, "rotary_dim: got a rotary dim of 10"),
        (lambda: apply_rope(Q, Q, AT, rope_theta=0.0), ValueError, "rope_theta: got 0.0, want a finite number above 0"),
        (lambda: apply_rope(Q, Q, AT, q_out=Q[:1]), ValueError, r"q_out: got shape \(1, 3, 8\)"),
        (lambda: RopeScaling(4.0, 4.0), ValueError, "high_freq_factor: got 4.0, want more than low_freq_factor 4.0"),
        (lambda: apply_rope_with_cos_sin_cache(Q, Q, AT, Q), ValueError, r"cos_sin_cache: got shape \(2, 3, 8\)"),
        (lambda: apply_rope_with_cos_sin_cache(Q, Q, AT, AT[None]), TypeError, "cos_sin_cache: got dtype torch.int32"),
        (
            lambda: apply_rope_with_cos_sin_cache(Q, Q, AT, torch.ones(4, 10)),
            ValueError,
            "cos_sin_cache: got a rotary dim of 10",
        ),
    ],
)
def test_errors_name_the_argument(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
    assert (Q == 1).all()


@pytest.mark.gpu
def test_no_sync_and_graph_capture() -> None:
    q, k, at = (
        torch.randn(4, 2, 64, device="cuda"),
        torch.randn(4, 1, 64, device="cuda"),
        torch.arange(4, device="cuda"),
    )
    graph = torch.cuda.CUDAGraph()
    apply_rope(q, k, at, rope_theta=777.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        apply_rope(q, k, at, rope_theta=777.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph):
        out, _ = apply_rope(q, k, at, rope_theta=888.0)  # its frequencies are computed by the graph
    at += 5
    graph.replay()
    assert_rounded_once(out, turn(q, angles(at, 64, theta=888.0), False), largest=8.0)

"""RMSNorm, its fused and quantising forms, and LayerNorm against float64; strides, edges and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evenshare.ops import add_rms_norm, layer_norm, norm, rms_norm
from tests.ops.helpers import assert_rounded_once, dtypes_of

Place = tuple[torch.device, str]
SHAPES = [(3, 64), (1, 1), (5, 3, 48), (2, 3, 2, 8), (17,), (2, 200)]


def rms_oracle(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, offset: float = 0.0) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.double() + offset)


def layer_oracle(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    return scaled * weight.double() + bias.double()


@pytest.fixture(params=["one block", "several blocks"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "several blocks":
        monkeypatch.setattr(norm, "MAX_BLOCK_D", 16)
        norm._rms_launch.cache_clear()
        norm._layer_launch.cache_clear()


@pytest.fixture(autouse=True)
def _no_stale_launch() -> Any:
    yield
    norm._rms_launch.cache_clear()
    norm._layer_launch.cache_clear()


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(place: Place, shape: tuple[int, ...]) -> None:
    device, backend = place
    for dtype in dtypes_of(place):
        x, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[-1], device=device)
        for offset, eps in ((0.0, 1e-6), (1.0, 0.5)):
            got = rms_norm(x, weight, eps, weight_offset=offset, backend=backend)
            assert got.dtype == dtype
            assert_rounded_once(got, rms_oracle(x, weight, eps, offset))


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm(place: Place, shape: tuple[int, ...]) -> None:
    device, backend = place
    for dtype in dtypes_of(place):
        x, residual = torch.randn(2, *shape, device=device).to(dtype)
        weight = torch.randn(shape[-1], device=device).to(dtype)
        total = x.double() + residual.double()
        for out in (None, x):
            kept = residual.clone()
            got = add_rms_norm(x, kept, weight, out=out, weight_offset=1.0, backend=backend)
            assert out is None or got is x
            # The norm takes the sum as it is, which only double rounding of the residual could show.
            assert_rounded_once(got, rms_oracle(total, weight, offset=1.0))
            assert_rounded_once(kept, total)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(place: Place, shape: tuple[int, ...]) -> None:
    device, backend = place
    for dtype in dtypes_of(place):
        x = (torch.randn(shape, device=device) + 3).to(dtype)
        weight, bias = torch.randn(2, shape[-1], device=device)
        assert_rounded_once(layer_norm(x, weight, bias, backend=backend), layer_oracle(x, weight, bias), largest=20.0)


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
def test_codes_of_a_scale(place: Place, fp8: torch.dtype, with_residual: bool) -> None:
    device, backend = place
    if (device.type, backend) == ("cpu", "triton"):
        # The interpreter rounds fp8 wrongly, so the codes are exact, some of them over the top.
        x = torch.randint(0, 2, (4, 64)).half() * 2 - 1
        weight = torch.tensor([2.0**i for i in range(-6, 10)]).half().repeat(4) * 0.25
    else:
        x, weight = torch.randn(4, 64, device=device).half(), torch.randn(64, device=device).half()
    residual = x.flip(0) * 0 if with_residual else None
    want = rms_oracle(x, weight, eps=0.0)
    for scale in (0.0625, torch.full((1,), 2.0**-10, device=device)):  # the second one overflows the type
        out = torch.empty_like(x, dtype=fp8)
        options = {"scale": scale, "out": out, "backend": backend}
        if residual is None:
            assert rms_norm(x, weight, 0.0, **options) is out
        else:
            add_rms_norm(x, residual.clone(), weight, 0.0, **options)
        value = (want / float(scale)).clamp(-torch.finfo(fp8).max, torch.finfo(fp8).max)
        error = (out.double() - value).abs()
        assert (error <= torch.finfo(fp8).eps / 2 * value.abs() * 1.001 + torch.finfo(fp8).smallest_normal).all()


def test_any_strides(place: Place) -> None:
    device, backend = place
    fused = torch.randn(6, 5, 80, device=device)
    weight = torch.randn(2, 32, device=device)
    for x in (fused[::2, 1:3, 5:69:2], fused.transpose(0, 1)[..., :32], fused[:1, :1, :32].expand(3, 4, 32)):
        out = torch.full((x.shape[1], 32, x.shape[0]), float("nan"), device=device).permute(2, 0, 1)
        rms_norm(x, weight.T.contiguous().T[1], out=out, backend=backend)
        assert_rounded_once(out, rms_oracle(x, weight[1]))
        layer_norm(x, weight[0], weight[1], out=out, backend=backend)
        assert_rounded_once(out, layer_oracle(x, weight[0], weight[1]), largest=10.0)
    residual = torch.randn(2, 3, 80, device=device)[:, :, 3:35]
    x, before = residual.clone(), residual.clone()
    add_rms_norm(x, residual, weight[0], out=x, backend=backend)
    assert_rounded_once(residual, before.double() * 2)
    # Four dimensions that do not fold without a copy: the residual is written all the same.
    residual = torch.randn(3, 2, 4, 32, device=device).permute(2, 1, 0, 3)
    x, before = residual.clone(), residual.clone()
    got = add_rms_norm(x, residual, weight[0], out=torch.empty_like(before), backend=backend)
    assert_rounded_once(residual, before.double() * 2)
    assert_rounded_once(got, rms_oracle(before * 2, weight[0]))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8)])
def test_empty(place: Place, shape: tuple[int, ...]) -> None:
    device, backend = place
    x, weight = torch.ones(shape, device=device), torch.ones(shape[-1], device=device)
    assert rms_norm(x, weight, backend=backend).shape == shape
    assert add_rms_norm(x, x.clone(), weight, backend=backend).shape == shape
    assert layer_norm(x, weight, weight, backend=backend).shape == shape


X, W = torch.ones(2, 8), torch.ones(8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: rms_norm([1], W), TypeError, "x: got list, want a tensor"),
        (lambda: rms_norm(X.long(), W), TypeError, "x: got dtype torch.int64, want one of"),
        (lambda: rms_norm(X[0, 0], W), ValueError, r"x: got shape \(\)"),
        (lambda: rms_norm(X, torch.ones(7)), ValueError, r"weight: got shape \(7,\), want \(8,\)"),
        (lambda: rms_norm(X, W, out=torch.ones(2, 7)), ValueError, r"out: got shape \(2, 7\), want \(2, 8\)"),
        (lambda: rms_norm(X, W, out=X.half()), TypeError, "out: got dtype torch.float16, want torch.float32"),
        (lambda: rms_norm(X, W, scale=1.0), ValueError, "scale: got a scale for an out of torch.float32"),
        (
            lambda: rms_norm(X, W, scale=0.0, out=X.to(torch.float8_e4m3fn)),
            ValueError,
            "scale: got 0.0, want a number above 0",
        ),
        (lambda: rms_norm(X, W, scale="a", out=X.to(torch.float8_e4m3fn)), TypeError, "scale: got str"),
        (
            lambda: rms_norm(X, W, scale=W, out=X.to(torch.float8_e4m3fn)),
            ValueError,
            r"scale: got torch.float32 \(8,\)",
        ),
        (lambda: rms_norm(X, W, out=X.to(torch.float8_e4m3fn)), TypeError, "out: got dtype torch.float8_e4m3fn"),
        (lambda: add_rms_norm(X, torch.ones(1, 8), W), ValueError, r"residual: got shape \(1, 8\), want \(2, 8\)"),
        (
            lambda: add_rms_norm(X, X.half(), W),
            TypeError,
            "residual: got dtype torch.float16, want torch.float32, as x",
        ),
        (lambda: layer_norm(X, W, torch.ones(1)), ValueError, r"bias: got shape \(1,\), want \(8,\)"),
        (lambda: rms_norm(X, W, backend="x"), ValueError, "backend: got 'x'"),
    ],
)
def test_errors_name_the_argument(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
    assert (X == 1).all()


@pytest.mark.gpu
def test_offsets_past_32_bits() -> None:
    stride = 1 << 24
    storage = torch.zeros(stride * 160 + 64, dtype=torch.float16, device="cuda")
    x = storage.as_strided((161, 64), (stride, 1))
    x.copy_(torch.randn(161, 64))
    weight = torch.randn(64, device="cuda")
    want = rms_oracle(x, weight)
    assert_rounded_once(rms_norm(x, weight, out=x), want)

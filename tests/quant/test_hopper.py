"""The Hopper kernel of 4-bit products, on the CPU in `tests.emulator`: every form, group, tile and epilogue against float64."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from evenshare.device.target import Target
from evenshare.quant import QuantizedWeight, hopper, hopper_few, hopper_weight, launch, quantize
from evenshare.quant.encodings import CODEBOOKS
from evenshare.quant.kernels import hopper_few as few_kernels
from evenshare.quant.kernels import hopper_w4a16
from tests.emulator import Emulated

BF16, FP16 = torch.bfloat16, torch.float16
GATES = {"silu_and_multiply": F.silu, "gelu_and_multiply": F.gelu}
ACTIVATIONS = {None: lambda y: y, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}


@pytest.fixture(autouse=True, params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def _place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the kernel runs; tensors are made there."""
    if request.param == "gpu":
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("no Hopper GPU")
        with torch.device("cuda"):
            yield
        return
    monkeypatch.setattr(hopper_w4a16, "w4a16", Emulated(hopper_w4a16.w4a16))
    monkeypatch.setattr(few_kernels, "w4a16_few", Emulated(few_kernels.w4a16_few))
    monkeypatch.setattr(Emulated, "seeds", itertools.count(zlib.crc32(request.node.name.encode())))
    yield


def target(num_sms: int = 5) -> Target:
    return Target("triton", torch.get_default_device(), num_sms, (9, 0), False)


def random_weight(n: int, k: int, group_size: int, form: str, dtype: torch.dtype = BF16) -> QuantizedWeight:
    weight = torch.randn(n, k)
    if form in CODEBOOKS:
        codes = torch.randint(256, (n, k // 2), dtype=torch.uint8)
        groups = 1 if group_size == -1 else -(-k // group_size)
        return QuantizedWeight(codes, torch.rand(n, groups).to(dtype) + 0.1, k, group_size, encoding=form)
    if form == "symmetric":
        return quantize(weight, group_size, scale_dtype=dtype)
    return quantize(weight, group_size, symmetric=False, zero_points=form, scale_dtype=dtype)


def product(
    x: torch.Tensor,
    weight: QuantizedWeight,
    activation: str | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    num_sms: int = 5,
) -> torch.Tensor:
    n_out = weight.n // 2 if activation in GATES else weight.n
    wide = torch.full((x.shape[0] + 2, n_out + 3), torch.nan, dtype=x.dtype)
    out = wide[1:-1, 1:-2]
    assert hopper_weight.refusal(x.dtype, weight, target(num_sms)) is None
    hopper.matmul(x, weight, bias, activation, residual, out, target(num_sms))
    assert wide.isnan().sum() >= wide.numel() - out.numel(), "written outside"
    return out


def check(x: torch.Tensor, weight: QuantizedWeight, activation: str | None = None, **options: Any) -> None:
    """Codes and scales are exact in the kernel, sums float32: what is left is one rounding of the output."""
    got = product(x, weight, activation, **options)
    bias, residual = options.get("bias"), options.get("residual")
    want = x.double() @ weight.dequantize(torch.float64).T
    want = want if bias is None else want + bias.double()
    if activation in GATES:
        gate, up = want.chunk(2, 1)
        want = GATES[activation](gate) * up
    else:
        want = ACTIVATIONS[activation](want)
    want = want if residual is None else want + residual.double()
    summed = x.double().abs() @ weight.dequantize(torch.float64).abs().T  # what float32 sums round by
    budget = torch.finfo(x.dtype).eps * want.abs().max() + 64 * torch.finfo(torch.float32).eps * summed.max()
    assert float((got.double() - want).abs().max()) <= float(budget)


@pytest.mark.parametrize("form", ["symmetric", "integer", "float", *CODEBOOKS])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 256, -1])
def test_groups_and_forms(group_size: int, form: str) -> None:
    for dtype in (BF16, FP16):
        check(torch.randn(5, 768).to(dtype), random_weight(80, 768, group_size, form, dtype))


@pytest.mark.parametrize("scale_dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("form", ["symmetric", "integer", "float", *CODEBOOKS])
def test_scales_of_another_dtype(form: str, scale_dtype: torch.dtype) -> None:
    for m, dtype in ((3, BF16), (20, FP16)):
        check(torch.randn(m, 256).to(dtype), random_weight(140, 256, 32, form, scale_dtype))


@pytest.mark.parametrize("form", ["symmetric", "integer", "float", *CODEBOOKS])
def test_few_tokens_in_tiles_of_many_rows(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """The kernel that cuts k, which takes few tokens where x does not fit shared memory."""
    monkeypatch.setattr(hopper_few, "make_tile", lambda m, geometry: None)
    for m, group_size, activation in ((1, 128, None), (8, 16, "silu_and_multiply"), (9, 32, None), (16, -1, "gelu")):
        dtype = FP16 if m == 9 else BF16
        check(torch.randn(m, 512).to(dtype), random_weight(300, 512, group_size, form, dtype), activation)


@pytest.mark.parametrize("form", ["symmetric", "float", "nf4"])
def test_magnitudes_of_x(form: str) -> None:
    """bfloat16 beyond what float16 holds, in steps of different size, and beside zeros; an infinity or NaN spoils its token."""
    weight = random_weight(100, 1024, 64, form)
    for m in (1, 5):
        for power in (-90, -30, 30, 100):
            check((torch.randn(m, 1024) * 2.0**power).to(BF16), weight)
        steps = 2.0 ** torch.linspace(-60, 60, 1024).round()
        check((torch.randn(m, 1024) * steps).to(BF16), weight)
        check(torch.zeros(m, 1024).to(BF16), weight)
    x = torch.randn(3, 1024).to(BF16)
    x[0, 70], x[2, 3] = torch.inf, torch.nan
    got = product(x, weight)
    assert not got[[0, 2]].isfinite().any()
    want = x[1:2].double() @ weight.dequantize(torch.float64).T
    torch.testing.assert_close(got[1:2].double(), want, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 33, 64, 65, 200])
def test_tokens(m: int) -> None:
    """Every tile, its edges, and more than one."""
    check(torch.randn(m, 256).to(BF16), random_weight(300, 256, 64, "integer"))


@pytest.mark.parametrize("form", ["symmetric", "float"])
def test_tiles_of_128_tokens(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Whole, cut and gated ones; small weights would take lower tiles."""
    monkeypatch.setattr(hopper, "LAUNCH_US", {64: 1e9, 128: 0.0})
    hopper.plan_matmul.cache_clear()
    try:
        for m in (65, 200):
            check(torch.randn(m, 512).to(BF16), random_weight(300, 512, 64, form))
            check(torch.randn(m, 128).to(BF16), random_weight(260, 128, -1, form), "silu_and_multiply")
    finally:
        hopper.plan_matmul.cache_clear()


@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(1, 16, 16), (7, 40, -1), (257, 10944, 32), (520, 128, 128), (64, 1000, 128)]
)
def test_shapes(n: int, k: int, group_size: int) -> None:
    """n that is no multiple of anything; k of one group, of less than a step, and of a last group that is not full."""
    check(torch.randn(3, k).to(BF16), random_weight(n, k, group_size, "symmetric"))


@pytest.mark.parametrize("num_sms", [1, 2, 7, 132])
def test_shares(num_sms: int) -> None:
    """Whole tiles, split ones, tiles of many contributors; the same bits whoever comes last, on the workspace of the run before."""
    x, weight = torch.randn(4, 2048).to(BF16), random_weight(700, 2048, 128, "symmetric")
    check(x, weight, num_sms=num_sms)
    first = product(x, weight, num_sms=num_sms)
    other = torch.randn(4, 2048).to(BF16)
    for _ in range(3):
        product(other, weight, num_sms=num_sms)
        assert torch.equal(product(x, weight, num_sms=num_sms), first)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATES])
def test_epilogues(activation: str | None) -> None:
    n_out = 150 if activation in GATES else 300
    for m in (3, 40):
        x, weight = torch.randn(m, 256).to(FP16), random_weight(300, 256, 128, "symmetric", FP16)
        check(x, weight, activation)
        check(x, weight, activation, bias=torch.randn(300), residual=torch.randn(n_out, m).to(FP16).T)


def test_permuted_columns_and_strided_rows() -> None:
    weight = random_weight(100, 256, 64, "integer")
    order = torch.randperm(256).int()
    permuted = QuantizedWeight(weight.codes, weight.scales, 256, 64, zeros=weight.zeros, permutation=order)
    check(torch.randn(6, 300).to(BF16)[:, 3:259], permuted)
    check(torch.randn(6, 512).to(BF16)[::2, 8:264], weight)
    for copied in (torch.randn(2, 259)[:, :256], torch.randn(2, 264)[:, 1:257], torch.randn(256, 3).t()):
        check(copied.to(BF16), weight)


def test_large_activations_and_small_scales() -> None:
    """A product beyond float16 before it is scaled."""
    weight = random_weight(64, 512, 128, "symmetric", FP16)
    small = QuantizedWeight(weight.codes, torch.full_like(weight.scales, 2.0**-24), 512, 128)
    check(torch.full((2, 512), 60000.0, dtype=FP16), small)


def test_what_is_left_to_the_portable_kernel() -> None:
    weight = random_weight(64, 512, 128, "symmetric")
    cases = {
        "16-bit x": (torch.float32, weight),
        "4-bit": (BF16, quantize(torch.randn(64, 512), 128, bits=8)),
    }
    for reason, (dtype, operand) in cases.items():
        found = hopper_weight.refusal(dtype, operand, target())
        assert found is not None
        assert reason in found


def test_tiles_hold_the_tokens() -> None:
    """Above 64 tokens a weight of few steps takes tiles of 64, whose partials are smaller."""
    geometry = hopper_weight.pack(random_weight(256, 4096, 128, "symmetric"), False).geometry
    for m, n, want in ((1, 4096, 8), (9, 4096, 16), (17, 4096, 32), (64, 4096, 64), (128, 4096, 64), (128, 14336, 128)):
        assert hopper.plan_matmul(m, n, geometry, 132).tile.block_m == want
    assert hopper.plan_matmul(8192, 4096, geometry, 132).tile.block_m == 128


def test_turns_of_few_tokens() -> None:
    """Passes of 2 and 4 turns are on their way as a whole; of 7 turns, which 4 do not divide, each is a unit."""
    for k, group_size, want in (
        (4096, 128, (2, 2, 2)),
        (8192, 128, (4, 4, 4)),
        (14336, 128, (4, 1, 7)),
        (8192, 32, (2, 2, 4)),
    ):
        geometry = hopper_weight.pack(random_weight(16, k, group_size, "symmetric"), False).geometry
        tile = hopper_few.make_tile(1, geometry)
        assert tile is not None
        assert (tile.depth, tile.unit, tile.turns) == want
    assert hopper_few.make_tile(9, geometry) is None
    assert hopper_few.make_tile(8, dataclasses.replace(geometry, num_blocks=14336 // 64)) is None, "x does not fit"


@pytest.mark.parametrize("k", [256, 4096, 6144, 14336])
def test_passes_of_any_number_of_turns(k: int) -> None:
    """Of one turn, of a unit, of several units, of turns that no unit divides; workers have no, one or several bands."""
    for m, n in ((1, 16), (1, 100), (8 if k < 14336 else 1, 250)):
        check(torch.randn(m, k).to(BF16), random_weight(n, k, 128, "symmetric"))


def test_preparation_packs_what_the_call_uses() -> None:
    weight = random_weight(64, 512, 128, "symmetric")
    for activation in (None, "silu_and_multiply"):
        launch.pack(weight, None, BF16, activation, target())
    packed = dict(weight.packed)
    for activation in (None, "relu", "gelu_and_multiply"):
        product(torch.randn(2, 512).to(BF16), weight, activation)
    assert weight.packed == packed


def test_a_hopper_gpu_runs_it() -> None:
    x, weight = torch.randn(5, 256).to(BF16), random_weight(90, 256, 64, "integer")
    launched = torch.empty(5, 90, dtype=BF16)
    launch.matmul(x, weight, None, "relu", None, launched, target())
    assert torch.equal(launched, product(x, weight, "relu"))

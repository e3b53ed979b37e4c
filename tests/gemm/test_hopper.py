"""The Hopper GEMM on the CPU in `tests.emulator`: every layout, tile and epilogue against float64."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from evenshare.device.target import Target
from evenshare.gemm import hopper, launch
from evenshare.gemm.epilogue import Epilogue
from evenshare.gemm.kernels import hopper_matmul
from evenshare.schedule.uniform import uniform_plan
from tests.emulator import Emulated
from tests.gemm.helpers import H200

BF16, FP16 = torch.bfloat16, torch.float16
GATES = {"silu_and_multiply": F.silu, "gelu_and_multiply": F.gelu}
ACTIVATIONS = {None: lambda y: y, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}
LARGEST = hopper.TILES[0]


@pytest.fixture(autouse=True, params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def _place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the kernel runs; tensors are made there."""
    if request.param == "gpu":
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("no Hopper GPU")
        with torch.device("cuda"):
            yield
        return
    monkeypatch.setattr(hopper_matmul, "matmul", Emulated(hopper_matmul.matmul))
    monkeypatch.setattr(Emulated, "seeds", itertools.count(zlib.crc32(request.node.name.encode())))
    yield


def target(num_sms: int = 5) -> Target:
    return Target("triton", torch.get_default_device(), num_sms, (9, 0), False)


def use(monkeypatch: pytest.MonkeyPatch, tile: hopper.HopperTile, num_workers: int = 5) -> None:
    """This tile, and every tile of the tail cut."""

    def plan(m: int, n: int, k: int, gated: bool, *_: Any) -> hopper.HopperPlan:
        num_tiles = -(-m // tile.block_m) * -(-(2 * n if gated else n) // tile.block_n)
        return hopper.HopperPlan(tile, uniform_plan(num_tiles, -(-k // hopper.PANEL), num_workers))

    monkeypatch.setattr(hopper, "plan_matmul", plan)


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **options: Any) -> torch.Tensor:
    assert hopper.refusal(a, b, target()) is None
    hopper.matmul(a, b, Epilogue(**options), out, target())
    return out


def check(a: torch.Tensor, b: torch.Tensor, by_tma: bool = True, **options: Any) -> None:
    """Products are exact and sums float32: what is left is one rounding of the output."""
    activation, bias, residual = (options.get(name) for name in ("activation", "bias", "residual"))
    n_out = b.shape[1] // 2 if activation in GATES else b.shape[1]
    wide = torch.full((a.shape[0] + 2, n_out + 8 + -n_out % 8), torch.nan, dtype=a.dtype)
    out = wide[1:-1, :n_out] if by_tma else wide[1:-1, 1 : 1 + n_out]
    product(a, b, out, **options)
    assert int((~wide.isnan()).sum()) == out.numel(), "written outside"
    want = options.get("alpha", 1.0) * a.double() @ b.double()
    want = want if bias is None else want + bias.double()
    if activation in GATES:
        gate, up = want.chunk(2, 1)
        want = GATES[activation](gate) * up
    else:
        want = ACTIVATIONS[activation](want)
    want = want if residual is None else want + options.get("beta", 1.0) * residual.double()
    summed = (a.double().abs() @ b.double().abs()).max()  # what float32 sums round by
    budget = torch.finfo(a.dtype).eps * want.abs().max() + 64 * torch.finfo(torch.float32).eps * summed
    assert float((out.double() - want).abs().max()) <= float(budget)


def operand(rows: int, columns: int, contiguous: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """[rows, columns] whose dimension `contiguous` is, in a padded tensor that is NaN around."""
    shape = (rows, columns) if contiguous == 1 else (columns, rows)
    wide = torch.full((shape[0] + 1, shape[1] + 8 + -shape[1] % 8), torch.nan, dtype=dtype)
    view = wide[:-1, : shape[1]]
    view.copy_(torch.randn(shape))
    return view if contiguous == 1 else view.t()


@pytest.mark.parametrize("tile", hopper.TILES, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")
def test_layouts_and_tiles(monkeypatch: pytest.MonkeyPatch, tile: hopper.HopperTile) -> None:
    """All four layouts; rows, columns and k that end inside a tile; tiles whole, cut, and of several contributors."""
    use(monkeypatch, tile)
    for a_dim, b_dim in itertools.product((0, 1), repeat=2):
        check(operand(300, 200, a_dim), operand(200, 330, b_dim))
    check(operand(70, 700, 1, FP16), operand(700, 130, 0, FP16), by_tma=False)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATES])
def test_epilogues(monkeypatch: pytest.MonkeyPatch, activation: str | None) -> None:
    n_out = 100 if activation in GATES else 200
    for tile, b_dim, by_tma in ((LARGEST, 0, True), (hopper.TILES[1], 1, False)):
        use(monkeypatch, tile)
        a, b = operand(140, 130, 1), operand(130, 200, b_dim)
        check(a, b, by_tma, activation=activation)
        check(a, b, by_tma, activation=activation, bias=torch.randn(200), residual=torch.randn(n_out, 140).to(BF16).t())
        check(a, b, by_tma, activation=activation, residual=torch.randn(140, n_out), alpha=0.5, beta=-2.0)


@pytest.mark.parametrize(("m", "n", "k"), [(17, 1, 8), (20, 500, 64), (129, 8, 65), (64, 64, 4096), (520, 40, 16)])
def test_shapes(m: int, n: int, k: int) -> None:
    check(operand(m, k, 1), operand(k, n, 0))


def test_a_batch_of_products_that_fill_the_gpu() -> None:
    a, b = torch.randn(2, 150, 64).to(BF16), torch.randn(2, 200, 64).to(BF16).mT
    residual = torch.randn(2, 150, 200)
    out = torch.full((2, 150, 200), torch.nan, dtype=BF16)
    launch.matmul(a, b, Epilogue(residual=residual), out, target())
    torch.testing.assert_close(out.double(), a.double() @ b.double() + residual, rtol=1e-2, atol=1e-2)


def test_an_output_in_float32() -> None:
    a, b = operand(70, 130, 1), operand(130, 96, 0)
    out = product(a, b, torch.full((70, 96), torch.nan))
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


def test_the_same_bits_on_the_workspace_of_the_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, LARGEST, num_workers=7)
    a, other, b = operand(256, 1000, 1), operand(256, 1000, 1), operand(1000, 256, 0)
    first = product(a, b, torch.empty(256, 256, dtype=BF16)).clone()
    for _ in range(3):
        product(other, b, torch.empty(256, 256, dtype=BF16))
        assert torch.equal(product(a, b, torch.empty(256, 256, dtype=BF16)), first)


def test_what_is_left_to_the_portable_kernel() -> None:
    a, b = operand(20, 64, 1), operand(64, 16, 0)
    cases = {
        "16-bit operands": (a.float(), b.float()),
        "up to 16 rows": (a[:16], b),
        "nothing to multiply": (a[:, :0], b[:0]),
        "a has no dimension of stride 1": (torch.randn(20, 130).to(BF16)[:, ::2], b),
        "b has no dimension of stride 1": (a, torch.randn(64, 17).to(BF16)[:, 1:]),
    }
    for reason, operands in cases.items():
        assert reason in str(hopper.refusal(*operands, target()))
    assert hopper.refusal(a, b, Target("triton", torch.device("cpu"), 5, (8, 0), False)) is not None


def test_tiles_follow_the_shape() -> None:
    """Large problems take the largest tile, small ones spread over the SMs, and a lone tile of a long k is cut."""
    large = hopper.plan_matmul(8192, 8192, 8192, False, 132, H200)
    assert large.tile.block_m * large.tile.block_n == LARGEST.block_m * LARGEST.block_n
    small = hopper.plan_matmul(512, 512, 512, False, 132, H200)
    assert small.tile.block_m * small.tile.block_n < LARGEST.block_m * LARGEST.block_n
    lone = hopper.plan_matmul(64, 64, 65536, False, 132, H200)
    assert lone.shares.num_workers > 8
    assert hopper.plan_matmul(8192, 4096, 512, True, 132, H200).shares.num_tiles > 0


@pytest.mark.parametrize("b_dim", [0, 1])
@pytest.mark.parametrize("activation", [None, *GATES])
def test_small_products_in_the_tiles_that_are_chosen(activation: str | None, b_dim: int) -> None:
    for m, n, k in ((40, 64, 64), (70, 128, 192), (140, 320, 320)):
        check(operand(m, k, 1), operand(k, n, b_dim), activation=activation)


def test_a_hopper_gpu_runs_it() -> None:
    a, b = operand(70, 130, 1), operand(130, 90, 0)
    direct, launched = (torch.empty(70, 90, dtype=BF16) for _ in range(2))
    launch.matmul(a[None], b[None], Epilogue(activation="relu"), launched[None], target())
    assert torch.equal(launched, product(a, b, direct, activation="relu"))

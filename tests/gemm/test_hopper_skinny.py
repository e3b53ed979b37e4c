"""The Hopper kernel of few rows on the CPU in `tests.emulator`, and on a Hopper GPU, against float64."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from evenshare.device.target import Target
from evenshare.gemm import hopper_skinny, launch, reference
from evenshare.gemm.epilogue import Epilogue
from evenshare.gemm.hopper_skinny import SkinnyPlan, SkinnyTile
from evenshare.gemm.kernels import hopper_skinny as kernels
from evenshare.schedule.uniform import uniform_plan
from tests.emulator import Emulated
from tests.gemm.helpers import H200

BF16, FP16 = torch.bfloat16, torch.float16
GATED = ("silu_and_multiply", "gelu_tanh_and_multiply")
TILES = [SkinnyTile(rows, strips) for rows in hopper_skinny.BLOCK_M for strips in (1, 2)]


@pytest.fixture(autouse=True, params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def _place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the kernel runs; tensors are made there."""
    if request.param == "gpu":
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("no Hopper GPU")
        with torch.device("cuda"):
            yield
        return
    monkeypatch.setattr(kernels, "matmul", Emulated(kernels.matmul))
    monkeypatch.setattr(Emulated, "seeds", itertools.count(zlib.crc32(request.node.name.encode())))
    yield


def target(num_sms: int = 5) -> Target:
    return Target("triton", torch.get_default_device(), num_sms, (9, 0), False)


def use(monkeypatch: pytest.MonkeyPatch, tile: SkinnyTile, num_workers: int = 5) -> None:
    """This tile, and every tile of the tail cut."""

    def plan(_m: int, n: int, k: int, gated: bool, *_: Any) -> SkinnyPlan:
        chosen = SkinnyTile(tile.block_m, 2) if gated else tile
        num_tiles = -(-n // (64 if gated else 64 * tile.strips))
        return SkinnyPlan(chosen, uniform_plan(num_tiles, -(-k // hopper_skinny.STEP), num_workers))

    monkeypatch.setattr(hopper_skinny, "plan_matmul", plan)


def operand(rows: int, columns: int, contiguous: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """[rows, columns] whose dimension `contiguous` is, in a padded tensor that is NaN around."""
    shape = (rows, columns) if contiguous == 1 else (columns, rows)
    wide = torch.full((shape[0] + 1, shape[1] + 8 + -shape[1] % 8), torch.nan, dtype=dtype)
    view = wide[:-1, : shape[1]]
    view.copy_(torch.randn(shape))
    return view if contiguous == 1 else view.t()


def check(a: torch.Tensor, b: torch.Tensor, transposed: bool = False, **options: Any) -> torch.Tensor:
    """Products are exact and sums float32: what is left is one rounding of the output, and nothing else is written."""
    n_out = b.shape[1] // 2 if options.get("activation") in GATED else b.shape[1]
    wide = torch.full((a.shape[0] + 2, n_out + 3), torch.nan, dtype=a.dtype)
    wide = wide.t().contiguous().t() if transposed else wide
    out = wide[1:-1, 1 : 1 + n_out]
    assert hopper_skinny.refusal(a, b, target()) is None
    hopper_skinny.matmul(a, b, Epilogue(**options), out, target())
    assert int((~wide.isnan()).sum()) == out.numel(), "written outside"
    wide_options = {
        name: value.double() if isinstance(value, torch.Tensor) else value for name, value in options.items()
    }
    want = reference.matmul(a.double(), b.double(), Epilogue(**wide_options))
    summed = (a.double().abs() @ b.double().abs()).max()  # what float32 sums round by
    budget = torch.finfo(a.dtype).eps * want.abs().max() + 64 * torch.finfo(torch.float32).eps * summed
    assert float((out.double() - want).abs().max()) <= float(budget)
    return out


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.block_m}x{64 * tile.strips}")
@pytest.mark.parametrize("b_dim", [0, 1])
def test_layouts_and_tiles(monkeypatch: pytest.MonkeyPatch, tile: SkinnyTile, b_dim: int) -> None:
    """Rows, columns and k that end inside a tile; tiles whole, cut, and of several contributors."""
    use(monkeypatch, tile)
    for m, n, k, dtype in ((tile.block_m, 330, 600, BF16), (tile.block_m - 3, 70, 2200, FP16)):
        check(operand(m, k, 1, dtype), operand(k, n, b_dim, dtype))


@pytest.mark.parametrize("activation", [None, "relu", "gelu", *GATED])
@pytest.mark.parametrize("m", [1, 12, 64])
def test_epilogues(monkeypatch: pytest.MonkeyPatch, m: int, activation: str | None) -> None:
    n_out = 100 if activation in GATED else 200
    a, b = operand(m, 270, 1), operand(270, 200, 0)
    block_m = next(rows for rows in hopper_skinny.BLOCK_M if m <= rows)
    for strips in (1, 2):
        use(monkeypatch, SkinnyTile(block_m, strips))
        check(a, b, activation=activation, bias=torch.randn(200), residual=torch.randn(n_out, m).to(BF16).t())
        check(a, b, True, activation=activation, residual=torch.randn(m, n_out), alpha=0.5, beta=-2.0)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 8), (17, 500, 64), (33, 8, 136), (64, 64, 8192), (2, 1000, 16)])
def test_shapes(m: int, n: int, k: int) -> None:
    check(operand(m, k, 1), operand(k, n, 0))


def test_an_output_in_float32() -> None:
    a, b = operand(20, 130, 1), operand(130, 96, 0)
    out = torch.full((20, 96), torch.nan)
    hopper_skinny.matmul(a, b, Epilogue(), out, target())
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


def test_the_same_bits_on_the_workspace_of_the_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SkinnyTile(16, 2), num_workers=7)
    a, other, b = operand(16, 1000, 1), operand(16, 1000, 1), operand(1000, 256, 0)
    first = check(a, b).clone()
    for _ in range(3):
        check(other, b)
        assert torch.equal(check(a, b), first)


def test_what_is_left_to_other_kernels() -> None:
    a, b = operand(20, 64, 1), operand(64, 16, 0)
    cases = {
        "16-bit operands": (a.float(), b.float()),
        "up to 64 rows": (operand(65, 64, 1), b),
        "nothing to multiply": (a[:, :0], b[:0]),
        "a has no contiguous rows": (operand(24, 64, 0), b),
        "b has no dimension of stride 1": (a, torch.randn(64, 17).to(BF16)[:, 1:]),
    }
    for reason, operands in cases.items():
        assert reason in str(hopper_skinny.refusal(*operands, target()))
    assert hopper_skinny.refusal(a, b, Target("triton", torch.device("cpu"), 5, (8, 0), False)) is not None


@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 4096), (16, 28672, 4096), (64, 128, 16384), (64, 8192, 28672)])
def test_plans_use_the_gpu_and_fit_its_shared_memory(m: int, n: int, k: int) -> None:
    plan = hopper_skinny.plan_matmul(m, n, k, False, 132, H200)
    tile, shares = plan.tile, plan.shares
    assert tile.block_m >= m
    assert shares.num_workers * 2 > 132 or m * n < 64 * 4096
    assert tile.num_stages >= 3
    assert tile.num_stages * 256 * (64 * tile.strips + tile.block_m) <= 227 << 10


def test_a_hopper_gpu_runs_it() -> None:
    for batch in (1, 2):
        a, b = torch.randn(batch, 9, 136).to(BF16), torch.randn(batch, 500, 136).to(BF16).mT
        residual = torch.randn(batch, 9, 500)
        out = torch.full((batch, 9, 500), torch.nan, dtype=BF16)
        assert hopper_skinny.takes(a[0], b[0], batch, target())
        launch.matmul(a, b, Epilogue(residual=residual), out, target())
        torch.testing.assert_close(out.double(), a.double() @ b.double() + residual, rtol=1e-2, atol=1e-2)

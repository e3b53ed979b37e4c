"""The Hopper kernel of fp8 products on the CPU in `tests.emulator`, and on a Hopper GPU: every tile, scale and epilogue."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from evenshare.device.target import Target
from evenshare.gemm import hopper_scaled, launch
from evenshare.gemm.epilogue import Epilogue
from evenshare.gemm.hopper import HopperPlan, HopperTile
from evenshare.gemm.kernels import hopper_scaled as kernels
from evenshare.gemm.scales import make_scales
from evenshare.schedule.uniform import uniform_plan
from tests.emulator import Emulated
from tests.gemm.test_scaled import E4M3, E5M2, assert_close, oracle, scale_of

SUM_BITS = 13  # of mantissa that the tensor cores keep of a sum of fp8 products
GATED = "silu_and_multiply"


@pytest.fixture(autouse=True, params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def _place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the kernel runs; tensors are made there."""
    if request.param == "gpu":
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("no Hopper GPU")
        with torch.device("cuda"):
            yield
        return
    monkeypatch.setattr(kernels, "scaled_matmul", Emulated(kernels.scaled_matmul))
    monkeypatch.setattr(Emulated, "seeds", itertools.count(zlib.crc32(request.node.name.encode())))
    yield


def target() -> Target:
    return Target("triton", torch.get_default_device(), 5, (9, 0), False)


def use(monkeypatch: pytest.MonkeyPatch, tile: HopperTile, num_workers: int = 5) -> None:
    """This tile, and every tile of the tail cut."""

    def plan(m: int, n: int, k: int, gated: bool, *_: Any) -> HopperPlan:
        num_tiles = -(-m // tile.block_m) * -(-(2 * n if gated else n) // tile.block_n)
        return HopperPlan(tile, uniform_plan(num_tiles, -(-k // hopper_scaled.PANEL), num_workers))

    monkeypatch.setattr(hopper_scaled, "plan_matmul", plan)


def codes(rows: int, columns: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """[rows, columns] in a padded tensor that is NaN around."""
    wide = torch.full((rows + 1, columns + 16 + -columns % 16), torch.nan).to(dtype)
    view = wide[:-1, :columns]
    view.copy_(torch.randn(rows, columns).to(dtype))
    return view


def check(
    a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, by_tma: bool = True, **options: Any
) -> torch.Tensor:
    """Nothing but the output is written, and it is right."""
    n_out = b.shape[1] // 2 if options.get("activation") == GATED else b.shape[1]
    wide = torch.full((a.shape[0] + 2, n_out + 8 + -n_out % 8), torch.nan, dtype=torch.bfloat16)
    out = wide[1:-1, :n_out] if by_tma else wide[1:-1, 1 : 1 + n_out]
    scales = make_scales(a, b, scale_a, scale_b)
    assert hopper_scaled.refusal(a, b, scales, n_out != b.shape[1], target()) is None
    hopper_scaled.matmul(a, b, scales, Epilogue(**options), out, target())
    assert int((~wide.isnan()).sum()) == out.numel(), "written outside"
    want = oracle(a, b, scale_a, scale_b, **options)
    if options.get("activation") is None:
        assert_close(out, want, a[:, :128], b[:128], SUM_BITS)  # sums of few bits are those of 128 terms
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=0.02 * float(want.abs().max()))
    return out


@pytest.mark.parametrize("tile", hopper_scaled.TILES, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")
@pytest.mark.parametrize(("kind_a", "kind_b"), [("blocks of rows", "blocks"), ("rows", "columns"), ("one", "blocks")])
def test_tiles_and_scales(monkeypatch: pytest.MonkeyPatch, tile: HopperTile, kind_a: str, kind_b: str) -> None:
    """Rows, columns and k that end inside a tile; tiles whole, cut, and of several contributors; all epilogues."""
    use(monkeypatch, tile)
    a, b = codes(200, 400), codes(520, 400).T
    scale_a, scale_b = scale_of(kind_a, (200, 400)), scale_of(kind_b, (400, 520))
    check(a, b, scale_a, scale_b)
    bias, residual = torch.randn(520), torch.randn(520, 200).T
    check(a, b, scale_a, scale_b, by_tma=False, bias=bias, activation="relu", residual=residual)
    b, scale_b = codes(512, 400).T, scale_of(kind_b, (400, 512))
    check(a, b, scale_a, scale_b, bias=torch.randn(512), activation=GATED, residual=torch.randn(200, 256))


@pytest.mark.parametrize("kind_a", ["number", "one", "blocks of rows"])
@pytest.mark.parametrize("kind_b", ["number", "columns"])
def test_other_scales_and_codes(monkeypatch: pytest.MonkeyPatch, kind_a: str, kind_b: str) -> None:
    use(monkeypatch, hopper_scaled.TILES[1])
    a, b = codes(70, 272, E5M2), codes(130, 272).T
    check(a, b, scale_of(kind_a, (70, 272)), scale_of(kind_b, (272, 130)))
    check(a, codes(130, 272, E5M2).T, scale_of(kind_a, (70, 272)), scale_of(kind_b, (272, 130)), by_tma=False)


def test_scales_of_any_strides() -> None:
    a, b = codes(70, 272), codes(200, 272).T
    check(a, b, torch.rand(6, 70).T[:, ::2] + 0.5, torch.rand(2, 3).T + 0.5)
    check(a, b, torch.rand(70, 3)[:, 1:2] + 0.5, torch.rand(200, 2)[:, 1:].T + 0.5)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 16), (17, 500, 128), (64, 64, 4096), (520, 48, 160)])
def test_shapes(m: int, n: int, k: int) -> None:
    a, b = codes(m, k), codes(n, k).T
    check(a, b, scale_of("blocks of rows", (m, k)), scale_of("blocks", (k, n)))


def test_the_same_bits_on_the_workspace_of_the_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, hopper_scaled.TILES[0], num_workers=7)
    a, other, b = codes(256, 1024), codes(256, 1024), codes(256, 1024).T
    first = check(a, b, 0.5, 2.0).clone()
    for _ in range(2):
        check(other, b, 0.5, 2.0)
        assert torch.equal(check(a, b, 0.5, 2.0), first)


def test_sums_leave_the_tensor_cores_every_128_of_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small step after a large one is not lost: 14 bits would round 2^15 + 1 to 2^15."""
    use(monkeypatch, hopper_scaled.TILES[0])
    a, b = torch.zeros(64, 4096), torch.zeros(64, 4096)
    a[:, 0], b[:, 0] = 256.0, 128.0
    a[:, 128::128], b[:, 128::128] = 1.0, 1.0
    out = torch.empty(64, 64)
    a, b = a.to(E4M3), b.to(E4M3).T
    hopper_scaled.matmul(a, b, make_scales(a, b, 1.0, 1.0), Epilogue(), out, target())
    assert (out == 2.0**15 + 31).all()


def test_what_is_left_to_the_portable_kernel() -> None:
    a, b = codes(20, 64), codes(32, 64).T
    scales = make_scales(a, b, 1.0, 1.0)
    of_blocks = make_scales(a, codes(400, 64).T, 1.0, torch.rand(1, 4))
    cases: dict[str, tuple[torch.Tensor, torch.Tensor, Any, bool]] = {
        "nothing to multiply": (a[:, :0], b[:0], scales, False),
        "a is laid out otherwise": (torch.zeros(64, 32).to(E4M3).T, b, scales, False),
        "b is laid out otherwise": (a, torch.zeros(64, 32).to(E4M3), scales, False),
        "begins within a block": (a, codes(400, 64).T, of_blocks, True),
    }
    for reason, arguments in cases.items():
        assert reason in str(hopper_scaled.refusal(*arguments, target()))
    assert hopper_scaled.refusal(a, b, scales, False, Target("triton", a.device, 5, (8, 9), False)) is not None


def test_a_hopper_gpu_runs_it() -> None:
    a, b = codes(70, 144), codes(96, 144).T
    scales = make_scales(a, b, torch.rand(70, 1), 1.0)
    direct, launched = (torch.empty(70, 96, dtype=torch.bfloat16) for _ in range(2))
    launch.scaled_matmul(a, b, scales, Epilogue(activation="relu"), launched, target())
    hopper_scaled.matmul(a, b, scales, Epilogue(activation="relu"), direct, target())
    assert torch.equal(launched, direct)

"""Random products on the Hopper GEMM kernels in `tests.emulator`, with the plans that a GPU of so many SMs would get."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from evenshare.device.target import Target
from evenshare.gemm import hopper, hopper_scaled, hopper_skinny, reference
from evenshare.gemm.epilogue import Epilogue
from evenshare.gemm.kernels import hopper_matmul
from evenshare.gemm.kernels import hopper_scaled as scaled_kernels
from evenshare.gemm.kernels import hopper_skinny as skinny_kernels
from evenshare.gemm.scales import make_scales
from tests.emulator import Emulated

SEEDS = [*range(30), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(30, 500))]
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _emulate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((hopper_matmul, "matmul"), (scaled_kernels, "scaled_matmul"), (skinny_kernels, "matmul")):
        monkeypatch.setattr(module, name, Emulated(getattr(module, name)))
    monkeypatch.setattr(Emulated, "seeds", itertools.count(1000 * request.node.callspec.params["seed"]))


def weight(draw: random.Random, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """[k, n]; of 16 bits, either dimension may be contiguous."""
    if dtype in FP8 or draw.random() < 0.5:
        return torch.randn(n, k).to(dtype).T
    return torch.randn(k, n).to(dtype)


def some_scale(draw: random.Random, *shapes: tuple[int, ...]) -> Any:
    return draw.choice([0.5, *(torch.rand(shape) + 0.5 for shape in ((), *shapes))])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_product(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    target = Target("triton", CPU, draw.choice([1, 2, 3, 5, 7, 12, 20]), (9, 0), False)
    gated = draw.random() < 0.4
    activation = draw.choice(["silu_and_multiply", "gelu_and_multiply"] if gated else [None, "relu", "silu"])
    kernel = draw.choice([hopper, hopper_skinny, hopper_scaled])
    m = draw.randint(1, 64) if kernel is hopper_skinny else draw.randint(17, 200)
    n_out, k = 8 * draw.randint(1, 40), 16 * draw.randint(1, 60)
    n = 2 * n_out if gated else n_out
    dtype = draw.choice(FP8 if kernel is hopper_scaled else (torch.bfloat16, torch.float16))
    a, b = torch.randn(m, k).to(dtype), weight(draw, n, k, dtype)
    bias = draw.choice([None, torch.randn(n)])
    residual = draw.choice([None, torch.randn(m, n_out), torch.randn(n_out, m).T])
    epilogue = Epilogue(bias, activation, residual)
    wide = Epilogue(None if bias is None else bias.double(), activation, residual)
    out = torch.full((m, n_out), torch.nan, dtype=draw.choice([torch.bfloat16, torch.float32]))
    if kernel is hopper_scaled:
        blocks = -(-k // 128)
        of_b = some_scale(draw, (1, n), *[] if gated and n_out % 128 else [(blocks, -(-n // 128))])
        scales = make_scales(a, b, some_scale(draw, (m, 1), (m, blocks)), of_b)
        assert hopper_scaled.refusal(a, b, scales, gated, target) is None
        hopper_scaled.matmul(a, b, scales, epilogue, out, target)
        wide = wide._replace(alpha=scales.factor)
        want = reference.scaled_matmul(a, b, scales.a, scales.b, wide, torch.float64, torch.float64)
    else:
        assert kernel.refusal(a, b, target) is None
        kernel.matmul(a, b, epilogue, out, target)
        want = reference.matmul(a.double(), b.double(), wide)
    error = (out.double() - want).abs() / (want.abs() + 0.05 * want.abs().max() + 0.1)
    assert float(error.max()) < 0.01

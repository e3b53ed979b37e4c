"""`scaled_matmul` on the CPU and through the portable kernel, every kind of scale against float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from evenshare.gemm import launch, reference, scaled_matmul
from evenshare.gemm.epilogue import Epilogue
from evenshare.gemm.plan import INTERPRETER_TILE, GemmPlan
from evenshare.gemm.scales import make_scales
from evenshare.schedule.uniform import uniform_plan

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS_A, KINDS_B = ("number", "one", "rows", "blocks"), ("number", "one", "columns", "blocks")


def codes(*shape: int, dtype: torch.dtype = E4M3, device: Any = None) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def scale_of(kind: str, shape: tuple[int, ...], device: Any = None) -> torch.Tensor | float:
    """Scales of a [m, k], or of b [k, n], whose blocks are of 128 along n too."""
    if kind == "number":
        return 0.75
    blocks = tuple(-(-size // 128) for size in shape)
    sizes = {"one": (), "rows": (shape[0], 1), "columns": (1, shape[1]), "blocks": blocks}
    sizes["blocks of rows"] = (shape[0], blocks[1])
    return torch.rand(sizes[kind], device=device) + 0.5


def oracle(a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, **options: Any) -> torch.Tensor:
    scales = make_scales(a, b, scale_a, scale_b)
    epilogue = Epilogue(**options, alpha=scales.factor)
    return reference.scaled_matmul(a, b, scales.a, scales.b, epilogue, torch.float64, torch.float64)


def assert_close(y: torch.Tensor, want: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sum_bits: int = 24) -> None:
    """One rounding of the output, and sums of so many bits: an eps of the sum of the magnitudes for each sixteen terms."""
    magnitudes = (a.double().abs() @ b.double().abs()).max() * 2.25  # two scales of at most 1.5
    terms = max(a.shape[-1] / 16, 1.0)
    budget = torch.finfo(y.dtype).eps * want.abs().max() + terms * 2.0 ** (1 - sum_bits) * magnitudes
    assert float((y.double() - want).abs().max()) <= float(budget)


@pytest.fixture(autouse=True)
def _split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: small tiles, all of the tail's cut."""
    if torch.cuda.is_available():
        return

    def plan(m: int, n: int, k: int, *_: Any, **_costs: Any) -> GemmPlan:
        tile = INTERPRETER_TILE
        return GemmPlan(tile, uniform_plan(-(-m // 16) * -(-n // 16), -(-k // 16), 5))

    monkeypatch.setattr(launch, "plan_matmul", plan)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize(("kind_a", "kind_b"), list(itertools.product(KINDS_A, KINDS_B)))
def test_every_pair_of_scales(kind_a: str, kind_b: str, backend: str, device: torch.device) -> None:
    a, b = codes(9, 264, device=device), codes(264, 140, device=device)
    scale_a = scale_of({"blocks": "blocks of rows"}.get(kind_a, kind_a), (9, 264), device)
    scale_b = scale_of(kind_b, (264, 140), device)
    y = scaled_matmul(a, b, scale_a, scale_b, out_dtype=torch.float32, backend=backend)
    assert_close(y, oracle(a, b, scale_a, scale_b), a, b)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("dtypes", list(itertools.product((E4M3, E5M2), repeat=2)), ids=str)
def test_all_codes(dtypes: tuple[torch.dtype, torch.dtype], backend: str, device: torch.device) -> None:
    """Every finite code times one, and one code of each kind that is none."""
    every = torch.arange(256, dtype=torch.uint8, device=device)
    a, b = every.view(dtypes[0])[:, None], torch.ones(1, 3, device=device).to(dtypes[1])
    y = scaled_matmul(a, b, out_dtype=torch.float32, backend=backend)
    torch.testing.assert_close(y, a.float().expand(256, 3), rtol=0, atol=0, equal_nan=True)
    y = scaled_matmul(b.T, a.T, out_dtype=torch.float32, backend=backend) if dtypes[0] == dtypes[1] else y.T
    torch.testing.assert_close(y, a.float().T.expand(3, 256), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("activation", [None, "gelu", "silu_and_multiply"])
def test_epilogue_and_strides(activation: str | None, backend: str, device: torch.device) -> None:
    """Operands, scales, residual and out of any strides; leading dims."""
    a = codes(300, 42, device=device)[::2].T.reshape(2, 21, 150)
    b = codes(60, 151, device=device)[:, 1:].T
    scale_a, scale_b = torch.rand(2, 2, 21, device=device).permute(1, 2, 0) + 0.5, torch.rand(60, 1, device=device).T
    n_out = 30 if activation == "silu_and_multiply" else 60
    bias, residual = torch.randn(60, device=device), torch.randn(n_out, 21, 2, device=device).permute(2, 1, 0)
    base = torch.full((2, 21, 2 * n_out), math.nan, dtype=torch.float16, device=device)
    out = base[..., ::2]
    options: dict[str, Any] = {"bias": bias, "activation": activation, "residual": residual}
    y = scaled_matmul(a, b, scale_a, scale_b, **options, out=out, out_dtype=torch.float16, backend=backend)
    assert y is out
    assert base[..., 1::2].isnan().all()
    rows = a.reshape(42, 150)
    want = oracle(rows, b, scale_a.reshape(42, 2), scale_b, **options | {"residual": residual.reshape(42, n_out)})
    torch.testing.assert_close(y.reshape(42, n_out).double(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 7), (5, 0, 7), (5, 6, 0), (1, 1, 1), (19, 130, 129)])
def test_sizes(m: int, n: int, k: int, backend: str, device: torch.device) -> None:
    a, b = codes(m, k, device=device), codes(k, n, device=device)
    scale_a, scale_b = scale_of("blocks of rows", (m, k), device), scale_of("blocks", (k, n), device)
    y = scaled_matmul(a, b, scale_a, scale_b, out_dtype=torch.float32, backend=backend)
    assert y.shape == (m, n)
    if y.numel():
        assert_close(y, oracle(a, b, scale_a, scale_b), a, b)


CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a dtype": ({"a": torch.zeros(3, 300)}, TypeError, "a: got torch.float32, want float8_e4m3fn or float8_e5m2"),
    "b shape": ({"b": torch.zeros(300).to(E4M3)}, ValueError, r"b: got shape \(300,\), want \[k, n\]"),
    "k": ({"a": torch.zeros(3, 9).to(E4M3)}, ValueError, r"a: got shape \(3, 9\), want \[..., 300\]"),
    "scale dtype": ({"scale_a": torch.ones(3, 1).half()}, TypeError, "scale_a: got torch.float16, want torch.float32"),
    "scale type": ({"scale_b": "1"}, TypeError, "scale_b: got str, want a number or a tensor"),
    "scale of a": (
        {"scale_a": torch.ones(3, 2)}, ValueError, r"scale_a: got shape \(3, 2\), want one element, \(3, 1\) or \(3, 3\)"
    ),
    "scale of b": (
        {"scale_b": torch.ones(4)}, ValueError, r"scale_b: got shape \(4,\), want one element, \(1, 4\) or \(3, 1\)"
    ),
    "scale device": ({"scale_a": torch.ones(3, 1, device="meta")}, ValueError, "scale_a: got device meta, want that"),
    "out dtype": ({"out": torch.zeros(3, 4)}, TypeError, "out: got torch.float32, want torch.bfloat16"),
    "out_dtype": ({"out_dtype": E4M3}, TypeError, "out_dtype: got torch.float8_e4m3fn, want float32"),
    "backend": ({"backend": "cuda"}, ValueError, "backend: got 'cuda', want one of cpu, triton"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_error(case: str) -> None:
    change, error, message = CASES[case]
    arguments = {"a": codes(3, 300), "b": codes(300, 4)} | change
    with pytest.raises(error, match=message):
        scaled_matmul(arguments.pop("a"), arguments.pop("b"), **arguments)

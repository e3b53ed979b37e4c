"""`matmul` through the portable kernel: shapes, splits, strides, epilogues. The interpreter: 4 workers, 16 x 16 x 16 tiles."""

from __future__ import annotations

import pytest
import torch

from evenshare.device.workspace import stream_workspace
from evenshare.gemm import launch, matmul
from evenshare.gemm.plan import INTERPRETER_TILE, GemmPlan
from evenshare.schedule.plan import UniformPlan
from evenshare.schedule.uniform import uniform_plan
from tests.gemm.helpers import assert_gated, assert_product


def force_plan(monkeypatch: pytest.MonkeyPatch, num_workers: int) -> list[UniformPlan]:
    """Every product runs on `num_workers` workers and small tiles; the plans used are listed."""
    used: list[UniformPlan] = []
    tile = INTERPRETER_TILE

    def plan(m: int, n: int, k: int, *rest: int, **_: object) -> GemmPlan:
        num_tiles = rest[-1] * -(-m // tile.block_m) * -(-n // tile.block_n)  # the batch comes last
        used.append(uniform_plan(num_tiles, -(-k // tile.block_k), num_workers))
        return GemmPlan(tile, used[-1])

    monkeypatch.setattr(launch, "plan_matmul", plan)
    return used


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (1, 37, 100), (16, 16, 16), (17, 15, 33), (33, 50, 40), (3, 5, 250), (150, 20, 20)]
)
def test_shapes(m: int, n: int, k: int, device: torch.device) -> None:
    a, b = torch.randn(m, k, device=device), torch.randn(k, n, device=device)
    assert_product(matmul(a, b, backend="triton"), a, b)


# One tile, fewer tiles than workers, one to two tiles a worker, whole waves and a tail, no tail; a share is empty at none.
@pytest.mark.parametrize(
    ("num_workers", "m", "n", "k"),
    [(13, 16, 16, 205), (7, 40, 20, 60), (4, 40, 20, 60), (2, 50, 20, 40), (3, 70, 20, 35), (3, 48, 16, 40)],
)
def test_every_kind_of_split(
    num_workers: int, m: int, n: int, k: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_plan(monkeypatch, num_workers)
    a, b, bias = (torch.randn(s, device=device) for s in ((m, k), (k, n), (n,)))
    assert_product(matmul(a, b, bias=bias, activation="silu", backend="triton"), a, b, bias, "silu")


def test_fewer_workers_than_tiles_walk_row_groups(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """More row tiles than a group of the tile order holds, and a last group that is not full."""
    used = force_plan(monkeypatch, 5)
    a, b = torch.randn(11 * 16 - 3, 16, device=device), torch.randn(16, 3 * 16, device=device)
    assert_product(matmul(a, b, backend="triton"), a, b)
    assert used[0].num_whole == 25
    assert used[0].num_tiles == 33


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("k", [0, 40])
def test_epilogue(activation: str | None, k: int, device: torch.device) -> None:
    a, b, bias = (torch.randn(s, device=device) for s in ((5, k), (k, 20), (20,)))
    assert_product(matmul(a, b, bias=bias, activation=activation, backend="triton"), a, b, bias, activation)


@pytest.mark.parametrize("activation", ["silu_and_multiply", "gelu_and_multiply", "gelu_tanh_and_multiply"])
@pytest.mark.parametrize(("n", "transposed"), [(2, False), (30, True), (32, False), (74, False)])
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_gated(
    backend: str, n: int, transposed: bool, activation: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_plan(monkeypatch, 5)
    a, bias, residual = (torch.randn(s, device=device) for s in ((19, 70), (n,), (19, n // 2)))
    b = torch.randn(n, 70, device=device).T if transposed else torch.randn(70, n, device=device)
    y = matmul(a, b, bias=bias, activation=activation, residual=residual, backend=backend)
    assert_gated(y, a, b, bias, activation, residual)


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_residual_of_any_strides_and_dtype(backend: str, activation: str | None, device: torch.device) -> None:
    a, b = torch.randn(2, 5, 40, device=device), torch.randn(40, 20, device=device)
    base = torch.randn(20, 10, 2, device=device)
    residuals = [
        base.permute(2, 1, 0)[:, ::2],
        base[:, :5, :].permute(2, 1, 0).half(),
        torch.randn(20, device=device).double().expand(2, 5, 20),
    ]
    plain = matmul(a, b, activation=activation, backend=backend)
    for residual in residuals:
        y = matmul(a, b, activation=activation, residual=residual, backend=backend)
        assert y.dtype == a.dtype
        # One rounding of the sum, and what contraction of the activation's last product and the sum may save.
        bound = torch.finfo(y.dtype).eps * (plain.double().abs() + residual.double().abs())
        assert ((y.double() - plain.double() - residual.double()).abs() <= bound).all()


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_residual_may_be_the_output(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    force_plan(monkeypatch, 5)
    a, b = torch.randn(19, 70, device=device), torch.randn(70, 20, device=device)
    base = torch.randn(40, 19, device=device)
    out = base[::2].T
    want = matmul(a, b, residual=out.clone(), backend=backend)
    assert matmul(a, b, residual=out, out=out, backend=backend) is out
    assert torch.equal(out, want)
    out3 = torch.randn(1, 19, 20, device=device)
    want = matmul(a[None], b, residual=out3.clone(), backend=backend)
    assert matmul(a[None], b, residual=out3, out=out3, backend=backend) is out3
    assert torch.equal(out3, want)


def test_k_zero_without_bias_is_zero(device: torch.device) -> None:
    out = torch.full((5, 20), float("nan"), device=device)
    matmul(torch.empty(5, 0, device=device), torch.empty(0, 20, device=device), out=out, backend="triton")
    assert (out == 0).all()


@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.float32, torch.float64])
def test_float16_with_bias_of_any_float_dtype(bias_dtype: torch.dtype, device: torch.device) -> None:
    a, b = torch.randn(9, 90, device=device).half(), torch.randn(90, 20, device=device).half()
    bias = torch.randn(40, device=device).to(bias_dtype)[::2]
    assert_product(matmul(a, b, bias=bias, activation="relu", backend="triton"), a, b, bias, "relu")


def test_float16_sums_in_float32(device: torch.device) -> None:
    """Partial sums beyond float16's range (65504) that cancel: no partial result is kept in 16 bits."""
    a = torch.full((1, 128), 100.0, device=device).half()
    b = torch.full((128, 1), 100.0, device=device).half()
    b[64:] = -100.0
    assert matmul(a, b, backend="triton").item() == 0.0


@pytest.mark.parametrize("transposed", [False, True])
def test_strides(transposed: bool, device: torch.device) -> None:
    """Column-major, every second row, sliced columns; `out` too, with its gaps left alone."""
    a = torch.randn(70, 36, device=device)[::2, 3:].T if transposed else torch.randn(66, 40, device=device)[::2, 2:37]
    b = torch.randn(a.shape[1], 50, device=device)[:, ::2]
    b = b if transposed else torch.randn(25, a.shape[1], device=device).T
    base = torch.full((2 * a.shape[0], 30), 7.0, device=device)
    out = base[::2, 1:26]
    assert matmul(a, b, out=out, backend="triton") is out
    assert_product(out, a, b)
    assert (base[1::2] == 7.0).all()
    assert (base[:, 0] == 7.0).all()
    assert (base[:, 26:] == 7.0).all()


def test_nan_outside_the_operands_is_not_read(device: torch.device) -> None:
    a_base, b_base = (
        torch.full((20, 40), float("nan"), device=device),
        torch.full((40, 40), float("nan"), device=device),
    )
    a, b = a_base[:5, :21], b_base[:21, :7]
    a.copy_(torch.randn(5, 21))
    b.copy_(torch.randn(21, 7))
    assert_product(matmul(a, b, backend="triton"), a, b)


def test_expanded_operands(device: torch.device) -> None:
    a, b = torch.randn(1, 20, device=device).expand(18, 20), torch.randn(20, 1, device=device).expand(20, 3)
    assert_product(matmul(a, b, backend="triton"), a, b)


@pytest.mark.parametrize("leading", [(), (2, 3), (2, 0), (1, 2, 2)])
def test_leading_dims(leading: tuple[int, ...], device: torch.device) -> None:
    a, b = torch.randn(*leading, 20, device=device), torch.randn(20, 6, device=device)
    out = torch.full((*leading, 6), float("nan"), device=device)
    assert matmul(a, b, out=out, backend="triton") is out
    y = matmul(a, b, backend="triton")
    assert torch.equal(y, out)
    assert y.shape == (*leading, 6)
    if y.numel():
        assert_product(y, a, b)


def test_leading_dims_that_are_no_view(device: torch.device) -> None:
    a, b = torch.randn(2, 9, 20, device=device)[:, 3:], torch.randn(20, 6, device=device)
    out = torch.empty(2, 12, 6, device=device)[:, ::2]
    assert_product(matmul(a, b, out=out, backend="triton"), a, b)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 7), (5, 0, 7), (0, 0, 0), (0, 5, 0)])
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_empty_results(m: int, n: int, k: int, backend: str, device: torch.device) -> None:
    y = matmul(torch.empty(m, k, device=device), torch.empty(k, n, device=device), backend=backend)
    assert y.shape == (m, n)


def test_launches_are_independent(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alternating inputs on one workspace: same bits as the first time, and counters are zero after each launch."""
    force_plan(monkeypatch, 5)
    a, b = torch.randn(2, 20, 100, device=device), torch.randn(100, 20, device=device)
    first = [matmul(x, b, backend="triton") for x in a]
    assert not torch.equal(*first)
    for _ in range(3):
        for x, want in zip(a, first, strict=True):
            assert torch.equal(matmul(x, b, backend="triton"), want)
            assert not stream_workspace(0, 0, first[0].device).counters.any()


def test_stale_partials_are_not_read(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    force_plan(monkeypatch, 5)
    a, b = torch.randn(20, 100, device=device), torch.randn(100, 20, device=device)
    matmul(a, b, backend="triton")
    stream_workspace(0, 0, b.device).partials.fill_(float("nan"))
    assert_product(matmul(a, b, backend="triton"), a, b)


def test_nan_in_one_row_stays_in_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    force_plan(monkeypatch, 5)
    a, b = torch.randn(20, 100, device=device), torch.randn(100, 20, device=device)
    a[3, 50] = float("nan")
    y = matmul(a, b, activation="relu", backend="triton")
    assert y[3].isnan().all()
    assert y.isnan().sum() == 20


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize(
    ("batch", "m", "n", "k"), [(1, 5, 7, 9), (3, 19, 33, 50), (5, 1, 4, 100), (2, 4, 3, 0), (0, 3, 3, 3)]
)
def test_batch(
    batch: int, m: int, n: int, k: int, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the strides between the products of a batch are, that of a product given many times too."""
    if batch * m * n * k:
        force_plan(monkeypatch, 5)
    a = torch.randn(m, batch, 2 * k, device=device)[:, :, ::2].transpose(0, 1)
    b, shared = torch.randn(batch, n, k, device=device).mT, torch.randn(k, n, device=device).expand(batch, k, n)
    base = torch.randn(n, m, 2 * batch, device=device)
    for right in (b, shared):
        residual, out = base.permute(2, 1, 0)[::2], torch.full((batch, n, m), torch.nan, device=device).mT
        y = matmul(a, right, activation="relu", residual=residual, out=out, backend=backend)
        assert y is out
        want = (a.double() @ right.double()).relu() + residual
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5 * max(k, 1) ** 0.5)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("activation", [None, "silu_and_multiply"])
def test_alpha_beta_and_accumulation(
    activation: str | None, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_plan(monkeypatch, 5)
    a, b, bias = (torch.randn(s, device=device) for s in ((19, 70), (70, 24), (24,)))
    residual = torch.randn(19, 12 if activation else 24, device=device)
    wide = [t.double() for t in (a, b, bias)]
    product = 0.25 * wide[0] @ wide[1] + wide[2]
    if activation:
        gate, up = product.chunk(2, 1)
        product = torch.nn.functional.silu(gate) * up
    want = product - 3 * residual.double()
    y = matmul(a, b, bias=bias, activation=activation, residual=residual, alpha=0.25, beta=-3, backend=backend)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=2e-5)
    assert matmul(a, b, bias=bias, activation=activation, residual=residual, out=residual, alpha=0.25, beta=-3,
                  backend=backend) is residual  # fmt: skip
    assert torch.equal(residual, y)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_output_of_another_dtype(backend: str, device: torch.device) -> None:
    """float16 operands, and the float32 sum as it is."""
    a, b = torch.randn(9, 90, device=device).half(), torch.randn(90, 20, device=device).half()
    y = matmul(a, b, out_dtype=torch.float32, backend=backend)
    assert y.dtype == torch.float32
    tolerance = 1e-5 if backend == "triton" else 1e-2
    torch.testing.assert_close(y.double(), a.double() @ b.double(), rtol=tolerance, atol=tolerance)
    out = torch.empty(20, 9, dtype=torch.bfloat16, device=device).T
    assert matmul(a, b, out=out, out_dtype=torch.bfloat16, backend=backend) is out
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-2, atol=5e-2)

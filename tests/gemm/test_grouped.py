"""`grouped_matmul` against a loop over groups in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from evenshare.device.workspace import stream_workspace
from evenshare.gemm import grouped_matmul, reference
from evenshare.gemm import plan as gemm_plan
from evenshare.gemm.epilogue import Epilogue
from evenshare.gemm.plan import plan_grouped

BACKENDS = ("cpu", "triton")
# Rows of each group: even and uneven, empty at both ends and between, one with all, none at all, fewer than a tile and several.
DEALS = ([3, 1, 4, 2], [0, 5, 0, 0, 7, 0], [0, 0, 40], [40, 0, 0], [0, 0, 0], [1], [17, 16, 15, 1, 0, 33])


@pytest.fixture(autouse=True, params=[1, 4])
def _split_small_problems(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of one k-step, so that tiny shapes are split and merged too, and of as many as usual."""
    monkeypatch.setattr(gemm_plan, "MIN_STEPS_PER_SHARE", request.param)


def offsets_of(rows: list[int], device: torch.device, first: int = 0) -> torch.Tensor:
    return torch.tensor([*itertools.accumulate(rows, initial=first)], dtype=torch.int32, device=device)


def expected(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(row -> its float64 result, whether the row is any group's)."""
    bias, gather = options.get("bias"), options.get("gather")
    rows = x.double()
    if gather is not None:
        padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        inside = (gather >= 0) & (gather < x.shape[0])
        rows = padded[torch.where(inside, gather, x.shape[0]).long()]
    n_out = w.shape[2] // 2 if (options.get("activation") or "").endswith("multiply") else w.shape[2]
    want, dealt = rows.new_zeros(rows.shape[0], n_out), torch.zeros(rows.shape[0], dtype=torch.bool, device=x.device)
    for group, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        bias_of = None if bias is None else bias[group].double()
        want[begin:end] = reference.matmul(
            rows[begin:end], w[group].double(), Epilogue(bias_of, options.get("activation"))
        )
        dealt[begin:end] = True
    return want, dealt


def check(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, backend: str, **options: Any) -> None:
    want, dealt = expected(x, w, offsets, **options)
    scatter, out = options.get("scatter"), options.get("out")
    before = None if out is None else out.clone()
    y = grouped_matmul(x, w, offsets, backend=backend, **options)
    assert out is None or y is out
    if scatter is not None:
        full = torch.zeros(y.shape, dtype=torch.float64, device=y.device) if before is None else before.double()
        goes = dealt & (scatter >= 0) & (scatter < y.shape[0])
        full[scatter[goes].long()] = want[goes]
        want = full
    assert y.dtype == x.dtype
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-2}[x.dtype]
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance * max(x.shape[1], 1) ** 0.5)


@pytest.mark.parametrize("rows", DEALS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_deal(backend: str, rows: list[int], device: torch.device) -> None:
    x, w = torch.randn(sum(rows), 70, device=device), torch.randn(len(rows), 70, 37, device=device)
    check(x, w, offsets_of(rows, device), backend)
    assert not stream_workspace(0, 0, x.device).counters.any()


@pytest.mark.parametrize("activation", [None, "relu", "silu_and_multiply", "gelu_and_multiply"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_epilogue_and_strides(backend: str, activation: str | None, device: torch.device) -> None:
    x = torch.randn(22, 100, device=device)[:, ::2].half()
    w = torch.randn(5, 40, 50, device=device).mT.half()
    bias = torch.randn(40, 5, device=device).T
    out = torch.full((20 if activation and "multiply" in activation else 40, 22), 7.0, dtype=x.dtype, device=device).T
    check(x, w, offsets_of([0, 18, 3, 0, 1], device), backend, bias=bias, activation=activation, out=out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_no_groups_are_zero(backend: str, device: torch.device) -> None:
    x, w = torch.randn(30, 24, device=device), torch.randn(2, 24, 18, device=device)
    out = torch.full((30, 18), torch.nan, device=device)
    check(x, w, offsets_of([4, 9], device, first=3), backend, out=out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mixture_of_experts(backend: str, device: torch.device) -> None:
    """Two experts a token: rows gathered by token, results scattered to (token, choice)."""
    tokens, experts, choices = 13, 6, 2
    chosen = torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)]).flatten().to(device)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=experts).tolist()
    x, w = torch.randn(tokens, 64, device=device), torch.randn(experts, 64, 34, device=device)
    gather, scatter = (order // choices).int(), order.int()
    y = grouped_matmul(x, w, offsets_of(counts, device), gather=gather, scatter=scatter, backend=backend)
    want = torch.einsum("tk,tckn->tcn", x.double(), w[chosen].double().view(tokens, choices, 64, 34))
    torch.testing.assert_close(y.double().view(tokens, choices, 34), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gather_and_scatter(backend: str, device: torch.device) -> None:
    """Rows used twice, rows outside x that count as zeros, rows outside out that go nowhere, rows of out that nobody names."""
    x, w = torch.randn(9, 33, device=device), torch.randn(3, 33, 20, device=device)
    offsets = offsets_of([5, 0, 7], device, first=1)
    gather = torch.tensor([0, 8, 8, -1, 9, 3, 2, 2**31 - 1, 1, 0, 4, 5, 6], dtype=torch.int32, device=device)
    scatter = torch.randperm(16, device=device)[:13].int()
    scatter[4], scatter[9] = -3, 2**31 - 1
    check(x, w, offsets, backend, gather=gather)
    check(x, w, offsets, backend, gather=gather, scatter=scatter, out=torch.full((16, 20), 3.0, device=device))
    check(x, w, offsets_of([4, 3, 2], device), backend, scatter=torch.randperm(9, device=device).int())


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend: str, device: torch.device) -> None:
    for m, k, n in ((0, 5, 6), (4, 0, 6), (4, 5, 0)):
        x, w = torch.randn(m, k, device=device), torch.randn(2, k, n, device=device)
        y = grouped_matmul(x, w, offsets_of([m, 0], device), backend=backend)
        assert y.shape == (m, n)
        assert not y.any()


def test_the_same_bits_again(device: torch.device) -> None:
    x, w = torch.randn(40, 200, device=device), torch.randn(4, 200, 50, device=device)
    offsets = offsets_of([1, 30, 0, 9], device)
    first = grouped_matmul(x, w, offsets, backend="triton")
    grouped_matmul(x, w, offsets_of([20, 0, 20, 0], device), backend="triton")
    assert torch.equal(grouped_matmul(x, w, offsets, backend="triton"), first)


X, W, OFFSETS = torch.ones(4, 6), torch.ones(2, 6, 8), torch.tensor([0, 1, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": X.double()}, TypeError, "x: got torch.float64"),
        ({"w": W.half()}, TypeError, "w: got torch.float16, want that of x"),
        ({"w": W[:, :5]}, ValueError, r"w: got shape \(2, 5, 8\)"),
        ({"w": W[:0]}, ValueError, "one group at least"),
        ({"x": X[0]}, ValueError, r"x: got shape \(6,\)"),
        ({"offsets": OFFSETS.long()}, TypeError, "offsets: got torch.int64"),
        ({"offsets": OFFSETS[:2]}, ValueError, r"offsets: got shape \(2,\), want \[3\]"),
        ({"offsets": OFFSETS.flip(0)}, ValueError, "want them not to decrease"),
        ({"offsets": OFFSETS + 1}, ValueError, "from 0 to 4 rows"),
        ({"bias": torch.ones(2, 4)}, ValueError, r"bias: got shape \(2, 4\), want \[2, 8\]"),
        ({"activation": "tanh"}, ValueError, "activation: got 'tanh'"),
        ({"gather": torch.zeros(4)}, TypeError, "gather: got torch.float32"),
        ({"gather": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, "gather: got shape"),
        ({"scatter": torch.zeros(3, dtype=torch.int32)}, ValueError, r"scatter: got shape \(3,\), want \[4\]"),
        ({"out": torch.ones(5, 8)}, ValueError, r"out: got shape \(5, 8\), want \(4, 8\)"),
        ({"out": torch.ones(4, 8).half()}, TypeError, "out: got torch.float16"),
        ({"out": [1]}, TypeError, "out: got list"),
    ],
)
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"x": X, "w": W, "offsets": OFFSETS} | changes
    with pytest.raises(error, match=message):
        grouped_matmul(arguments.pop("x"), arguments.pop("w"), arguments.pop("offsets"), **arguments)


def test_the_plan_has_room_for_any_deal() -> None:
    tile, num_workers = plan_grouped(4096, 64, 2048, 4096, 2, 132)
    assert num_workers == 132 * tile.workers_per_sm
    assert plan_grouped(1, 64, 64, 64, 2, 132)[1] == 1
    assert tile.block_m <= 64

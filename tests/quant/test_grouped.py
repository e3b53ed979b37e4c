"""`grouped_w4a16_matmul` against a loop over experts in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from evenshare.device.workspace import stream_workspace
from evenshare.quant import ExpertWeights, concatenate, grouped_w4a16_matmul, prepare, reference
from evenshare.quant import plan as quant_plan
from evenshare.quant.plan import plan_grouped
from tests.quant.helpers import random_permutation, random_weight

BACKENDS = ("cpu", "triton")
# Rows of each expert: even and uneven, empty at both ends and between, one with all, none at all, fewer than a tile and several.
DEALS = ([3, 1, 4, 2], [0, 5, 0, 0, 7, 0], [0, 0, 40], [40, 0, 0], [0, 0, 0], [1], [17, 16, 15, 1, 0, 33])


@pytest.fixture(autouse=True, params=[1, 8])
def _split_small_problems(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of one k-step, so that tiny shapes are split and merged too, and of as many as usual."""
    monkeypatch.setattr(quant_plan, "MIN_STEPS_PER_SHARE", request.param)


def offsets_of(rows: list[int], device: torch.device, first: int = 0) -> torch.Tensor:
    return torch.tensor([first, *itertools.accumulate(rows, initial=first)][1:], dtype=torch.int32, device=device)


def assert_grouped(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: ExpertWeights,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> None:
    """float32: each sum within the probabilistic bound of k terms (`assert_product`) of the loop in float64, through an activation
    of slope below 1.2 and a gate, and then some roundings."""
    n_out = weights.n // 2 if (activation or "").endswith("multiply") else weights.n
    assert y.shape == (x.shape[0], n_out)
    want = torch.zeros(y.shape, dtype=torch.float64, device=y.device)
    bound = torch.zeros_like(want)
    for i, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        rows, weight = x[begin:end], weights.weight.narrow(i * weights.n, (i + 1) * weights.n)
        bias_of = None if bias is None else bias[i]
        want[begin:end] = reference.matmul(rows, weight, bias_of, activation)
        spread = rows.double().abs() @ weight.dequantize().double().abs().T + (0 if bias is None else bias[i].abs())
        spread *= 1.2 * (x.shape[1] ** 0.5 / 2 + 2)
        if n_out == weights.n:
            bound[begin:end] = spread
        else:
            gate, up = reference.matmul(rows, weight, bias_of).chunk(2, 1)
            bound[begin:end] = spread[:, :n_out] * up.abs() + gate.abs() * spread[:, n_out:] + 4 * (gate * up).abs()
    assert ((y.double() - want).abs() <= torch.finfo(x.dtype).eps * (bound + 4 * want.abs())).all()


@pytest.mark.parametrize("rows", DEALS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_deal(backend: str, rows: list[int], device: torch.device) -> None:
    weights = ExpertWeights(random_weight(len(rows) * 72, 300, 32, "offsets", device=device), len(rows))
    x = torch.randn(sum(rows), 300, device=device)
    offsets = offsets_of(rows, device)
    assert_grouped(grouped_w4a16_matmul(x, weights, offsets, backend=backend), x, weights, offsets)
    assert not stream_workspace(0, 0, x.device).counters.any()


@pytest.mark.parametrize("activation", ["relu", "silu_and_multiply", "gelu_and_multiply"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_epilogue(backend: str, activation: str, device: torch.device) -> None:
    rows = [0, 18, 3, 0, 1]
    weights = ExpertWeights(random_weight(5 * 70, 200, 16, "e2m1", device=device), 5)
    x, bias = torch.randn(22, 400, device=device)[:, ::2], torch.randn(70, 5, device=device).T
    out = torch.full((35 if "multiply" in activation else 70, 22), 7.0, device=device).T
    offsets = offsets_of(rows, device)
    assert grouped_w4a16_matmul(x, weights, offsets, bias=bias, activation=activation, out=out, backend=backend) is out
    assert_grouped(out, x, weights, offsets, bias, activation)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_nobody_are_zero(backend: str, device: torch.device) -> None:
    weights = ExpertWeights(random_weight(3 * 40, 64, 16, device=device), 3)
    x = torch.full((60, 64), float("nan"), device=device)
    x[5:25] = torch.randn(20, 64, device=device)
    offsets = offsets_of([2, 0, 18], device, first=5)
    out = torch.full((60, 40), float("nan"), device=device)
    grouped_w4a16_matmul(x, weights, offsets, out=out, backend=backend)
    assert (out[:5] == 0).all()
    assert (out[25:] == 0).all()
    assert_grouped(out[5:25], x[5:25], weights, offsets - 5)


@pytest.mark.parametrize("num_rows", [20, 70])
@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_that_share_a_permutation(backend: str, num_rows: int, device: torch.device) -> None:
    permutation = random_permutation(100, 28)
    parts = [random_weight(24, 100, 16, "zeros", device=device, permutation=permutation) for _ in range(3)]
    weights = ExpertWeights(concatenate(parts), 3)
    x = torch.randn(num_rows, 100, device=device)
    offsets = offsets_of([num_rows - 12, 0, 12], device)
    assert_grouped(grouped_w4a16_matmul(x, weights, offsets, backend=backend), x, weights, offsets)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str, device: torch.device) -> None:
    weights = ExpertWeights(random_weight(3 * 40, 64, 16, device=device), 3)
    y = grouped_w4a16_matmul(torch.randn(0, 64, device=device), weights, offsets_of([0, 0, 0], device), backend=backend)
    assert y.shape == (0, 40)


def test_new_offsets_in_the_same_tensors_repeat_bit_for_bit(device: torch.device) -> None:
    weights = prepare(ExpertWeights(random_weight(4 * 40, 1024, 32, device=device), 4), torch.float32, "triton")
    assert list(weights.weight.packed) == [("triton", 4)]
    x, offsets = torch.randn(40, 1024, device=device), offsets_of([10] * 4, device)
    deals = [offsets_of(rows, device) for rows in ([10] * 4, [0, 40, 0, 0], [1, 2, 3, 34])]
    first = []
    for deal in deals:
        offsets.copy_(deal)
        first.append(grouped_w4a16_matmul(x, weights, offsets, backend="triton"))
        assert_grouped(first[-1], x, weights, deal)
    for deal, y in zip(deals, first, strict=True):
        offsets.copy_(deal)
        assert torch.equal(grouped_w4a16_matmul(x, weights, offsets, backend="triton"), y)


def test_prepared_experts_are_packed_once_on_the_cpu() -> None:
    weights = prepare(ExpertWeights(random_weight(2 * 32, 64, 32), 2), torch.bfloat16)
    packed = [dict(expert.packed) for expert in weights.experts]
    assert all(packed)
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    grouped_w4a16_matmul(torch.randn(5, 64).bfloat16(), weights, offsets)
    assert [expert.packed for expert in weights.experts] == packed


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 5000])
@pytest.mark.parametrize("num_experts", [1, 8, 128])
def test_programs_are_enough_for_every_deal(num_tokens: int, num_experts: int) -> None:
    tile, num_workers = plan_grouped(num_tokens, num_experts, 512, 32, 2, 132)
    assert 1 <= num_workers <= 132 * tile.workers_per_sm
    shares = max(1, 32 // quant_plan.MIN_STEPS_PER_SHARE)
    tiles_n = -(-512 // tile.block_n)
    for rows in ([num_tokens], [1] * min(num_tokens, num_experts - 1) + [max(num_tokens - num_experts + 1, 0)]):
        row_tiles = sum(-(-count // tile.block_m) for count in rows)
        assert num_workers >= min(row_tiles * tiles_n * shares, 132 * tile.workers_per_sm)


X = torch.zeros(5, 32)
WEIGHTS = ExpertWeights(random_weight(3 * 4, 32, 16), 3)
OFFSETS = torch.tensor([0, 2, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weights": WEIGHTS.weight}, TypeError, "weights: got QuantizedWeight, want ExpertWeights"),
        (
            {"weights": ExpertWeights(random_weight(4, 32, 16, bits=8), 2)},
            ValueError,
            "weights: got 8-bit codes, want 4",
        ),
        ({"x": X[None]}, ValueError, r"x: got shape \(1, 5, 32\), want \[num_tokens, 32\]"),
        ({"x": X[:, 1:]}, ValueError, r"x: got shape \(5, 31\)"),
        ({"offsets": OFFSETS.long()}, TypeError, "offsets: got torch.int64, want torch.int32"),
        ({"offsets": OFFSETS[1:]}, ValueError, r"offsets: got shape \(3,\), want \[4\]"),
        ({"offsets": OFFSETS.to("meta")}, ValueError, "offsets: got device meta, want that of x, cpu"),
        (
            {"offsets": OFFSETS.flip(0)},
            ValueError,
            r"offsets: got \[5, 2, 2, 0\], want them not to decrease, from 0 to 5",
        ),
        ({"offsets": OFFSETS + 1}, ValueError, r"offsets: got \[1, 3, 3, 6\]"),
        ({"offsets": OFFSETS - 1}, ValueError, r"offsets: got \[-1, 1, 1, 4\]"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias: got shape \(4,\), want \[3, 4\]"),
        ({"bias": torch.zeros(3, 4).int()}, TypeError, "bias: got torch.int32, want a floating-point tensor"),
        ({"bias": torch.zeros(3, 4, device="meta")}, ValueError, "bias: got device meta, want that of x, cpu"),
        ({"activation": "tanh"}, ValueError, "activation: got 'tanh'"),
        ({"out": torch.zeros(5, 5)}, ValueError, r"out: got shape \(5, 5\), want \(5, 4\)"),
        ({"backend": "cuda"}, ValueError, "backend: got 'cuda', want one of cpu, triton or None"),
    ],
)
def test_refuses(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"x": X, "weights": WEIGHTS, "offsets": OFFSETS} | change
    with pytest.raises(error, match=message):
        grouped_w4a16_matmul(**arguments)  # type: ignore[arg-type]


def test_experts_refuse() -> None:
    with pytest.raises(ValueError, match="num_experts: got 5, want at least 1 and a divisor of the 12 rows of weight"):
        ExpertWeights(WEIGHTS.weight, 5)
    with pytest.raises(TypeError, match="weight: got Tensor, want a QuantizedWeight"):
        ExpertWeights(X, 1)  # type: ignore[arg-type]

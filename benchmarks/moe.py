"""Products of a mixture of experts in one layer: 4-bit weights in groups of 128 and the same in bf16, bf16 activations.

Rows lie sorted by expert, tokens x top k of them. Random routings rotate, so that few tokens find no weights in the L2. Against
torch's grouped product and a loop of torch.mm over the experts that have rows, whose sizes the host knows; both on bf16 weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from benchmarks import harness, peers
from benchmarks.results import Row, geomean
from evenshare import QuantizedWeight
from evenshare.gemm import grouped_matmul
from evenshare.quant import ExpertWeights, grouped_w4a16_matmul, prepare

USUAL_PEERS = ("torch-grouped", "torch-loop")
GROUP_SIZE = 128
DTYPE = torch.bfloat16
BF16 = "ours in bf16"
TOKENS = (1, 4, 16, 64, 256, 512, 4096)
FEW_TOKENS = 512
NUM_ROUTINGS = 4  # 1 token of the smallest case reads 58 MB of 4-bit weights: together 235 MB
MAX_ERROR = 1e-2  # weights rounded to bf16 once, output once


@dataclass(frozen=True)
class Layer:
    """The weights [n, k] of all experts, of which each token takes top_k."""

    name: str
    num_experts: int
    top_k: int
    n: int
    k: int


LAYERS = (
    Layer("Mixtral 8x7B gate", 8, 2, 14336, 4096),
    Layer("Mixtral 8x7B down", 8, 2, 4096, 14336),
    Layer("DeepSeek-V3 gate", 256, 8, 2048, 7168),
)


@dataclass(frozen=True)
class Case:
    layer: Layer
    num_tokens: int

    @property
    def title(self) -> str:
        return (
            f"{self.layer.name}, {self.layer.num_experts} x {self.layer.n} x {self.layer.k}, tokens={self.num_tokens}"
        )


CASES = [Case(layer, num_tokens) for layer in LAYERS for num_tokens in TOKENS]


@dataclass(frozen=True)
class Routing:
    """Rows of x by expert: where they begin, on the device and on the host."""

    x: torch.Tensor  # [num_tokens * top_k, k]
    offsets: torch.Tensor  # int32 [num_experts + 1]
    bounds: list[int]


@lru_cache(maxsize=1)
def make_weights(layer: Layer, device: torch.device) -> tuple[ExpertWeights, torch.Tensor]:
    """4-bit weights of random codes, and the same in bf16 [num_experts, n, k]."""
    rows = layer.num_experts * layer.n
    codes = torch.randint(256, (rows, layer.k // 2), dtype=torch.uint8, device=device)
    scales = torch.rand(rows, layer.k // GROUP_SIZE, device=device).to(DTYPE) / layer.k**0.5
    weights = ExpertWeights(QuantizedWeight(codes, scales, layer.k, GROUP_SIZE), layer.num_experts)
    dense = torch.empty(layer.num_experts, layer.n, layer.k, dtype=DTYPE, device=device)
    for into, expert in zip(dense, weights.experts, strict=True):
        into.copy_(expert.dequantize(DTYPE))
    return prepare(weights, DTYPE), dense


def make_routing(case: Case, device: torch.device) -> Routing:
    """Every token takes top_k different experts, each as likely as the others."""
    layer = case.layer
    chosen = torch.rand(case.num_tokens, layer.num_experts, device=device).topk(layer.top_k).indices
    counts = torch.bincount(chosen.flatten(), minlength=layer.num_experts)
    bounds = [0, *itertools.accumulate(counts.tolist())]
    x = torch.randn(bounds[-1], layer.k, dtype=DTYPE, device=device)
    return Routing(x, torch.tensor(bounds, dtype=torch.int32, device=device), bounds)


def loop(routing: Routing, product: Callable[[torch.Tensor, int], torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """product(rows, expert) of the experts that have rows, into out."""
    for expert, (begin, end) in enumerate(itertools.pairwise(routing.bounds)):
        if begin < end:
            out[begin:end] = product(routing.x[begin:end], expert)
    return out


def warm_up(bench: harness.Bench, layer: Layer) -> None:
    """Compile what the layer's cases take."""
    weights, dense = make_weights(layer, bench.device)
    cases = [case for case in CASES if case.layer == layer and bench.wants(case.title)]
    calls: list[harness.Call] = []
    for routing in [make_routing(case, bench.device) for case in cases]:
        calls.append(partial(grouped_w4a16_matmul, routing.x, weights, routing.offsets))
        calls.append(partial(grouped_matmul, routing.x, dense.mT, routing.offsets))
    bench.warm_up(calls)


def measure(bench: harness.Bench, case: Case) -> Row:
    layer = case.layer
    weights, dense = make_weights(layer, bench.device)
    routings = [make_routing(case, bench.device) for _ in range(NUM_ROUTINGS)]
    first = routings[0]

    def call(function: Callable[..., torch.Tensor], operand: object, routing: Routing) -> harness.Call:
        out = torch.full((routing.bounds[-1], layer.n), float("nan"), dtype=DTYPE, device=bench.device)
        return partial(function, routing.x, operand, routing.offsets, out=out)

    reference = loop(
        first,
        lambda rows, expert: rows.float() @ weights.experts[expert].dequantize().T,
        torch.empty(first.bounds[-1], layer.n, device=bench.device),
    )
    num_rows, touched = first.bounds[-1], sum(begin < end for begin, end in itertools.pairwise(first.bounds))
    row = bench.compare(
        case.title,
        [call(grouped_w4a16_matmul, weights, routing) for routing in routings],
        lambda name: harness.each(peers.grouped(name, r.x, dense, r.offsets, r.bounds) for r in routings),
        reference,
        MAX_ERROR,
        variants={BF16: [call(grouped_matmul, dense.mT, routing) for routing in routings]},
        flops=2 * num_rows * layer.n * layer.k,
        bytes=touched * layer.n * (layer.k // 2 + 2 * layer.k // GROUP_SIZE) + 2 * num_rows * (layer.n + layer.k),
    )
    for ours in ("ours", BF16):
        for name in USUAL_PEERS:
            bench.add_speed(row, ours, name)
    return row


def summarise(rows: list[Row], what: str) -> list[Row]:
    """The geometric mean of our speeds against the best peer's, in 4 bits and in bf16."""
    found = []
    for ours in ("ours", BF16):
        speeds = []
        for row in rows:
            others = [us for name, us in row.peers.items() if name != BF16]
            if others:
                speeds.append(min(others) / {**row.peers, "ours": row.ours}[ours])
        if speeds:
            case = f"{len(speeds)} cases of {what}: best peer's time / {ours}"
            found.append(Row(case, "x", "higher", geomean(speeds), kind="geomean", timing="graph"))
    return found


def fill(bench: harness.Bench) -> None:
    rows: dict[Case, Row] = {}

    warm: set[Layer] = set()

    def keep(bench: harness.Bench, case: Case) -> None:
        if case.layer not in warm:
            warm_up(bench, case.layer)
            warm.add(case.layer)
        rows[case] = measure(bench, case)

    bench.measure_all(CASES, keep)
    make_weights.cache_clear()
    few = [row for case, row in rows.items() if case.num_tokens <= FEW_TOKENS]
    many = [row for case, row in rows.items() if case.num_tokens > FEW_TOKENS]
    for group, what in ((few, f"up to {FEW_TOKENS} tokens"), (many, "more tokens")):
        bench.rows += summarise(group, what)


if __name__ == "__main__":
    harness.run("moe", __doc__, fill, USUAL_PEERS)

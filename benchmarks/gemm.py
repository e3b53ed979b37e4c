"""Dense products, out = a Wᵀ, inputs rotated past the L2: bf16 against cuBLAS, few rows of a model's weights as a share of the
card's read bandwidth too, fp8 against torch's scaled product, experts of uneven load against torch's grouped product and a loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from benchmarks import harness, peers
from benchmarks.results import Row, geomean
from benchmarks.timing import copies_past_l2
from evenshare import matmul, scaled_matmul
from evenshare.gemm import grouped_matmul

USUAL_PEERS = ("cublas", "torch-grouped", "torch-loop")
DTYPE = torch.bfloat16
FP8 = torch.float8_e4m3fn
MAX_ERROR = 5e-3  # one rounding to bf16
NUM_EXPERTS, MOST_ROWS = 64, 512  # of an expert


@dataclass(frozen=True)
class Case:
    """out [m, n] of bf16."""

    m: int
    n: int
    k: int
    name: str = ""

    @property
    def title(self) -> str:
        return f"{self.name}{self.m}x{self.n}x{self.k}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class Scaled(Case):
    """The same of fp8 codes."""

    scales: str = "tensors"  # or "rows": of a, and of columns of b; or "blocks" of 128 and 128 x 128

    @property
    def title(self) -> str:
        return f"fp8, scales of {self.scales}, {super().title}"


@dataclass(frozen=True)
class Grouped:
    """Experts' weights [k, n]."""

    name: str
    n: int
    k: int

    @property
    def title(self) -> str:
        return f"{NUM_EXPERTS} experts of 1 to {MOST_ROWS} rows, {self.name}, n={self.n} k={self.k}"


SHAPES = [
    Case(8192, 8192, 8192),
    Case(4096, 4096, 4096),
    Case(16384, 8192, 4096),
    Case(2048, 2048, 8192),
    Case(1024, 1024, 8192),
    Case(256, 3584, 8192),
    Case(128, 128, 16384),
    Case(1024, 1024, 1024),
    Case(128, 128, 128),
]
WEIGHTS = {  # (n, k) of q, k and v; of the output; of gate and up; of down
    "Llama-3.1 8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "Llama-3.1 70B": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
}
DECODE = [Case(m, n, k, f"{model} ") for model, found in WEIGHTS.items() for n, k in found for m in (1, 16, 64)]
SCALED = [Scaled(8192, 8192, 8192, scales=scales) for scales in ("tensors", "rows", "blocks")]
GROUPED = [
    Grouped("Mixtral gate and up", 28672, 4096),
    Grouped("Mixtral down", 4096, 14336),
    Grouped("DeepSeek-V3 gate and up", 4096, 7168),
    Grouped("DeepSeek-V3 down", 7168, 2048),
]


@lru_cache(maxsize=1)
def make_weights(n: int, k: int, copies: int, device: torch.device) -> list[torch.Tensor]:
    """W [n, k] of rows that lie side by side, as often as asked for."""
    return [torch.randn(n, k, dtype=DTYPE, device=device) for _ in range(copies)]


def measure(bench: harness.Bench, case: Case) -> Row:
    m, n, k = case.m, case.n, case.k
    traffic = 2 * (m * k + n * k + m * n)
    weights = make_weights(n, k, copies_past_l2(traffic), bench.device)
    sets = [
        (torch.randn(m, k, dtype=DTYPE, device=bench.device), weight.T,
         torch.full((m, n), float("nan"), dtype=DTYPE, device=bench.device))
        for weight in weights
    ]  # fmt: skip
    a, b, _ = sets[0]
    return bench.compare(
        case.title,
        [partial(matmul, a, b, out=out) for a, b, out in sets],
        lambda name: harness.each(peers.matmul(name, a, b) for a, b, _ in sets),
        a.float() @ b.float(),
        MAX_ERROR,
        flops=case.flops,
        bytes=traffic,
    )


def measure_decode(bench: harness.Bench, case: Case) -> Row:
    row = measure(bench, case)
    bench.add_ratio(row, "read_tb_s")
    return row


def make_scales(case: Scaled, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a and b, laid out as torch's scaled product wants them."""
    if case.scales == "tensors":
        return torch.rand((), device=device) + 0.5, torch.rand((), device=device) + 0.5
    if case.scales == "rows":
        return torch.rand(case.m, 1, device=device) + 0.5, torch.rand(1, case.n, device=device) + 0.5
    of_a = torch.rand(case.k // 128, case.m, device=device).T + 0.5
    return of_a, torch.rand(case.n // 128, case.k // 128, device=device).T + 0.5


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 numbers of codes [rows, columns] whose scales stand for 128 wherever they are not as many."""
    if scale.dim():
        for dim, size in enumerate(codes.shape):
            if scale.shape[dim] not in (1, size):
                scale = scale.repeat_interleave(128, dim)
    return codes.float() * scale


def measure_scaled(bench: harness.Bench, case: Scaled) -> Row:
    a, w = (torch.randn(rows, case.k, dtype=DTYPE, device=bench.device).to(FP8) for rows in (case.m, case.n))
    scale_a, scale_b = make_scales(case, bench.device)
    out = torch.full((case.m, case.n), float("nan"), dtype=DTYPE, device=bench.device)
    return bench.compare(
        case.title,
        partial(scaled_matmul, a, w.T, scale_a, scale_b, out=out),
        lambda name: peers.scaled_matmul(name, a, w.T, scale_a, scale_b),
        dequantize(a, scale_a) @ dequantize(w.T, scale_b),
        MAX_ERROR,
        flops=case.flops,
        bytes=case.m * case.k + case.n * case.k + 2 * case.m * case.n,
    )


def measure_grouped(bench: harness.Bench, case: Grouped) -> Row:
    rows = torch.randint(1, MOST_ROWS + 1, (NUM_EXPERTS,), generator=torch.Generator().manual_seed(0)).tolist()
    bounds = [0, *itertools.accumulate(rows)]
    offsets = torch.tensor(bounds, dtype=torch.int32, device=bench.device)
    x = torch.randn(bounds[-1], case.k, dtype=DTYPE, device=bench.device)
    w = torch.randn(NUM_EXPERTS, case.n, case.k, dtype=DTYPE, device=bench.device)
    out = torch.full((bounds[-1], case.n), float("nan"), dtype=DTYPE, device=bench.device)
    reference = torch.empty(bounds[-1], case.n, device=bench.device)
    for weight, (begin, end) in zip(w, itertools.pairwise(bounds), strict=True):
        torch.mm(x[begin:end].float(), weight.T.float(), out=reference[begin:end])
    return bench.compare(
        case.title,
        partial(grouped_matmul, x, w.mT, offsets, out=out),
        lambda name: peers.grouped(name, x, w, offsets, bounds),
        reference,
        MAX_ERROR,
        flops=2 * x.shape[0] * case.n * case.k,
        bytes=2 * (x.numel() + w.numel() + out.numel()),
    )


def warm_up(bench: harness.Bench) -> None:
    """Compile what the cases take, on operands without values."""

    def empty(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=bench.device)

    calls: list[harness.Call] = []
    for case in wanted(bench, (*SHAPES, *DECODE)):
        calls.append(partial(matmul, empty(case.m, case.k), empty(case.n, case.k).T))
    for case in wanted(bench, SCALED):
        a, w = empty(case.m, case.k, dtype=FP8), empty(case.n, case.k, dtype=FP8)
        calls.append(partial(scaled_matmul, a, w.T, *make_scales(case, bench.device)))
    bench.warm_up(calls)


def wanted(bench: harness.Bench, cases: Iterable[harness.Case]) -> list[harness.Case]:
    return [case for case in cases if bench.wants(case.title)]


def fill_table(
    bench: harness.Bench, name: str, cases: Sequence[Any], measure_one: Callable[[harness.Bench, Any], Row]
) -> None:
    """The rows of `cases`, and if all have a peer, the geometric mean of our leads."""
    leads: list[float] = []

    def keep(bench: harness.Bench, case: Any) -> None:
        lead = measure_one(bench, case).lead
        leads.extend([] if lead is None else [lead])

    bench.measure_all(cases, keep)
    make_weights.cache_clear()
    if leads and len(leads) == len(cases):
        title = f"{name}, {len(leads)} cases: best peer's time / ours"
        bench.add(Row(title, "x", "higher", geomean(leads), kind="geomean", timing="graph"))


def fill(bench: harness.Bench) -> None:
    warm_up(bench)
    fill_table(bench, "shapes", SHAPES, measure)
    fill_table(bench, "decode", DECODE, measure_decode)
    fill_table(bench, "fp8", SCALED, measure_scaled)
    fill_table(bench, "experts", GROUPED, measure_grouped)


if __name__ == "__main__":
    harness.run("gemm", __doc__, fill, USUAL_PEERS)

"""16-bit activations times 4-bit weights in groups of 128, bf16, weights rotated past the L2.

Few rows against the same in other libraries and the bf16 product that it replaces; many rows against that product; finer groups
and zero points against groups of 128 without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from benchmarks import harness, peers
from benchmarks.results import Row, geomean
from benchmarks.timing import copies_past_l2
from evenshare import QuantizedWeight, quantize, w4a16_matmul
from evenshare.quant import prepare

USUAL_PEERS = ("cublas", "torch-int4", "humming", "gemlite")
GROUP_SIZE = 128
DTYPE = torch.bfloat16
TARGETS = {  # (n, k) -> m -> microseconds
    (4096, 4096): {1: 5.8, 16: 7.0, 64: 9.5, 128: 12.0},
    (14336, 4096): {1: 12.0, 16: 13.5, 64: 19.0, 128: 28.0},
    (4096, 14336): {1: 12.0, 16: 13.5, 64: 19.0, 128: 28.0},
    (8192, 8192): {1: 13.0, 16: 14.5, 64: 21.0, 128: 31.0},
    (28672, 8192): {1: 34.0, 16: 38.0, 64: 58.0, 128: 100.0},
}
LARGEST = (28672, 8192, 1)
LARGEST_SPEED = 3.1  # of cuBLAS's there, where bytes count alone
MANY_ROWS = (2048, 8192)
MANY_ROWS_SPEED = 0.92  # of cuBLAS's, where arithmetic counts alone
FORM_SPEED = {"group 64": 1 / 1.15, "group 32": 1 / 1.15, "asymmetric": 1 / 1.1}  # of groups of 128, symmetric
MAX_ERROR = 1e-2  # weights rounded to bf16 once, output once


@dataclass(frozen=True)
class Case:
    n: int
    k: int
    m: int
    what: str = ""
    target: float | None = None  # microseconds
    speed: float | None = None  # of cuBLAS's

    @property
    def title(self) -> str:
        return f"n={self.n} k={self.k} m={self.m}{self.what}"


FEW = [
    Case(n, k, m, target=us, speed=LARGEST_SPEED if (n, k, m) == LARGEST else None)
    for (n, k), by_rows in TARGETS.items()
    for m, us in by_rows.items()
]
MANY = [Case(n, k, m, speed=MANY_ROWS_SPEED) for n, k in TARGETS for m in MANY_ROWS]
FORMS = [Case(n, k, m, ", forms") for n, k in ((4096, 4096), (28672, 8192)) for m in (1, 16, 64, 128)]


@cache
def make_weights(n: int, k: int, device: torch.device) -> list[QuantizedWeight]:
    """Copies of one weight that together pass the L2; each is packed on its own, and kept: all shapes are a few GB."""
    weight = quantize(torch.randn(n, k, device=device), GROUP_SIZE, scale_dtype=DTYPE)
    return [replace(weight) for _ in range(copies_past_l2(n * k // 2))]


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [n, k] of symmetric codes."""
    return (codes.float() - 8) * scales.float().repeat_interleave(GROUP_SIZE, dim=1)


def in_other_forms(weight: QuantizedWeight) -> dict[str, QuantizedWeight]:
    """The same numbers with more to read: in groups of 64 and 32, and with zero points."""
    found = {
        f"group {size}": replace(weight, scales=weight.scales.repeat_interleave(GROUP_SIZE // size, 1), group_size=size)
        for size in (64, 32)
    }
    found["asymmetric"] = replace(weight, zeros=torch.full_like(weight.scales, 8, dtype=torch.uint8))
    return found


@cache
def make_forms(n: int, k: int, device: torch.device) -> dict[str, list[QuantizedWeight]]:
    """Those weights in other forms."""
    found = [in_other_forms(weight) for weight in make_weights(n, k, device)]
    return {name: [forms[name] for forms in found] for name in FORM_SPEED}


def compare(
    bench: harness.Bench,
    case: Case,
    weights: Sequence[QuantizedWeight],
    variants: Mapping[str, Sequence[QuantizedWeight]] | None = None,
) -> Row:
    """One row in microseconds; beside variants there are no peers. Of many rows, cuBLAS is the only one."""
    codes, scales = weights[0].unpacked_codes(), weights[0].scales
    dense = dequantize(codes, scales)
    dense16 = dense.to(DTYPE)
    x = torch.randn(case.m, case.k, dtype=DTYPE, device=bench.device)

    def calls(weights: Sequence[QuantizedWeight]) -> list[harness.Call]:
        outs = [torch.full((case.m, case.n), float("nan"), dtype=DTYPE, device=bench.device) for _ in weights]
        return [partial(w4a16_matmul, x, weight, out=out) for weight, out in zip(weights, outs, strict=True)]

    def peer(name: str) -> harness.Calls | None:
        if variants or (case.m in MANY_ROWS and name != "cublas"):
            return None
        # The bf16 weight is four times the size: fewer copies pass the L2.
        copies = copies_past_l2(dense16.nbytes) if name == "cublas" else len(weights)
        return harness.each(
            peers.w4a16(name, x, dense16.clone(), codes.clone(), scales.clone(), GROUP_SIZE) for _ in range(copies)
        )

    return bench.compare(
        case.title,
        calls(weights),
        peer,
        x.float() @ dense.T,
        MAX_ERROR,
        variants={name: calls(found) for name, found in (variants or {}).items()},
        flops=2 * case.m * case.n * case.k,
        bytes=case.n * case.k // 2 + scales.nbytes + 2 * case.m * (case.n + case.k),
        target=case.target,
    )


def measure(bench: harness.Bench, case: Case) -> Row:
    row = compare(bench, case, make_weights(case.n, case.k, bench.device))
    if case.speed is not None:
        bench.add_speed(row, "ours", "cublas", target=case.speed)
    return row


def measure_forms(bench: harness.Bench, case: Case) -> None:
    shape = case.n, case.k, bench.device
    row = compare(bench, case, make_weights(*shape), make_forms(*shape))
    for name, speed in FORM_SPEED.items():
        bench.add_speed(row, name, "ours", target=speed)


def warm_up(bench: harness.Bench) -> None:
    """Compile what the largest weight takes; what smaller ones take beside it is little."""
    wanted = [case for case in (*FEW, *MANY, *FORMS) if bench.wants(case.title)]
    n, k = max(((case.n, case.k) for case in wanted), key=math.prod, default=(0, 0))
    calls = []
    for case in (case for case in wanted if (case.n, case.k) == (n, k)):
        x = torch.randn(case.m, k, dtype=DTYPE, device=bench.device)
        weights = make_weights(n, k, bench.device)[:1]
        if case in FORMS:
            weights = [found[0] for found in make_forms(n, k, bench.device).values()]
        calls += [partial(w4a16_matmul, x, prepare(weight, DTYPE)) for weight in weights]
    bench.warm_up(calls)


def fill(bench: harness.Bench) -> None:
    warm_up(bench)
    leads: list[float] = []

    def against_the_best(bench: harness.Bench, case: Case) -> None:
        lead = measure(bench, case).lead
        leads.extend([] if lead is None else [lead])

    bench.measure_all(FEW, against_the_best)
    if len(leads) == len(FEW):
        case = f"{len(leads)} cases, best peer's time / ours"
        bench.add(Row(case, "x", "higher", geomean(leads), kind="geomean", timing="graph"))
    bench.measure_all(MANY, measure)
    bench.measure_all(FORMS, measure_forms)


if __name__ == "__main__":
    harness.run("w4a16", __doc__, fill, USUAL_PEERS)

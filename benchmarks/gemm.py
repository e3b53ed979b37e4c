"""Dense products in bf16, out = a Wᵀ, inputs rotated past the L2, against cuBLAS."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import harness, peers
from benchmarks.results import Row, geomean
from benchmarks.timing import copies_past_l2
from evenshare import matmul

SHAPES = [  # m, n, k
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (2048, 2048, 8192),
    (1024, 1024, 8192),
    (256, 3584, 8192),
    (128, 128, 16384),
    (1024, 1024, 1024),
    (136, 136, 232),
    (16, 4096, 4096),
    (1, 4096, 4096),
]
MAX_ERROR = 5e-3  # one rounding to bf16


def measure(bench: harness.Bench, m: int, n: int, k: int) -> Row:
    traffic = 2 * (m * k + n * k + m * n)
    sets = [
        (torch.randn(m, k, dtype=torch.bfloat16, device=bench.device),
         torch.randn(n, k, dtype=torch.bfloat16, device=bench.device).T,
         torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=bench.device))
        for _ in range(copies_past_l2(traffic))
    ]  # fmt: skip
    a, b, _ = sets[0]
    return bench.compare(
        f"{m}x{n}x{k}",
        [partial(matmul, a, b, out=out) for a, b, out in sets],
        lambda name: harness.each(peers.matmul(name, a, b) for a, b, _ in sets),
        a.float() @ b.float(),
        MAX_ERROR,
        flops=2 * m * n * k,
        bytes=traffic,
    )


def fill(bench: harness.Bench) -> None:
    rows = [measure(bench, *shape) for shape in SHAPES]
    leads = [row.lead for row in rows if row.lead is not None]
    if leads:
        bench.add(
            Row("all shapes, best peer's time / ours", "x", "higher", geomean(leads), kind="geomean", timing="graph")
        )


if __name__ == "__main__":
    harness.run("gemm", __doc__, fill)

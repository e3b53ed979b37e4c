"""16-bit activations times 4-bit weights in groups of 128, bf16, weights rotated past the L2, against the same in other libraries
and the bf16 product that it replaces."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from benchmarks import harness, peers
from benchmarks.results import Row, geomean
from benchmarks.timing import copies_past_l2
from evenshare import QuantizedWeight, quantize, w4a16_matmul

GROUP_SIZE = 128
LAYERS = [(4096, 4096), (14336, 4096), (8192, 8192), (28672, 8192)]  # n, k
ROWS = [1, 8, 16, 32, 64, 128]
MAX_ERROR = 1e-2  # weights rounded to bf16 once, output once


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [n, k] of symmetric codes."""
    return (codes.float() - 8) * scales.float().repeat_interleave(GROUP_SIZE, dim=1)


def measure(bench: harness.Bench, weights: list[QuantizedWeight], m: int) -> Row:
    """weights: copies of one weight that together pass the L2."""
    n, k = weights[0].shape
    codes, scales = weights[0].unpacked_codes(), weights[0].scales
    dense = dequantize(codes, scales)
    x = torch.randn(m, k, dtype=torch.bfloat16, device=bench.device)
    outs = [torch.full((m, n), float("nan"), dtype=x.dtype, device=bench.device) for _ in weights]
    dense16 = dense.to(x.dtype)

    def peer(name: str) -> harness.Calls | None:
        # The bf16 weight is four times the size: fewer copies pass the L2.
        copies = copies_past_l2(dense16.nbytes) if name == "cublas" else len(weights)
        return harness.each(
            peers.w4a16(name, x, dense16.clone(), codes.clone(), scales.clone(), GROUP_SIZE) for _ in range(copies)
        )

    return bench.compare(
        f"n={n} k={k} m={m}",
        [partial(w4a16_matmul, x, w, out=out) for w, out in zip(weights, outs, strict=True)],
        peer,
        x.float() @ dense.T,
        MAX_ERROR,
        flops=2 * m * n * k,
        bytes=n * k // 2 + scales.nbytes + 2 * m * (n + k),
    )


def fill(bench: harness.Bench) -> None:
    leads = []
    for n, k in LAYERS:
        weight = quantize(torch.randn(n, k, device=bench.device), GROUP_SIZE, scale_dtype=torch.bfloat16)
        copies = [
            weight,
            *(replace(weight) for _ in range(copies_past_l2(n * k // 2) - 1)),
        ]  # each is packed on its own
        for m in ROWS:
            row = measure(bench, copies, m)
            if row.lead is not None:
                leads.append(row.lead)
    if leads:
        bench.add(
            Row("all cases, best peer's time / ours", "x", "higher", geomean(leads), kind="geomean", timing="graph")
        )


if __name__ == "__main__":
    harness.run("w4a16", __doc__, fill)

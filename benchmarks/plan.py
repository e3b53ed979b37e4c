"""What an attention call costs besides its kernel: planning on the GPU, the host's part of a planned run, and a new process's
first call with nothing compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from torch.nn.functional import scaled_dot_product_attention

from benchmarks import harness
from benchmarks.batches import Shape, make_batch
from benchmarks.results import Row
from benchmarks.workloads import const, uniform
from evenshare.attention.functions import attention
from evenshare.schedule.policies import DEVICE_POLICIES

NUM_REQUESTS = 1024
PLAN_TARGETS = {"stream_k": 15.0, "level_fill": 15.0}  # us
COLD_TARGET = 8.0  # seconds
COLD_ROUNDS = 3


@dataclass(frozen=True)
class Case:
    title: str
    shape: Shape
    policy: str | None = None


@dataclass(frozen=True)
class Start:
    title: str
    phase: str


LENGTHS = uniform(1, 4096, NUM_REQUESTS)
PLANS = [
    Case(f"plan, {name} of {NUM_REQUESTS} requests, {policy}", shape, policy)
    for name, shape in (
        ("decode", Shape(const(1, NUM_REQUESTS), LENGTHS, page_size=16)),
        (
            "mixed",
            Shape([*const(512, 8), *const(1, NUM_REQUESTS - 8)], [length + 511 for length in LENGTHS], page_size=16),
        ),
    )
    for policy in DEVICE_POLICIES
]
CALLS = [
    Case("host, decode", Shape(const(1, 4), const(64, 4), 8, 8, causal=False)),
    Case("host, prefill", Shape(const(64, 2), const(64, 2), 8, 8)),
]
STARTS = [Start(f"cold, {phase}", phase) for phase in ("decode", "prefill")]


def measure_plan(bench: harness.Bench, case: Case) -> None:
    """Planning again, as a serving engine does every step: metadata on the GPU, inside a CUDA graph."""
    plan = make_batch(case.shape, bench.device).plan(policy=case.policy)
    bench.add_time(case.title, plan.update, target=PLAN_TARGETS.get(case.policy or ""))
    plan.check()


def measure_call(bench: harness.Bench, case: Case) -> None:
    """Host time of a planned run, beside torch's own attention of the same tensors."""
    batch = make_batch(case.shape, bench.device)
    tensors = batch.dense()
    assert tensors is not None
    plan, causal = batch.plan(), case.shape.causal
    q, k, v = (x.transpose(1, 2) for x in tensors)
    calls = {
        "ours": lambda: plan.run(batch.q, batch.k, batch.v),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal),
        "without a plan": lambda: attention(*tensors, causal=causal),
    }
    row = bench.add_host_time(case.title, calls)
    bench.add_speed(row, "ours", "sdpa", target=1.0)


def cold_start(phase: str) -> dict[str, float]:
    """Seconds of `benchmarks.cold_start` with an empty cache of kernels."""
    with tempfile.TemporaryDirectory() as cache:
        found = subprocess.run(
            [sys.executable, "-m", "benchmarks.cold_start", phase],
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=False,
        )
    if found.returncode:
        raise RuntimeError(f"cold start: {found.stderr[-400:]}")
    seconds: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return seconds


def measure_start(bench: harness.Bench, case: Start) -> None:
    """From after the imports to the first result; the imports and the part that is CUDA's context stand beside it."""
    starts = [cold_start(case.phase) for _ in range(COLD_ROUNDS)]
    for part in starts[0]:
        seconds = median(start[part] for start in starts)
        target = COLD_TARGET if part == "first result" else None
        bench.add(Row(f"{case.title}, {part}", "s", "lower", seconds, target=target, timing="wall"))


def fill(bench: harness.Bench) -> None:
    bench.measure_all(PLANS, measure_plan)
    bench.measure_all(CALLS, measure_call)
    bench.measure_all(STARTS, measure_start)


if __name__ == "__main__":
    harness.run("plan", __doc__, fill, ())

"""Work that one GPU is too small for, on 1, 2, 4 and 8 of them, and a prediction for up to 64.

    torchrun --nproc-per-node=8 -m benchmarks.distributed
    python -m benchmarks.distributed --link 400,10 --network 50,20 --out one.json     # one GPU: shares and predictions alone
    torchrun --nproc-per-node=2 -m benchmarks.distributed --dry-run --out dry.json     # CPUs and gloo, small sizes

Every case is timed on each number of ranks there is, by the slowest of them. Predictions (`evenshare.distributed.scaling`) add what
a link takes to the times of one rank's share, which one GPU measures alone. Ranks of a node are joined by the link, measured in the
same run or given, more of them by the network. `python -m benchmarks.plot_distributed` draws the results.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.distributed_cases import CASES, DRY_CASES, Call, Case
from benchmarks.results import Row, write_report
from benchmarks.timing import Timing, as_graph, summarise, time_interleaved
from evenshare.distributed.scaling import Link

RANKS_PER_NODE = 8
PREDICTED = (1, 2, 4, 8, 16, 32, 64)
SAMPLES = 21  # the same on all ranks, who wait for one another
MAX_ERROR = 2e-2  # bf16: weights, activations and partial results rounded to 2^-9 each
LARGE_MESSAGE, SMALL_MESSAGE = 256 << 20, 1 << 10  # bytes: bandwidth, latency


def clock(call: Call, device: torch.device) -> Timing:
    """On a GPU a replayed graph, the L2 cleared before; on a CPU the host's clock."""
    if device.type == "cuda":
        return time_interleaved({"": as_graph(call)}, SAMPLES)[""]
    samples = []
    for _ in range(4):
        begin = time.perf_counter()
        call()
        samples.append((time.perf_counter() - begin) * 1e6)
    return summarise(samples[1:])


def slowest(timing: Timing, group: dist.ProcessGroup, device: torch.device) -> Timing:
    """Of the ranks of a group."""
    found = torch.tensor([timing.median, timing.spread], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return Timing(*found.tolist())


def measure(case: Case, group: dist.ProcessGroup, device: torch.device) -> Timing:
    """Raises RuntimeError if a rank's result is wrong: a wrong result has no speed."""
    call, error_of = case.build(group, device)
    found = torch.tensor([error_of(call())], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    if not found.item() <= MAX_ERROR:
        raise RuntimeError(f"{case.title}: relative error {found.item():.2e}, want at most {MAX_ERROR:.0e}")
    return slowest(clock(call, device), group, device)


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Between neighbours of a ring that all send at once."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def pass_on(num_bytes: int) -> float:
        sent, received = torch.zeros(2, num_bytes, dtype=torch.uint8, device=device)
        ops = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]

        def call() -> torch.Tensor:
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            return received

        call()
        return slowest(clock(call, device), group, device).median

    latency = pass_on(SMALL_MESSAGE)
    large = LARGE_MESSAGE if device.type == "cuda" else LARGE_MESSAGE >> 6
    return Link(large / max(pass_on(large) - latency, 1.0) * 1e-3, latency)


def predict(case: Case, device: torch.device, link: Link | None, network: Link | None) -> list[Row]:
    """The case on more ranks; where a link is not known, nothing."""
    rows = []
    for size in filter(case.supports, PREDICTED):
        joint = link if size <= RANKS_PER_NODE else network
        if joint is None and size > 1:
            continue
        times = case.time_share(size, device, lambda call: clock(call, device).median)
        us = case.predict(times, size, joint or Link(1.0, 0.0))  # one rank sends nothing
        rows.append(Row(f"{case.title}, {size} ranks, predicted", "us", "lower", us, timing="simulated"))
    return rows


def fill(
    cases: Sequence[Case], device: torch.device, links: tuple[Link | None, Link | None], say: Callable[[str], None]
) -> tuple[list[Row], dict[str, float]]:
    """(rows, the link's figures) on rank 0; the others take part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [size for size in PREDICTED if size <= world]
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    link, network = links
    if world > 1 and link is None:
        if rank < sizes[-1]:
            link = measure_link(groups[sizes[-1]], device)
        dist.barrier()
    rows: list[Row] = []
    for case in cases:
        for size in filter(case.supports, sizes):
            if rank < size:
                say(f"{case.title}, {size} ranks")
                us = measure(case, groups[size], device)
                timing = "graph" if device.type == "cuda" else "wall"
                rows.append(
                    Row(f"{case.title}, {size} ranks", "us", "lower", us.median, timing=timing, spread=us.spread)
                )
            dist.barrier()
        if rank == 0:
            say(f"{case.title}, shares")
            rows += predict(case, device, link, network)
        dist.barrier()
    known = {"link": link, "network": network}
    figures = {
        f"{name}_{unit}": getattr(one, unit) for name, one in known.items() if one for unit in ("gb_s", "latency_us")
    }
    return rows, figures


def start(dry_run: bool) -> torch.device:
    """Join the ranks that torchrun started, or be the only one."""
    backend, device = "gloo", torch.device("cpu")
    if not dry_run:
        backend, device = "nccl", torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=None if dry_run else device)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def parse_link(text: str) -> Link:
    """GB/s,microseconds"""
    try:
        return Link(*map(float, text.split(",", 1)))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"got {text!r}, want GB/s and microseconds, as in 400,10") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if done, 2 if it cannot run here."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distributed", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--link", type=parse_link, metavar="GB/s,us", help="inside a node, one direction [default: measured]"
    )
    parser.add_argument("--network", type=parse_link, metavar="GB/s,us", help="between nodes, per rank, one direction")
    parser.add_argument("--dry-run", action="store_true", help="small sizes on CPUs")
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose title holds WORD")
    parser.add_argument("--out", type=harness.Path, help="one file for everything, instead of results/NAME-DEVICE.json")
    options = parser.parse_args(arguments)
    console = harness.make_console()
    if not options.dry_run and not torch.cuda.is_available():
        console.print("benchmarks.distributed needs a CUDA GPU (or --dry-run), and torch sees none here", style="red")
        return 2
    device = start(options.dry_run)
    first = dist.get_rank() == 0
    cases = [case for case in (DRY_CASES if options.dry_run else CASES) if options.only in case.title]
    try:
        with torch.inference_mode():
            rows, figures = fill(
                cases, device, (options.link, options.network), console.print if first else lambda text: None
            )
    finally:
        dist.destroy_process_group()
    if first:
        name = "CPU, dry run" if options.dry_run else torch.cuda.get_device_name(device)
        harness.show(console, "distributed", rows)
        if options.only and options.out is None:
            console.print("not written: --only measures a part, and --out is left out")
        else:
            console.print(
                f"written: {write_report(harness.make_report('distributed', name, figures, rows), options.out)}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Processes that run many cases in one go: starting them takes seconds, a case milliseconds.

A case is a function of a `Place`, called on every rank. After each one the ranks tell each other through a store, beside the group,
whether it passed. Where it did not the group is of no more use, and the cases behind it do not run.
"""

from __future__ import annotations

import datetime
import json
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# That a rank waits for the others, and that all cases may take; kernels for a GPU are compiled first.
SECONDS = {"cpu": (20, 300), "cuda": (180, 1500)}


@dataclass(frozen=True)
class Place:
    """Where a case runs."""

    rank: int
    size: int
    device: torch.device

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32, torch.bfloat16) if self.device.type == "cpu" else (torch.bfloat16, torch.float16)


Case = Callable[[Place], None]


def run_cases(cases: dict[str, Case], size: int, device_type: str = "cpu") -> dict[str, str]:
    """Case -> "" if it passed on all ranks, else the first rank's trace; cases are functions at the top of a module."""
    with TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        workers = [context.Process(target=_work, args=(r, size, device_type, cases, folder)) for r in range(size)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(SECONDS[device_type][1])
        for worker in workers:
            worker.kill()
        found = Path(folder) / "results"
        assert found.exists(), f"ranks ended with {[worker.exitcode for worker in workers]}"
        results: dict[str, str] = json.loads(found.read_text())
    return {name: results.get(name, "did not run: a case before it failed") for name in cases}


def _work(rank: int, size: int, device_type: str, cases: dict[str, Case], folder: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.FileStore(os.path.join(folder, "statuses"), size)
    dist.init_process_group(
        "gloo" if device_type == "cpu" else "nccl",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=SECONDS[device_type][0]),
        device_id=None if device_type == "cpu" else device,
    )
    place = Place(rank, size, device)
    results = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        try:
            case(place)
            status = "passed"
        except Exception:
            status = traceback.format_exc()
        store.set(f"{name}/{rank}", status)
        statuses = [store.get(f"{name}/{peer}").decode() for peer in range(size)]
        failures = [f"rank {r}: {status}" for r, status in enumerate(statuses) if status != "passed"]
        results[name] = min(failures, key=lambda failure: "PeerError" in failure, default="")  # not who waited for it
        if results[name]:
            break
    if rank == 0:
        (Path(folder) / "results").write_text(json.dumps(results))
    if not any(results.values()):
        dist.destroy_process_group()

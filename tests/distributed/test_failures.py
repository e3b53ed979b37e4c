"""A rank that dies or hangs: the others raise an error that says so within the group's timeout, whatever they were doing."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from evenshare.distributed import RoundRobin, RowParallelLinear, plan_context_attention, plan_ring_attention

TIMEOUT = 3  # seconds
KINDS = ("decode", "ring", "window", "linear")


def make_step(kind: str, group: dist.ProcessGroup) -> Callable[[], object]:
    """A call that needs both ranks."""
    sizes = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": torch.float32, "group": group}
    if kind == "decode":
        lens, table = torch.tensor([30, 7], dtype=torch.int32), torch.arange(16, dtype=torch.int32).view(2, 8)
        plan = plan_context_attention(placement=RoundRobin(4, 2), block_table=table, kv_lens=lens, **sizes)
        q, cache = torch.randn(2, 2, 16), torch.randn(16, 4, 1, 16)
        return lambda: plan.run(q, cache, cache)
    if kind == "linear":
        layer, x = RowParallelLinear(nn.Linear(32, 8), group=group), torch.randn(3, 16)
        return lambda: layer(x)
    window = 5 if kind == "window" else -1
    ring = plan_ring_attention(qo_indptr=torch.tensor([0, 64]), min_chunk=8, window_left=window, **sizes)
    q, k, v = torch.randn(32, 2, 16), torch.randn(32, 1, 16), torch.randn(32, 1, 16)
    return lambda: ring.run(q, k, v)


def work(rank: int, ending: str, folder: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    steps = {kind: make_step(kind, dist.new_group(timeout=timeout)) for kind in KINDS}
    with torch.no_grad():
        for step in steps.values():
            step()
        if rank == 1:
            if ending == "hangs":
                time.sleep(60)
            os._exit(9)
        seen = {}
        for kind, step in steps.items():
            begin = time.monotonic()
            try:
                while True:
                    step()
            except Exception as error:
                seen[kind] = (time.monotonic() - begin, type(error).__name__, str(error))
    (Path(folder) / "seen").write_text(json.dumps(seen))
    os._exit(0)  # the groups are of no more use, not even to be destroyed


@pytest.mark.parametrize("ending", ["dies", "hangs"])
def test_a_lost_rank_is_an_error(ending: str, tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    workers = [context.Process(target=work, args=(rank, ending, str(tmp_path))) for rank in range(2)]
    for worker in workers:
        worker.start()
    workers[0].join(90)
    for worker in workers:
        worker.kill()
    assert (tmp_path / "seen").exists(), "rank 0 hangs"
    seen = json.loads((tmp_path / "seen").read_text())
    assert list(seen) == list(KINDS)
    for waited, name, text in seen.values():
        assert name == "PeerError"
        assert "rank 0 of 2 (gloo) lost a peer" in text
        assert waited < TIMEOUT + 3

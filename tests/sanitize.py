"""Few and small attention calls through every kernel, for a tool that watches memory and is slow:

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py       (or racecheck)

Exits 1 if a result is wrong.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script's folder is on the path, its package is not

from evenshare.schedule.plan import Status
from tests.attention.cases import PADDING, Case, Outputs, check, embed, make_batch, make_plan
from tests.attention.helpers import Place, int32, move, to_pages

PREFILL = Case((70, 0, 200), (300, 40, 129), form="block_table")
DECODE = Case((1, 2, 0, 1, 8), (900, 30, 40, 0, 3), form="block_table")
CASES = {
    "prefill: keys by TMA, split tiles": replace(PREFILL, form="ragged", policy="stream_k"),
    "prefill: pages by TMA, two tiles for each worker, planned on the device": replace(
        PREFILL, qo_lens=(500, 520), kv_lens=(200, 520), heads=(32, 8), planner="device"
    ),
    "prefill: pages by TMA, wide heads": replace(PREFILL, dim=256),
    "prefill: pages gathered, whole tiles": replace(PREFILL, page_size=3, policy="data_parallel"),
    "prefill: rows that the portable kernel copies": replace(PREFILL, layout="odd"),
    "decode: pages by TMA, planned on the device": replace(DECODE, planner="device"),
    "decode: pages gathered, split tiles": replace(DECODE, page_size=3, policy="stream_k"),
}


def check_pages_outside(case: Case, place: Place) -> None:
    """Nothing is read through page ids outside the cache."""
    batch = make_batch(case, place)
    pages = to_pages(move(batch, place, case.dtype), case.page_size)
    metadata = {"qo_indptr": int32(batch.qo_indptr, place.device)} | pages.table("block_table", place.device)
    metadata["block_table"][:, 0] = 2**31 - 1
    metadata["block_table"][:, 1] = -1
    plan = make_plan(replace(case, planner="device"), place, metadata, max_q_rows=sum(case.qo_lens))
    outputs = Outputs(case, batch)
    plan.run(embed(batch.q.to(case.dtype), case.layout, PADDING), pages.k, pages.v, **outputs.arguments())
    assert not outputs.out[: outputs.num_rows].any()
    assert int(plan.status) == Status.BAD_INDEX


def main(place: Place) -> None:
    for name, case in CASES.items():
        torch.manual_seed(0)
        check(case, place, oracle_on="cpu")
        print(f"{name}: right")
    for case in (PREFILL, DECODE):
        for page_size in (16, 3):
            check_pages_outside(replace(case, page_size=page_size), place)
    print("pages outside the cache: unread")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU")
    main(Place(torch.device("cuda"), "triton", (torch.bfloat16,)))

"""The Hopper kernel of latent attention in the emulator: its merges, masks, pages and layouts."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from evenshare.attention.kernels import hopper_mla
from evenshare.attention.mla import executors, tiles
from tests.attention.helpers import Place
from tests.attention.mla.helpers import Case, check, lengths
from tests.emulator import Emulated

# Several queries and one, no query, no key, more queries than keys; ends inside tiles of 64 rows and blocks of 64 keys.
BATCH = Case(**lengths((1, 300), (3, 130), (0, 40), (1, 0), (4, 3), (2, 64)), heads=24, page_size=64)
CASES: dict[str, dict[str, Any]] = {
    "pages of 64": {},
    "pages of 16": {"page_size": 16, "form": "block_table", "causal": False, "with_lse": False},
    "pages of 256, even shares": {"page_size": 256, "policy": "stream_k", "planner": "device"},
    "128 heads": {**lengths((1, 200), (2, 70)), "heads": 128, "policy": "stream_k", "base": 2.0},
}


@pytest.fixture
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """CPU tensors that run as on a Hopper GPU of four SMs; the test's name seeds the order of what happens at once."""
    if torch.cuda.is_available():
        pytest.skip("the portable kernels beside it want Triton's interpreter, and this machine has a GPU")
    monkeypatch.setattr(Emulated, "seeds", itertools.count(zlib.crc32(request.node.name.encode())))
    monkeypatch.setattr(
        executors, "choose_mla_tile", lambda problem, mean, *_: tiles.choose_mla_tile(problem, mean, (9, 0))
    )
    monkeypatch.setattr(hopper_mla, "mla", Emulated(hopper_mla.mla))
    return Place(torch.device("cpu"), "triton", (torch.float16, torch.bfloat16))


@pytest.mark.parametrize("name", CASES)
def test_batches(hopper: Place, name: str) -> None:
    plan = check(replace(BATCH, **CASES[name]), hopper, torch.bfloat16)
    assert plan._executor.tile.kernel == "hopper_mla"  # type: ignore[union-attr]

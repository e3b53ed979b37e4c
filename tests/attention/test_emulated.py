"""A minute's choice of `test_hopper.py` for machines without a GPU: each Hopper kernel with its loaders, masks and merges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from evenshare import plan_attention
from tests.attention import test_fp8 as fp8
from tests.attention.cases import Case, check
from tests.attention.emulated import emulate_hopper
from tests.attention.helpers import Place, int32

# Several queries and one, no query, no key; ends inside tiles of 128 rows and blocks of 64 and 128 keys.
PREFILL = Case((1, 90, 0, 70), (300, 150, 40, 0), (4, 2))
DECODE = Case((1, 2, 0, 1, 4), (700, 130, 40, 0, 3), (4, 2))
LAYOUTS: dict[str, dict[str, Any]] = {
    "ragged": {},
    "dense": {"form": "dense"},
    "pages of 16": {"form": "indptr", "kv_layout": "HND", "planner": "device", "policy": "stream_k"},
    "pages of 256": {"form": "block_table", "page_size": 256, "layout": "strided"},
    "pages of 3": {"form": "block_table", "page_size": 3, "policy": "stream_k"},
}
MASKS: dict[str, dict[str, Any]] = {
    "full": {"causal": False, "dtype": torch.float16},
    "window": {"window_left": 70, "dim": 128},
    "cap": {"logits_soft_cap": 20.0, "dim": 80},
    "wide": {"dim": 256, "base": None},
    "narrow values": {"dim": 192, "dim_v": 128},
}


@pytest.fixture
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    if torch.cuda.is_available():
        pytest.skip("the portable kernels beside it want Triton's interpreter, and this machine has a GPU")
    return emulate_hopper(monkeypatch, request.node.name)


@pytest.mark.parametrize("case", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(hopper: Place, case: Case, layout: str) -> None:
    if layout == "dense":
        lens = (130, 200) if case is PREFILL else (2, 200)
        case = replace(case, qo_lens=lens[:1] * 2, kv_lens=lens[1:] * 2)
    plan = check(replace(case, **LAYOUTS[layout]), hopper)
    assert plan is None or plan._executor.tile.kernel == ("hopper_prefill" if case is PREFILL else "hopper_decode")


@pytest.mark.parametrize("case", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_dims(hopper: Place, case: Case, mask: str) -> None:
    for layout in ("pages of 16", "pages of 3"):
        check(replace(case, **LAYOUTS[layout] | MASKS[mask]), hopper)


@pytest.mark.parametrize("qo_len", [1, 70])
@pytest.mark.parametrize("page_size", [None, 16])
def test_a_cache_without_a_key(hopper: Place, page_size: int | None, qo_len: int) -> None:
    """TMA takes no tensor of no elements."""
    q = torch.randn(2 * qo_len, 4, 64, dtype=torch.bfloat16)
    keys = q.new_empty(0, 2, 64) if page_size is None else q.new_empty(0, page_size, 2, 64)
    pages = {} if page_size is None else {"kv_indices": int32([]), "last_page_len": int32([0, 0])}
    plan = plan_attention(
        qo_indptr=int32([0, qo_len, 2 * qo_len]), kv_indptr=int32([0, 0, 0]), page_size=page_size, num_qo_heads=4, num_kv_heads=2,
        head_dim=64, dtype=q.dtype, device=hopper.device, backend=hopper.backend, **pages,
    )  # fmt: skip
    out, lse = plan.run(q, keys, keys, return_lse=True)
    assert plan._executor.tile.kernel == ("hopper_prefill" if qo_len > 1 else "hopper_decode")
    assert not out.any()
    assert torch.isneginf(lse).all()
    plan.check()


@pytest.mark.parametrize("lens", [((1, 90, 0, 70), (300, 150, 40, 0)), ((1, 2, 0, 1, 4), (700, 130, 40, 0, 3))])
@pytest.mark.parametrize("page_size", [0, 3, 16])
def test_fp8_keys(hopper: Place, lens: tuple[tuple[int, ...], tuple[int, ...]], page_size: int) -> None:
    fp8.check(lens, hopper, heads=(4, 2), dim=128, page_size=page_size)
    fp8.check(lens, hopper, "scalars", heads=(7, 1), dim=64, page_size=page_size, logits_soft_cap=10.0)
    fp8.check(lens, hopper, "none", heads=(2, 2), dim=256, page_size=page_size, window_left=60)


@pytest.mark.parametrize("lens", [((1, 90, 0, 70), (300, 150, 40, 0)), ((1, 2, 0, 1, 4), (700, 130, 40, 0, 3))])
@pytest.mark.parametrize("page_size", [0, 3, 16])
def test_fp8_queries(hopper: Place, lens: tuple[tuple[int, ...], tuple[int, ...]], page_size: int) -> None:
    fp8.check(lens, hopper, heads=(4, 2), dim=128, page_size=page_size, q_kind="heads")
    fp8.check(
        lens, hopper, "numbers", heads=(7, 1), dim=80, page_size=page_size, q_kind="numbers", logits_soft_cap=10.0
    )
    fp8.check(lens, hopper, "none", heads=(2, 2), dim=256, page_size=page_size, q_kind="scalars", window_left=60)

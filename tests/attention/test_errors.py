"""Wrong input: a named error before anything is written, on every public function."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from evenshare.attention import AttentionPlan, attention, paged_attention, plan_attention
from tests.attention.helpers import int32

Case = tuple[dict[str, Any], type[Exception], str]


def rejects(function: Any, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    """`function` raises, and `out` and `lse` keep what they held."""
    positional = [arguments.pop(name) for name in ("q", "k", "v") if name in arguments]
    held = {name: arguments[name].clone() for name in ("out", "lse") if isinstance(arguments.get(name), torch.Tensor)}
    with pytest.raises(error, match=text):
        function(*positional, **arguments)
    for name, before in held.items():
        assert torch.equal(arguments[name], before)


def ragged(**changes: Any) -> dict[str, Any]:
    good = {
        "q": torch.zeros(5, 4, 8), "k": torch.zeros(7, 2, 8), "v": torch.zeros(7, 2, 8),
        "qo_indptr": int32([0, 2, 5]), "kv_indptr": int32([0, 3, 7]), "out": torch.ones(5, 4, 8), "lse": torch.ones(5, 4),
    }  # fmt: skip
    return good | changes


RAGGED: list[Case] = [
    ({"q": torch.zeros(5, 32)}, ValueError, r"q: got shape \(5, 32\), want 3 dimensions"),
    ({"q": [1.0]}, TypeError, "q: got list, want a tensor"),
    ({"q": torch.zeros(5, 3, 8)}, ValueError, "num_qo_heads, num_kv_heads: got 3 and 2"),
    ({"q": torch.zeros(4, 4, 8), "out": None, "lse": None}, ValueError, "q: got 4 tokens, want at least the 5"),
    ({"q": torch.zeros(5, 8, 4).transpose(1, 2)}, ValueError, "q: got stride 4 in the last dimension, want 1"),
    ({"q": torch.zeros(5, 4, 8).double()}, TypeError, "dtype of q, k, v: got torch.float64"),
    ({"q": torch.zeros(5, 4, 300), "k": torch.zeros(7, 2, 300)}, ValueError, "head_dim: got 300, want 1 to 256"),
    ({"k": torch.zeros(7, 2, 9)}, ValueError, r"k: got shape \(7, 2, 9\), want \[any, 2, 8\]"),
    ({"k": torch.zeros(6, 2, 8), "v": torch.zeros(6, 2, 8)}, ValueError, "k: got 6 tokens, want at least the 7"),
    ({"k": torch.zeros(7, 2, 8).half()}, TypeError, "k: got dtype torch.float16, want torch.float32"),
    ({"k": torch.zeros(7, 2, 8, device="meta")}, ValueError, "k: got device meta, want cpu"),
    ({"v": torch.zeros(7, 1, 8)}, ValueError, r"v: got shape \(7, 1, 8\), want \[7, 2, 8\]"),
    ({"v": torch.zeros(8, 2, 8)}, ValueError, r"v: got shape \(8, 2, 8\), want \[7, 2, 8\]"),
    ({"out": torch.ones(5, 4, 9)}, ValueError, r"out: got shape \(5, 4, 9\), want \[5, 4, 8\]"),
    ({"out": torch.ones(5, 4, 8).half()}, TypeError, "out: got dtype torch.float16, want torch.float32"),
    ({"lse": torch.ones(4, 5)}, ValueError, r"lse: got shape \(4, 5\), want \[5, 4\]"),
    ({"lse": torch.ones(5, 4).half()}, TypeError, "lse: got dtype torch.float16, want torch.float32"),
    ({"qo_indptr": None}, ValueError, "q: got shape|want both"),
    ({"qo_indptr": int32([0, 5])}, ValueError, r"qo_indptr: got shape \(2,\), want \[3\]"),
    ({"qo_indptr": int32([0, 3, 2])}, ValueError, "qo_indptr: got 3 then 2 at index 1, want a non-decreasing sequence"),
    ({"qo_indptr": int32([-1, 3, 5])}, ValueError, r"qo_indptr\[0\]: got -1"),
    ({"qo_indptr": torch.tensor([0.0, 2, 5])}, TypeError, "qo_indptr: got dtype torch.float32, want int32"),
    ({"kv_indptr": [0, 3, 7]}, TypeError, "kv_indptr: got list, want an int32 tensor"),
    ({"kv_indptr": int32([[0, 3, 7]])}, ValueError, r"kv_indptr: got shape \(1, 3\), want \[any\]"),
    ({"kv_indptr": int32([])}, ValueError, r"kv_indptr: got shape \(0,\)"),
    ({"kv_indptr": int32([0, 8, 7])}, ValueError, "kv_indptr: got 8 then 7 at index 1"),
    ({"window_left": -2}, ValueError, "window_left: got -2"),
    ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap: got -1.0"),
    ({"logits_soft_cap": math.inf}, ValueError, "logits_soft_cap: got inf"),
    ({"sm_scale": math.nan}, ValueError, "sm_scale: got nan"),
    ({"base": 1.0}, ValueError, "base: got 1.0"),
    ({"base": 0.5}, ValueError, "base: got 0.5"),  # -inf would become +inf
    ({"backend": "gpu"}, ValueError, "backend: got 'gpu', want one of cpu, triton or None"),
]


@pytest.mark.parametrize(("changes", "error", "text"), RAGGED, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_ragged(changes: dict[str, Any], error: type[Exception], text: str, backend: str) -> None:
    rejects(attention, ragged(**({"backend": backend} | changes)), error, text)


def paged(**changes: Any) -> dict[str, Any]:
    good = {
        "q": torch.zeros(5, 4, 8), "k": torch.zeros(6, 4, 2, 8), "v": torch.zeros(6, 4, 2, 8), "qo_indptr": int32([0, 2, 5]),
        "kv_indptr": int32([0, 1, 3]), "kv_indices": int32([4, 0, 5]), "last_page_len": int32([2, 4]),
        "out": torch.ones(5, 4, 8), "lse": torch.ones(5, 4),
    }  # fmt: skip
    return good | changes


def by_table(**changes: Any) -> dict[str, Any]:
    table = {"kv_indptr": None, "kv_indices": None, "last_page_len": None, "block_table": int32([[4, 0], [5, 1]])}
    return table | {"kv_lens": int32([2, 8])} | changes


PAGED: list[Case] = [
    ({"k": torch.zeros(6, 4, 16)}, ValueError, r"k: got shape \(6, 4, 16\), want 4 dimensions"),
    ({"v": torch.zeros(6, 3, 2, 8)}, ValueError, r"v: got shape \(6, 3, 2, 8\), want \[6, 4, 2, 8\]"),
    ({"kv_layout": "nhd"}, ValueError, "kv_layout: got 'nhd', want 'NHD' or 'HND'"),
    ({"kv_layout": "HND"}, ValueError, "last_page_len|num_qo_heads|k: got shape"),
    ({"last_page_len": int32([2, 5])}, ValueError, r"last_page_len\[1\]: got 5, want 1 to the page size 4"),
    ({"last_page_len": int32([0, 4])}, ValueError, r"last_page_len\[0\]: got 0, want 1 to the page size 4"),
    ({"last_page_len": int32([2])}, ValueError, r"last_page_len: got shape \(1,\), want \[2\]"),
    ({"last_page_len": None}, ValueError, "kv_indices, last_page_len: want both"),
    ({"kv_indptr": int32([0, 3, 1])}, ValueError, "kv_indptr: got 3 then 1 at index 1"),
    ({"kv_indptr": int32([0, 1, 4])}, ValueError, r"kv_indptr\[-1\]: got 4, want at most the 3 kv_indices"),
    ({"kv_indptr": int32([0, 1, 2, 3])}, ValueError, r"last_page_len: got shape \(2,\), want \[3\]"),
    ({"kv_indices": None, "last_page_len": None}, ValueError, "kv_indices: got None"),
    ({"kv_indices": torch.tensor([4.0, 0, 5])}, TypeError, "kv_indices: got dtype torch.float32"),
    ({"qo_indptr": int32([0, 1, 2, 5])}, ValueError, r"qo_indptr: got shape \(4,\), want \[3\]"),
    ({"qo_indptr": int32([0, 4, 2])}, ValueError, "qo_indptr: got 4 then 2"),
    ({"block_table": int32([[4, 0], [5, 1]]), "kv_lens": int32([2, 8])}, ValueError, "block_table, kv_lens: want both"),
    (by_table(kv_lens=None), ValueError, "block_table, kv_lens: want both"),
    (by_table(kv_lens=int32([2, 9])), ValueError, r"kv_lens\[1\]: got 9, want 0 to 8"),
    (by_table(kv_lens=int32([-1, 8])), ValueError, r"kv_lens\[0\]: got -1"),
    (by_table(kv_lens=int32([2])), ValueError, r"kv_lens: got shape \(1,\), want \[2\]"),
    (by_table(block_table=int32([4, 5])), ValueError, r"block_table: got shape \(2,\)"),
    (by_table(kv_lens=int32([2, 8], "meta")), ValueError, "device"),
]


@pytest.mark.parametrize(("changes", "error", "text"), PAGED, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_paged(changes: dict[str, Any], error: type[Exception], text: str, backend: str) -> None:
    rejects(paged_attention, paged(**({"backend": backend} | changes)), error, text)


@pytest.mark.parametrize("form", [{}, by_table()], ids=["indptr", "block_table"])
def test_the_unchanged_arguments_are_accepted(form: dict[str, Any]) -> None:
    for function, arguments in ((attention, ragged()), (paged_attention, paged(**form))):
        positional = [arguments.pop(name) for name in ("q", "k", "v")]
        out, lse = function(*positional, **arguments)
        assert (out == 0).all()
        assert torch.isfinite(lse).all()


def test_dense() -> None:
    q, kv = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 2, 8)
    good = {"q": q, "k": kv, "v": kv, "out": torch.ones_like(q)}
    cases: list[Case] = [
        ({"k": kv[:1]}, ValueError, r"k: got shape \(1, 5, 2, 8\)"),
        ({"v": kv[:, :4]}, ValueError, r"v: got shape \(2, 4, 2, 8\)"),
        ({"out": torch.ones(2, 3, 4, 9)}, ValueError, r"out: got shape \(2, 3, 4, 9\)"),
        ({"k": kv[0]}, ValueError, r"k: got shape \(5, 2, 8\), want 4 dimensions"),
    ]
    for changes, error, text in cases:
        rejects(attention, good | changes, error, text)


def planned(**changes: Any) -> dict[str, Any]:
    good = {
        "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32, "page_size": 4,
        "kv_indptr": int32([0, 1, 3]), "kv_indices": int32([4, 0, 5]), "last_page_len": int32([2, 4]),
    }  # fmt: skip
    return good | changes


PLAN: list[Case] = [
    ({"num_qo_heads": 5}, ValueError, "num_qo_heads, num_kv_heads: got 5 and 2"),
    ({"num_kv_heads": 0}, ValueError, "num_qo_heads, num_kv_heads: got 4 and 0"),
    ({"head_dim": 0}, ValueError, "head_dim: got 0"),
    ({"head_dim_v": 257}, ValueError, "head_dim_v: got 257"),
    ({"dtype": torch.float64}, TypeError, "got torch.float64"),
    ({"page_size": None}, ValueError, "page_size: got None, want 1 or more"),
    ({"page_size": 0}, ValueError, "page_size: got 0, want 1 or more"),
    ({"kv_indices": None, "last_page_len": None}, ValueError, "page_size: got 4 for ragged keys"),
    ({"planner": "gpu"}, ValueError, "planner: got 'gpu'"),
    ({"kv_indptr": None}, ValueError, "kv_indptr: got None"),
]


@pytest.mark.parametrize(("changes", "error", "text"), PLAN, ids=lambda x: x if isinstance(x, str) else "")
def test_plan(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    rejects(plan_attention, planned(**changes), error, text)


def test_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="policy: got 'fair'"):
        plan_attention(**planned(policy="fair", backend="triton"))


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_run_of_a_plan(backend: str) -> None:
    plan: AttentionPlan = plan_attention(**planned(backend=backend))
    good = {
        "q": torch.zeros(2, 4, 8),
        "k": torch.zeros(6, 4, 2, 8),
        "v": torch.zeros(6, 4, 2, 8),
        "out": torch.ones(2, 4, 8),
    }
    cases: list[Case] = [
        ({"q": torch.zeros(1, 4, 8), "out": None}, ValueError, "q: got 1 tokens, want at least the 2"),
        ({"q": torch.zeros(2, 2, 8)}, ValueError, r"q: got shape \(2, 2, 8\), want \[any, 4, 8\]"),
        ({"k": torch.zeros(6, 5, 2, 8)}, ValueError, r"k: got shape \(6, 5, 2, 8\), want \[any, 4, 2, 8\]"),
        ({"k": torch.zeros(24, 2, 8)}, ValueError, r"k: got shape \(24, 2, 8\), want four dimensions"),
        ({"v": torch.zeros(6, 4, 2, 8).half()}, TypeError, "v: got dtype torch.float16"),
    ]
    for changes, error, text in cases:
        rejects(plan.run, good | changes, error, text)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_update_of_a_plan(backend: str) -> None:
    plan: AttentionPlan = plan_attention(**planned(backend=backend))
    three = {"kv_indptr": int32([0, 1, 2, 3]), "last_page_len": int32([1, 1, 1])}
    with pytest.raises(ValueError, match="batch: got 3 requests, want at most the plan's max_batch 2"):
        plan.update(**three)
    with pytest.raises(ValueError, match=r"last_page_len\[0\]: got 9"):
        plan.update(last_page_len=int32([9, 1]))
    with pytest.raises(ValueError, match="kv_lens"):
        plan.update(kv_lens=int32([1, 1]))
    # A refused update leaves the plan as it was.
    q, cache = torch.randn(2, 4, 8), torch.randn(6, 4, 2, 8)
    fresh = plan_attention(**planned(backend=backend))
    assert torch.equal(plan.run(q, cache, cache), fresh.run(q, cache, cache))

"""A plan checks and binds a layout of q, k, v, out, lse once; other layouts, addresses and metadata are not mistaken for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evenshare.attention import AttentionPlan, plan_attention
from evenshare.attention import plan as plan_module
from evenshare.attention.plan import MAX_LAYOUTS
from tests.attention.helpers import Batch, Pages, Place, assert_matches, int32, move, random_batch, to_pages


def make(place: Place, kv_layout: str = "NHD") -> tuple[AttentionPlan, Batch, torch.Tensor, Pages]:
    batch = random_batch((1, 2), (18, 5), heads=(4, 2), dim=16)
    pages = to_pages(move(batch, place), 4, kv_layout=kv_layout)
    plan = plan_attention(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, page_size=4, kv_layout=kv_layout,
        qo_indptr=int32(batch.qo_indptr, place.device), max_q_rows=8, backend=place.backend,
        **pages.table("indptr", place.device),
    )  # fmt: skip
    return plan, batch, batch.q.to(place.device), pages


def shifted(t: torch.Tensor) -> torch.Tensor:
    """The same values in rows that begin 4 bytes after a multiple of 16."""
    wide = torch.zeros(*t.shape[:-1], t.shape[-1] + 4, dtype=t.dtype, device=t.device)
    wide[..., 1:-3] = t
    return wide[..., 1:-3]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_any_layout_after_any_other(place: Place, kv_layout: str) -> None:
    plan, batch, q, pages = make(place, kv_layout)
    heads_outside = torch.empty(4, 3, 16, device=q.device).transpose(0, 1)
    for _ in range(2):
        for make_q, make_k in ((torch.clone, torch.clone), (shifted, torch.clone), (torch.clone, shifted)):
            out, lse = plan.run(make_q(q), make_k(pages.k), pages.v, return_lse=True)
            assert_matches(out, lse, batch)
        assert plan.run(q, pages.k, pages.v, out=heads_outside) is heads_outside
        torch.testing.assert_close(heads_outside, out, atol=1e-6, rtol=0)
        out = shifted(torch.zeros_like(q))
        columns = torch.zeros(4, 3, device=q.device).T
        plan.run(q, pages.k, pages.v, out=out, lse=columns)
        assert_matches(out, columns, batch)


def test_tensors_of_a_known_layout_are_not_checked_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, batch, q, pages = make(place)
    checked: list[str] = []
    check = plan_module.check_tensor

    def counting(name: str, *arguments: Any, **options: Any) -> None:
        checked.append(name)
        check(name, *arguments, **options)

    monkeypatch.setattr(plan_module, "check_tensor", counting)
    plan.run(q, pages.k, pages.v)
    assert checked == ["q", "k", "v"]
    for _ in range(2):
        out, lse = plan.run(q.clone(), pages.k, pages.v, return_lse=True)  # one check: lse is asked for now
        assert_matches(out, lse, batch)
        plan.update()
    assert checked == ["q", "k", "v"] * 2
    plan.run(q, pages.k, pages.v, out=out)
    assert checked == ["q", "k", "v"] * 3 + ["out"]


def test_a_wrong_tensor_after_a_good_one(place: Place) -> None:
    plan, _, q, pages = make(place)
    out = torch.empty_like(q)
    plan.run(q, pages.k, pages.v, out=out)
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"q": q.half()}, TypeError, "q: got dtype torch.float16"),
        ({"q": q[:2]}, ValueError, r"q: got 2 tokens|out: got shape \(3, 4, 16\)"),
        ({"k": pages.k[..., :8]}, ValueError, "k: got shape"),
        ({"k": [1.0]}, TypeError, "k: got list, want a tensor"),
        ({"q": None}, TypeError, "q: got NoneType, want a tensor"),
        ({"v": pages.v.to("meta")}, ValueError, "v: got device meta"),
        ({"out": torch.empty(16, 4, 3, device=q.device).permute(2, 1, 0)}, ValueError, "out: got stride 12"),
    ]
    for change, error, text in wrong:
        for _ in range(2):  # a refusal is not remembered as a permission
            with pytest.raises(error, match=text):
                plan.run(**({"q": q, "k": pages.k, "v": pages.v, "out": out} | change))


def test_the_planned_batch_counts(kernel_place: Place) -> None:
    """The same tensors, but the plan's batch has come to want more of them."""
    indptrs = {"qo_indptr": int32([0, 2]), "kv_indptr": int32([0, 6])}
    options: dict[str, Any] = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": torch.float32}
    plan = plan_attention(**indptrs, **options, max_q_rows=4, device=kernel_place.device, backend="triton")
    q, k = (torch.randn(n, heads, 16, device=kernel_place.device) for n, heads in ((2, 2), (6, 1)))
    before = plan.run(q, k, k)
    plan.update(kv_indptr=int32([0, 7]))
    with pytest.raises(ValueError, match="k: got 6 tokens, want at least the 7"):
        plan.run(q, k, k)
    plan.update(kv_indptr=int32([0, 6]))
    assert torch.equal(plan.run(q, k, k), before)


def test_few_layouts_are_remembered(place: Place) -> None:
    plan, batch, q, pages = make(place)
    for extra in range(MAX_LAYOUTS + 2):
        padded = torch.zeros(3 + extra, 4, 16, device=q.device)
        padded[:3] = q
        out, lse = plan.run(padded, pages.k, pages.v, return_lse=True)
        assert len(plan._runs) <= MAX_LAYOUTS
    assert_matches(out[:3], lse[:3], batch)

"""FlashInfer's sampling names: which arguments reach evenshare, by whose rules, and where its conventions differ."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import evenshare.compat.flashinfer as flashinfer
from evenshare import ops

PROBS = torch.softmax(torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 2, -1)
K, P = torch.tensor([1, 5, 50, 80, 3, 9], dtype=torch.int32), torch.tensor([0.1, 0.9, 1.0, 0.5, 0.7, 0.2])
SAMPLERS: list[tuple[str, torch.Tensor, dict[str, Any], dict[str, Any]]] = [
    ("sampling_from_probs", PROBS, {}, {}),
    ("sampling_from_logits", PROBS.log(), {}, {}),
    ("top_k_sampling_from_probs", PROBS, {"top_k": K}, {"top_k": K}),
    ("top_p_sampling_from_probs", PROBS, {"top_p": P}, {"top_p": P}),
    ("min_p_sampling_from_probs", PROBS, {"min_p": 0.1}, {"min_p": 0.1}),
    (
        "top_k_top_p_sampling_from_probs",
        PROBS,
        {"top_k": 9, "top_p": 0.8},
        {"top_k": 9, "top_p": 0.8, "filter_order": "top_k_first"},
    ),
    (
        "top_k_top_p_sampling_from_logits",
        PROBS.log(),
        {"top_k": K, "top_p": P, "filter_apply_order": "joint"},
        {"top_k": K, "top_p": P, "filter_order": "joint"},
    ),
]
STATE = ["indices", "deterministic", "generator", "check_nan", "seed", "offset", "return_valid"]
ORDERS = {
    "softmax": ["logits", "temperature", "enable_pdl"],
    "sampling_from_probs": ["probs", *STATE],
    "sampling_from_logits": ["logits", *STATE],
    "top_k_sampling_from_probs": ["probs", "top_k", *STATE],
    "top_p_sampling_from_probs": ["probs", "top_p", *STATE],
    "min_p_sampling_from_probs": ["probs", "min_p", *STATE],
    "top_k_top_p_sampling_from_probs": ["probs", "top_k", "top_p", "indices", "filter_apply_order", *STATE[1:]],
    "top_k_top_p_sampling_from_logits": ["logits", "top_k", "top_p", "indices", "filter_apply_order", *STATE[1:]],
    "top_p_renorm_probs": ["probs", "top_p", "is_deterministic"],
    "top_k_renorm_probs": ["probs", "top_k"],
    "top_k_mask_logits": ["logits", "top_k"],
    "chain_speculative_sampling": [
        "draft_probs", "draft_token_ids", "target_probs", "maybe_output_accepted_token_num",
        "maybe_output_emitted_draft_token_num", "deterministic", "generator", "seed", "offset",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_argument_order(name: str) -> None:
    assert list(inspect.signature(getattr(flashinfer.sampling, name)).parameters) == ORDERS[name]


@pytest.mark.parametrize(
    ("name", "x", "given", "wanted"), SAMPLERS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_samplers(name: str, x: torch.Tensor, given: dict[str, Any], wanted: dict[str, Any]) -> None:
    draw = getattr(flashinfer.sampling, name)
    ours = ops.sample_from_logits if "logits" in name else ops.sample_from_probs
    tokens, valid = draw(x, **given, seed=3, offset=7, return_valid=True)
    assert tokens.dtype == torch.int32
    assert valid.all()
    assert torch.equal(tokens, ours(x, **wanted, seed=3, offset=7))
    first, second = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    assert torch.equal(draw(x, **given, generator=first), ours(x, **wanted, generator=second))
    if not any(isinstance(value, torch.Tensor) for value in given.values()):
        indices = torch.tensor([5, 0, 5])
        assert torch.equal(draw(x, **given, indices=indices, seed=3), ours(x, **wanted, indices=indices, seed=3))
    broken = x.clone()
    broken[4, 3] = float("nan")
    with pytest.raises(ValueError, match=r"(probs|logits): got NaN"):
        draw(broken, **given, check_nan=True)
    assert draw(broken, **given, return_valid=True)[1].tolist() == [True] * 4 + [False, True]


def test_settings_of_rows_that_indices_name() -> None:
    indices = torch.tensor([5, 0, 3, 3])
    state: dict[str, Any] = {"seed": 2, "offset": 0}
    of_rows = {"top_k": K[indices], "top_p": P[indices]}
    for name, x in (("probs", PROBS), ("logits", PROBS.log())):
        draw = getattr(flashinfer, f"top_k_top_p_sampling_from_{name}")
        want = getattr(ops, f"sample_from_{name}")(x, indices=indices, **of_rows, filter_order="top_k_first", **state)
        assert torch.equal(draw(x, K, P.double(), indices, **state), want)
    want = ops.sample_from_probs(PROBS, indices=indices, top_p=P[indices], **state)
    assert torch.equal(flashinfer.top_p_sampling_from_probs(PROBS, P, indices, **state), want)
    # Those of top-k and min-p alone are of the outputs.
    want = ops.sample_from_probs(PROBS, indices=indices, top_k=K[:4], **state)
    assert torch.equal(flashinfer.top_k_sampling_from_probs(PROBS, K[:4], indices, **state), want)
    want = ops.sample_from_probs(PROBS, indices=indices, min_p=P[:4], **state)
    assert torch.equal(flashinfer.min_p_sampling_from_probs(PROBS, P[:4], indices, **state), want)


def test_filters_and_softmax() -> None:
    assert torch.equal(flashinfer.top_p_renorm_probs(PROBS, P), ops.renormalize_probs(PROBS, top_p=P))
    assert torch.equal(flashinfer.top_k_renorm_probs(PROBS, K), ops.renormalize_probs(PROBS, top_k=K))
    assert torch.equal(flashinfer.top_k_mask_logits(PROBS.log(), 4), ops.mask_logits(PROBS.log(), 4))
    assert torch.equal(flashinfer.softmax(PROBS.log(), P), ops.softmax(PROBS.log(), P))
    with pytest.raises(ValueError, match="filter_apply_order: got 'x'"):
        flashinfer.top_k_top_p_sampling_from_probs(PROBS, 3, 0.5, filter_apply_order="x")


def test_speculative_counts_are_added_to_those_given() -> None:
    draft, target = PROBS.view(2, 3, 50), torch.softmax(torch.randn(2, 4, 50), -1)
    ids = draft.argmax(-1).int()
    counts = torch.full((2, 2), 5, dtype=torch.int32)
    tokens, accepted, emitted = flashinfer.chain_speculative_sampling(draft, ids, target, *counts, seed=1)
    want = ops.speculative_sample(draft, ids, target, seed=1)
    assert torch.equal(tokens, want[0])
    assert torch.equal(accepted, want[1] + 5)
    assert torch.equal(emitted, counts[1])

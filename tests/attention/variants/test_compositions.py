"""Variants composed at random of scores, masks and sinks, on random ragged and paged batches, in both backends."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import and_masks, or_masks

from evenshare import Variant
from evenshare.attention import variants
from tests.attention.helpers import Place, int32, random_batch
from tests.attention.variants.helpers import check

LONGEST, HEADS, REQUESTS = 30, 4, 3
SLOPES, TABLE = torch.linspace(-0.5, 0.5, HEADS), torch.linspace(-1, 1, HEADS * 9).view(HEADS, 9)
IDS, PREFIX = torch.arange(REQUESTS * 64).view(REQUESTS, 64) // 11 % 3, int32([0, 7, 30])

SCORES: list[Callable[[torch.device], Callable[..., Any]]] = [
    lambda device: variants.soft_cap(1.5),
    lambda device: variants.alibi(SLOPES.to(device)),
    lambda device: variants.relative_bias(TABLE.to(device)),
    lambda device: lambda score, b, h, q_idx, kv_idx: torch.where(kv_idx % 3 == b, score * 0.5, score - 0.1 * h),
    lambda device: lambda score, b, h, q_idx, kv_idx: score.abs() - (q_idx // 4 - kv_idx // 5) * 0.05,
]
MASKS: list[Callable[[torch.device], Callable[..., Any]]] = [
    lambda device: variants.causal,
    lambda device: variants.sliding_window(6),
    lambda device: variants.dilated_window(5, 2),
    lambda device: variants.prefix_lm(PREFIX.to(device)),
    lambda device: variants.documents(IDS.to(device)),
    lambda device: lambda b, h, q_idx, kv_idx: (kv_idx + h) % 4 != b,
]


def combined(kinds: list[tuple[int, str]], device: torch.device) -> Callable[..., Any]:
    """The masks of these numbers, each joined to those before it."""

    def join(before: Callable[..., Any], kind: tuple[int, str]) -> Callable[..., Any]:
        mask, how = MASKS[kind[0]](device), kind[1]
        if how == "and not":
            return and_masks(before, lambda *positions: ~mask(*positions))
        return (and_masks if how == "and" else or_masks)(before, mask)

    return reduce(join, kinds[1:], MASKS[kinds[0][0]](device))


def chained(numbers: list[int], device: torch.device) -> Callable[..., Any]:
    functions = [SCORES[number](device) for number in numbers]

    def score_mod(score: Any, *positions: Any) -> Any:
        return reduce(lambda value, function: function(value, *positions), functions, score)

    return score_mod


Masks = st.lists(st.tuples(st.integers(0, len(MASKS) - 1), st.sampled_from(["and", "or", "and not"])), max_size=3)
Lens = st.lists(st.tuples(st.integers(0, 8), st.integers(0, LONGEST)), min_size=1, max_size=REQUESTS)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scores=st.lists(st.integers(0, len(SCORES) - 1), max_size=3), masks=Masks, lens=Lens, group=st.sampled_from([1, 2, 4]),
    causal=st.booleans(), weights=st.sampled_from(["softmax", "sinks", "none"]),
)  # fmt: skip
def test_a_composition(
    backend: str, scores: list[int], masks: list[tuple[int, str]], lens: list[tuple[int, int]], group: int, causal: bool,
    weights: str,
) -> None:  # fmt: skip
    if torch.cuda.is_available() and backend == "triton":
        pytest.skip("the interpreter is chosen at import, and this machine has a GPU")
    place = Place(torch.device("cpu"), backend, (torch.float32,))
    batch = random_batch(*zip(*lens, strict=True), (HEADS, HEADS // group), dim=16)

    def make(device: torch.device) -> Variant:
        return Variant(
            score_mod=chained(scores, device) if scores else None,
            mask_mod=combined(masks, device) if masks else None,
            softmax=weights != "none",
            sinks=SLOPES.to(device) if weights == "sinks" else None,
        )

    check(batch, place, make, causal=causal)

"""Latent attention against the float64 oracle: lengths, pages, heads, masks and planners."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attention.helpers import Place
from tests.attention.mla.helpers import Case, check, lengths

# Decode, append, no query, no key, more queries than keys; ends inside tiles of 64 rows and blocks of 64 keys.
DECODE = Case(**lengths((1, 33), (1, 0), (1, 1), (1, 70)))
APPEND = Case(**lengths((3, 50), (0, 20), (1, 17), (5, 3), (2, 0), (4, 4)), heads=5)


def dtypes(place: Place) -> tuple[torch.dtype, ...]:
    """bf16 on a GPU; elsewhere the interpreter's, which knows no bf16."""
    return (torch.bfloat16, torch.float32) if place.device.type == "cuda" else place.dtypes[:2]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [16, 128])
def test_decode(place: Place, heads: int, page_size: int) -> None:
    for dtype in dtypes(place):
        check(replace(DECODE, heads=heads, page_size=page_size), place, dtype)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("causal", [True, False])
def test_append(place: Place, causal: bool, page_size: int) -> None:
    for dtype in dtypes(place):
        check(replace(APPEND, causal=causal, page_size=page_size, base=2.0), place, dtype)

"""Calls drawn at random, of every kind of batch, mask, layout and policy at once."""

from __future__ import annotations

import pytest

from tests.attention.cases import check, random_case
from tests.attention.helpers import Place


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 72))])
def test_a_random_call(kernel_place: Place, seed: int) -> None:
    case = random_case(seed, kernel_place)
    print(case)  # what failed
    check(case, kernel_place)

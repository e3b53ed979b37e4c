"""Columns in any order of groups (act-order), whole and in shards, stored group by group."""

from __future__ import annotations

import pytest
import torch

from evenshare.quant import QuantizedWeight, w4a16_matmul
from evenshare.quant.rounding import pack_codes
from evenshare.quant.weight import order_by_group
from tests.quant.helpers import assert_product


def stored(
    codes: torch.Tensor, scales: torch.Tensor, g_idx: torch.Tensor, group_size: int
) -> tuple[QuantizedWeight, torch.Tensor]:
    """(the stored weight, the weight that it means): codes uint8 [n, k], scales [n, groups], symmetric."""
    permutation, stored_group_size, groups = order_by_group(g_idx, scales.shape[1], group_size)
    padded = torch.nn.functional.pad(codes, (0, 1))[:, torch.where(permutation < 0, codes.shape[1], permutation)]
    weight = QuantizedWeight(
        pack_codes(padded, 4), scales[:, groups], codes.shape[1], stored_group_size, permutation=permutation
    )
    return weight, (codes.float() - 8) * scales.float()[:, g_idx]


@pytest.mark.parametrize("shard", [slice(None), slice(0, 64), slice(64, 128), slice(3, 90)])
@pytest.mark.parametrize(("groups", "group_size"), [(4, 32), (8, 16), (1, 128)])
def test_the_weight_is_the_one_that_is_meant(groups: int, group_size: int, shard: slice, device: torch.device) -> None:
    codes = torch.randint(0, 16, (32, 128), dtype=torch.uint8)
    scales = torch.rand(32, groups).half()
    g_idx = torch.randperm(128) // group_size
    weight, meant = stored(codes[:, shard], scales, g_idx[shard], group_size)
    assert torch.equal(weight.dequantize(), meant)
    x = torch.randn(3, weight.k, device=device)
    for backend in ("cpu", "triton"):
        assert_product(w4a16_matmul(x, weight.to(device), backend=backend), x, weight.to(device))


def test_even_groups_are_sorted_alone() -> None:
    g_idx = torch.tensor([1, 0, 2, 1, 0, 2]).repeat_interleave(8)
    permutation, group_size, groups = order_by_group(g_idx, 3, 16)
    assert permutation.tolist() == [
        *range(8, 16),
        *range(32, 40),
        *range(8),
        *range(24, 32),
        *range(16, 24),
        *range(40, 48),
    ]
    assert permutation.dtype == torch.int32
    assert (group_size, groups.tolist()) == (16, [0, 1, 2])


def test_uneven_groups_are_padded_and_empty_ones_left_out() -> None:
    g_idx = torch.tensor([2] * 17 + [0] * 3)
    permutation, group_size, groups = order_by_group(g_idx, 4, 32)
    assert permutation.tolist() == [17, 18, 19] + [-1] * 13 + [*range(17)] + [-1] * 15
    assert (group_size, groups.tolist()) == (16, [0, 2, 2])


def test_a_short_last_group_needs_no_padding() -> None:
    permutation, group_size, groups = order_by_group(torch.tensor([1] * 16 + [3] * 5), 5, 16)
    assert permutation.tolist() == list(range(21))
    assert (group_size, groups.tolist()) == (16, [1, 3])


def test_one_group_of_any_size_is_one_per_row() -> None:
    permutation, group_size, groups = order_by_group(torch.full((40,), 2), 3, 100)
    assert permutation.tolist() == list(range(40))
    assert (group_size, groups.tolist()) == (40, [2])


@pytest.mark.parametrize(
    ("g_idx", "error", "message"),
    [
        (torch.zeros(4), TypeError, "g_idx: got torch.float32, want integers"),
        (torch.zeros(2, 2, dtype=torch.int32), ValueError, r"g_idx: got shape \(2, 2\), want \[k\]"),
        (torch.tensor([0, 3]), ValueError, "g_idx: got groups from 0 to 3, want 0 to num_groups - 1 = 2"),
        (torch.tensor([0, -1]), ValueError, "g_idx: got groups from -1 to 0"),
    ],
)
def test_refuses(g_idx: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        order_by_group(g_idx, 3, 16)

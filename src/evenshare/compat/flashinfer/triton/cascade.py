"""Merging attention states, under the names of FlashInfer's Triton kernels."""

from __future__ import annotations

import math

import torch

from evenshare.compat.flashinfer._arguments import check_int32
from evenshare.compat.flashinfer.cascade import merge_state, merge_state_in_place, merge_states
from evenshare.ops.rope import token_requests

__all__ = ["merge_state", "merge_state_in_place", "merge_states", "variable_length_merge_states"]


def variable_length_merge_states(
    v: torch.Tensor, s: torch.Tensor, indptr: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """v [nnz, H, D] and base-2 s [nnz, H]: states [indptr[i], indptr[i + 1]) -> row i of (v [n, H, D], s float32 [n, H]).

    indptr: int32 [n + 1], not read by the host. A row without states is (0, -inf). Sums in fp32.
    """
    check_int32(indptr=indptr)
    rows, heads = indptr.shape[0] - 1, v.shape[1]
    row, _ = token_requests(indptr, v.shape[0])
    at = torch.where(row < 0, rows, row).long()  # one row more for states that belong to none
    s = s.float()
    peak = torch.full((rows + 1, heads), -math.inf, device=v.device)
    peak.scatter_reduce_(0, at[:, None].expand_as(s), s, "amax")
    weights = torch.exp2(s - torch.where(peak == -math.inf, 0.0, peak)[at])
    total = torch.zeros_like(peak).index_add_(0, at, weights)
    values = torch.where((s == -math.inf)[..., None], 0.0, v.float()) * weights[..., None]
    sums = torch.zeros(rows + 1, *v.shape[1:], device=v.device).index_add_(0, at, values)
    empty = total == 0
    out = sums / torch.where(empty, 1.0, total)[..., None]
    lse = torch.where(empty, -math.inf, peak + torch.log2(torch.where(empty, 1.0, total)))
    return out[:rows].to(v.dtype), lse[:rows]

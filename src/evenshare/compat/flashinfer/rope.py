"""FlashInfer's rotary embeddings: by ragged batch or by position, plain or Llama 3.1's, in place or not, and by table."""

from __future__ import annotations

import torch

from evenshare import ops
from evenshare.device.checks import check_is_tensor
from evenshare.ops import RopeScaling
from evenshare.ops.rope import token_requests

Pair = tuple[torch.Tensor, torch.Tensor]


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> Pair:
    """q [nnz, Hq, D], k [nnz, Hk, D] of a ragged batch: row i of request b, indptr[b] <= i, is at i - indptr[b] + offsets[b]."""
    return ops.apply_rope(
        q, k, _positions(q, indptr, offsets), rotary_dim=rotary_dim, interleave=interleave, rope_scale=rope_scale,
        rope_theta=rope_theta,
    )  # fmt: skip


def apply_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """`apply_rope`, written to q and k."""
    ops.apply_rope(
        q, k, _positions(q, indptr, offsets), rotary_dim=rotary_dim, interleave=interleave, rope_scale=rope_scale,
        rope_theta=rope_theta, q_out=q, k_out=k,
    )  # fmt: skip


def apply_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> Pair:
    """`apply_rope` with each row's position, integers [nnz]."""
    return ops.apply_rope(
        q, k, pos_ids, rotary_dim=rotary_dim, interleave=interleave, rope_scale=rope_scale, rope_theta=rope_theta
    )


def apply_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """`apply_rope_pos_ids`, written to q and k."""
    ops.apply_rope(
        q, k, pos_ids, rotary_dim=rotary_dim, interleave=interleave, rope_scale=rope_scale, rope_theta=rope_theta,
        q_out=q, k_out=k,
    )  # fmt: skip


def apply_llama31_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> Pair:
    """`apply_rope` with Llama 3.1's frequencies (`evenshare.ops.RopeScaling`)."""
    return ops.apply_rope(
        q, k, _positions(q, indptr, offsets), rotary_dim=rotary_dim, interleave=interleave, rope_scale=rope_scale,
        rope_theta=rope_theta, scaling=RopeScaling(low_freq_factor, high_freq_factor, old_context_len),
    )  # fmt: skip


def apply_llama31_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """`apply_llama31_rope`, written to q and k."""
    ops.apply_rope(
        q, k, _positions(q, indptr, offsets), rotary_dim=rotary_dim, interleave=interleave, rope_scale=rope_scale,
        rope_theta=rope_theta, scaling=RopeScaling(low_freq_factor, high_freq_factor, old_context_len), q_out=q, k_out=k,
    )  # fmt: skip


def apply_llama31_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> Pair:
    """`apply_llama31_rope` with each row's position."""
    return ops.apply_rope(
        q, k, pos_ids, rotary_dim=rotary_dim, interleave=interleave, rope_scale=rope_scale, rope_theta=rope_theta,
        scaling=RopeScaling(low_freq_factor, high_freq_factor, old_context_len),
    )  # fmt: skip


def apply_llama31_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """`apply_llama31_rope_pos_ids`, written to q and k."""
    ops.apply_rope(
        q, k, pos_ids, rotary_dim=rotary_dim, interleave=interleave, rope_scale=rope_scale, rope_theta=rope_theta,
        scaling=RopeScaling(low_freq_factor, high_freq_factor, old_context_len), q_out=q, k_out=k,
    )  # fmt: skip


def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> Pair:
    """query [nnz, Hq * head_size], key [nnz, Hk * head_size], by a float32 table [positions, rotary_dim] of cosines, then sines."""
    query_out, key_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key))
    _by_table(positions, query, key, head_size, cos_sin_cache, is_neox, query_out, key_out)
    return query_out, key_out


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """`apply_rope_with_cos_sin_cache`, written to query and key."""
    _by_table(positions, query, key, head_size, cos_sin_cache, is_neox, query, key)


def _by_table(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    query_out: torch.Tensor,
    key_out: torch.Tensor,
) -> None:
    check_is_tensor(cos_sin_cache=cos_sin_cache)
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError(f"cos_sin_cache: got dtype {cos_sin_cache.dtype}, want torch.float32")
    q, k, q_out, k_out = (_by_head(name, x, head_size) for name, x in (
        ("query", query), ("key", key), ("query", query_out), ("key", key_out)))  # fmt: skip
    ops.apply_rope_with_cos_sin_cache(q, k, positions, cos_sin_cache, interleave=not is_neox, q_out=q_out, k_out=k_out)


def _by_head(name: str, x: torch.Tensor, head_size: int) -> torch.Tensor:
    check_is_tensor(**{name: x})
    if x.dim() == 3 and x.shape[-1] == head_size:
        return x
    if x.dim() != 2 or x.shape[1] % head_size:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, want [nnz, heads * {head_size}]")
    return x.unflatten(1, (-1, head_size))


def _positions(q: torch.Tensor, indptr: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Of each row of q; 0, which turns nothing, for rows that no request owns."""
    check_is_tensor(q=q, indptr=indptr, offsets=offsets)
    for name, tensor in (("indptr", indptr), ("offsets", offsets)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: got dtype {tensor.dtype}, want int32 or int64")
    if indptr.dim() != 1 or tuple(offsets.shape) != (indptr.shape[0] - 1,):
        raise ValueError(
            f"offsets: got shape {tuple(offsets.shape)}, want [{indptr.shape[0] - 1}], one less than indptr"
        )
    request, place = token_requests(indptr.to(q.device, non_blocking=True), q.shape[0])
    if offsets.shape[0] == 0:
        return torch.zeros_like(request)
    starts = offsets.to(q.device, torch.int32, non_blocking=True)
    return torch.where(request < 0, 0, place + starts[request.clamp(min=0)])

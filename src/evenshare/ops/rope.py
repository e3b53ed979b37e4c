"""Rotary position embedding of queries and keys: from frequencies, or from a table of cosines and sines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from evenshare.device.checks import check_is_tensor
from evenshare.device.launcher import Launch, get_launcher
from evenshare.device.target import select_target
from evenshare.ops.kernels import rope as rope_kernels
from evenshare.ops.rows import check_float, check_like

BLOCK_ELEMENTS = 2048  # of the heads that a program rotates at a time


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of long wavelengths: those above old_context_len / low_freq_factor positions are `rope_scale` times as
    long, those below old_context_len / high_freq_factor as they were, and those between them in between."""

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    old_context_len: int = 8192

    def __post_init__(self) -> None:
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: got {self.high_freq_factor}, want more than low_freq_factor {self.low_freq_factor}"
            )


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    *,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    scaling: RopeScaling | None = None,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pair i of each head's first rotary_dim elements by positions * rope_theta ** (-2 i / rotary_dim) / rope_scale.

    q: [n, Hq, D], k: [n, Hk, D]; float32, float16 or bfloat16; any strides. positions: int32 or int64 [n]. (arXiv 2104.09864.)
    rotary_dim: even, at most D, whose other elements are kept; None: D. interleave: pairs are (2 i, 2 i + 1), otherwise
    (i, i + rotary_dim / 2). scaling: Llama 3.1's; rope_scale then stretches the long wavelengths only.
    q_out, k_out: like q and k, and may be q and k.

    Returns (q_out, k_out). Angles are exact to fp32 at any position; the result is rounded once. Never syncs.
    Raises ValueError or TypeError naming the argument, before any write.

    >>> q = torch.tensor([[[1.0, 0.0]]])
    >>> apply_rope(q, q, torch.tensor([1]))[0]
    tensor([[[0.5403, 0.8415]]])
    """
    head_dim = _check_heads(q, k, positions)
    rotary_dim = _check_rotary_dim("rotary_dim", head_dim if rotary_dim is None else rotary_dim, head_dim)
    for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        if not (isinstance(value, int | float) and value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}: got {value}, want a finite number above 0")
    q_out, k_out = _outputs(q, k, q_out, k_out)
    target = select_target(q.device, backend)
    if q.shape[0] == 0 or rotary_dim == 0:
        _copy_unless_same(q, k, q_out, k_out)
        return q_out, k_out
    key = (rotary_dim, float(rope_scale), float(rope_theta), scaling, q.device)
    if target.backend == "cpu":
        turns = positions.to(torch.float64)[:, None] * frequencies(*key)
        _rotate(q, k, turns.cos().float(), turns.sin().float(), rotary_dim, interleave, q_out, k_out)
        return q_out, k_out
    # What a graph's capture has only recorded has no value yet.
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    table = (_phases.__wrapped__ if capturing else _phases)(*key)
    _launch(q, k, q_out, k_out, positions, table, rotary_dim, interleave, target.interpreted)
    return q_out, k_out


def apply_rope_with_cos_sin_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    interleave: bool = False,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rope` by a table: cos_sin_cache float32, float16 or bfloat16 [max_positions, rotary_dim], cosines before sines.

    A token whose position is outside the table is not rotated.

    >>> q, table = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[0.0, 1.0]])
    >>> apply_rope_with_cos_sin_cache(q, q, torch.tensor([0]), table)[0]
    tensor([[[0., 1.]]])
    """
    head_dim = _check_heads(q, k, positions)
    check_float("cos_sin_cache", cos_sin_cache)
    if cos_sin_cache.dim() != 2:
        raise ValueError(f"cos_sin_cache: got shape {tuple(cos_sin_cache.shape)}, want [max_positions, rotary_dim]")
    if cos_sin_cache.device != q.device:
        raise ValueError(f"cos_sin_cache: got device {cos_sin_cache.device}, want {q.device}, as q")
    rotary_dim = _check_rotary_dim("cos_sin_cache", cos_sin_cache.shape[1], head_dim)
    q_out, k_out = _outputs(q, k, q_out, k_out)
    target = select_target(q.device, backend)
    num_cached = cos_sin_cache.shape[0]
    if q.shape[0] == 0 or rotary_dim == 0 or num_cached == 0:
        _copy_unless_same(q, k, q_out, k_out)
    elif target.backend == "cpu":
        known = (positions >= 0) & (positions < num_cached)
        cos, sin = cos_sin_cache.float()[positions.long().where(known, 0)].chunk(2, -1)
        cos, sin = cos.where(known[:, None], 1.0), sin.where(known[:, None], 0.0)
        _rotate(q, k, cos, sin, rotary_dim, interleave, q_out, k_out)
    else:
        _launch(q, k, q_out, k_out, positions, cos_sin_cache, rotary_dim, interleave, target.interpreted)
    return q_out, k_out


def token_requests(indptr: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [num_tokens]: the request r of each token, indptr[r] <= token < indptr[r + 1], and its place in that request.

    indptr: int32 or int64 [B + 1] on any device, whose values the host does not read. Tokens that no request owns have (-1, -1).
    """
    token = torch.arange(num_tokens, dtype=indptr.dtype, device=indptr.device)
    request = torch.searchsorted(indptr, token, right=True) - 1
    batch = indptr.shape[0] - 1
    owned = (request >= 0) & (request < batch)
    place = token - indptr[request.clamp(0, batch)]
    return request.where(owned, -1).to(torch.int32), place.where(owned, -1).to(torch.int32)


def frequencies(
    rotary_dim: int, rope_scale: float, rope_theta: float, scaling: RopeScaling | None, device: torch.device
) -> torch.Tensor:
    """float64 [rotary_dim / 2]: radians a position."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    plain = torch.pow(rope_theta, -exponents)
    stretched = plain / rope_scale
    if scaling is None:
        return stretched
    waves = scaling.old_context_len * plain / (2 * math.pi)
    kept = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(stretched, plain, kept.clamp(0, 1))


@lru_cache(maxsize=64)
def _phases(
    rotary_dim: int, rope_scale: float, rope_theta: float, scaling: RopeScaling | None, device: torch.device
) -> torch.Tensor:
    """int64 [rotary_dim / 2]: 2^-64 turns a position, as `kernels/rope.py` wants them. Whole turns do not matter."""
    turns = frequencies(rotary_dim, rope_scale, rope_theta, scaling, device) / (2 * math.pi)
    return ((turns - turns.round()) * 2.0**64).to(torch.int64)


def _rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotary_dim: int,
    interleave: bool,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
) -> None:
    """The torch backend: cos, sin [n, rotary_dim / 2]."""
    cos, sin = cos[:, None], sin[:, None]
    for x, out in ((q, q_out), (k, k_out)):
        turned, result = x[..., :rotary_dim].float(), out[..., :rotary_dim]
        if interleave:
            (a, b), (first, second) = ((t[..., 0::2], t[..., 1::2]) for t in (turned, result))
        else:
            (a, b), (first, second) = (t.chunk(2, -1) for t in (turned, result))
        rotated = a * cos - b * sin, b * cos + a * sin
        first.copy_(rotated[0])
        second.copy_(rotated[1])
        if out is not x and rotary_dim < x.shape[-1]:
            out[..., rotary_dim:] = x[..., rotary_dim:]


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    rotary_dim: int,
    interleave: bool,
    interpreted: bool,
) -> None:
    launch = _bind(
        q.device, q.shape[0], q.shape[1], k.shape[1], q.shape[2], rotary_dim, interleave, q_out is not q or k_out is not k,
        table.shape[0] if table.dim() == 2 else 0, q.stride(), k.stride(), q_out.stride(), k_out.stride(),
        positions.stride(0), table.stride() if table.dim() == 2 else (0, 1), table.dim() == 2, interpreted,
    )  # fmt: skip
    launch(q, k, q_out, k_out, positions, table)


@lru_cache(maxsize=512)
def _bind(
    device: torch.device,
    num_tokens: int,
    num_q_heads: int,
    num_k_heads: int,
    head_dim: int,
    rotary_dim: int,
    interleave: bool,
    copies: bool,
    num_cached: int,
    q_strides: tuple[int, ...],
    k_strides: tuple[int, ...],
    q_out_strides: tuple[int, ...],
    k_out_strides: tuple[int, ...],
    position_stride: int,
    table_strides: tuple[int, ...],
    has_cache: bool,
    interpreted: bool,
) -> Launch:
    block_half = max(triton.next_power_of_2(rotary_dim // 2), 8)
    most = max(triton.next_power_of_2(max(num_q_heads, num_k_heads)), 1)
    block_heads = most if interpreted else min(most, max(BLOCK_ELEMENTS // (2 * block_half), 1))
    launcher = get_launcher(
        rope_kernels.rope,
        6,
        HAS_CACHE=has_cache,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        INTERLEAVE=interleave,
        COPY_REST=copies and rotary_dim < head_dim,
        BLOCK_H=block_heads,
        BLOCK_HALF=block_half,
        BLOCK_REST=triton.next_power_of_2(max(head_dim - rotary_dim, 1)),
        num_warps=4,
    )
    static = (
        num_q_heads, num_k_heads, num_cached, *q_strides, *k_strides, *q_out_strides, *k_out_strides, position_stride,
        *table_strides,
    )  # fmt: skip
    return launcher.bind(device, (num_tokens,), static)


def _check_heads(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> int:
    check_float("q", q)
    check_float("k", k)
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 3:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want [tokens, heads, head_dim]")
    check_like("k", k, "q", q, (q.shape[0], k.shape[1], q.shape[2]))
    check_is_tensor(positions=positions)
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"positions: got dtype {positions.dtype}, want int32 or int64")
    if tuple(positions.shape) != (q.shape[0],):
        raise ValueError(f"positions: got shape {tuple(positions.shape)}, want [{q.shape[0]}], a token of q each")
    if positions.device != q.device:
        raise ValueError(f"positions: got device {positions.device}, want {q.device}, as q")
    return q.shape[2]


def _check_rotary_dim(name: str, rotary_dim: int, head_dim: int) -> int:
    if not isinstance(rotary_dim, int) or rotary_dim % 2 or not 0 <= rotary_dim <= head_dim:
        raise ValueError(f"{name}: got a rotary dim of {rotary_dim}, want an even number up to the head dim {head_dim}")
    return rotary_dim


def _outputs(
    q: torch.Tensor, k: torch.Tensor, q_out: torch.Tensor | None, k_out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    made = []
    for name, x, out in (("q_out", q, q_out), ("k_out", k, k_out)):
        if out is None:
            made.append(torch.empty_like(x, memory_format=torch.contiguous_format))
        else:
            check_like(name, out, name[0], x, x.shape)
            made.append(out)
    return made[0], made[1]


def _copy_unless_same(q: torch.Tensor, k: torch.Tensor, q_out: torch.Tensor, k_out: torch.Tensor) -> None:
    for x, out in ((q, q_out), (k, k_out)):
        if out is not x:
            out.copy_(x)

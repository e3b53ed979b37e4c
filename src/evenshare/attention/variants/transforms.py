"""Ready-made transforms of queries, keys and values: functions (x, b, h, position, d) -> vector, or makers of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from evenshare.attention.variants.scores import check_floats, cos_approx, sin_approx
from evenshare.ops.rope import RopeScaling, frequencies

Transform = Callable[[Any, Any, Any, Any, Any], Any]


def rope(
    rotary_dim: int,
    *,
    interleave: bool = False,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    scaling: RopeScaling | None = None,
    device: torch.device | str | None = None,
) -> Transform:
    """Rotary embedding by the position (arXiv 2104.09864), for `query` and `key` of a `Variant`: keys are cached unrotated.

    Pair i of the first rotary_dim dims turns by position * rope_theta ** (-2 i / rotary_dim) / rope_scale; the other dims are
    kept. interleave: pairs are (2 i, 2 i + 1), otherwise (i, i + rotary_dim / 2). scaling: Llama 3.1's; rope_scale then stretches
    the long wavelengths only. device: that of q. Angles are exact to fp32 at any position.

    >>> turn = rope(2)
    >>> turn(torch.tensor([1.0, 0.0]), 0, 0, 1, torch.arange(2))
    tensor([0.5403, 0.8415])
    """
    if not isinstance(rotary_dim, int) or rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim: got {rotary_dim!r}, want an even number of 2 or more")
    for name, number in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        if not (isinstance(number, int | float) and number > 0 and math.isfinite(number)):
            raise ValueError(f"{name}: got {number!r}, want a finite number above 0")
    place = torch.device(device) if device is not None else torch.empty(0).device
    # In units of 2^-32 turns: a product of integers loses whole turns by overflow and nothing else, and what is left is small.
    turns = frequencies(rotary_dim, rope_scale, rope_theta, scaling, place) / (2 * math.pi)
    units = (turns - turns.round()) * 2.0**32
    whole, rest = units.round().to(torch.int64).to(torch.int32), (units - units.round()).to(torch.float32)
    partner, pair, is_second = _pairs(rotary_dim, interleave)

    def rope(x: Any, b: Any, h: Any, position: Any, d: Any) -> Any:
        wrapped = (position * whole[pair(d)]).to(torch.int32)
        angle = (wrapped.to(torch.float32) + position * rest[pair(d)]) * (2 * math.pi / 2**32)
        turned = x * cos_approx(angle) + x[partner(d)] * torch.where(is_second(d), 1.0, -1.0) * sin_approx(angle)
        return torch.where(d < rotary_dim, turned, x)

    return rope


def rope_with_cos_sin_cache(cos_sin_cache: torch.Tensor, *, interleave: bool = False) -> Transform:
    """`rope` by a table: cos_sin_cache, floats [max_positions, rotary_dim], cosines before sines.

    A position outside the table is not rotated.
    """
    check_floats("cos_sin_cache", cos_sin_cache, 2)
    num_cached, rotary_dim = cos_sin_cache.shape
    if rotary_dim < 2 or rotary_dim % 2 or not num_cached:
        raise ValueError(
            f"cos_sin_cache: got shape {tuple(cos_sin_cache.shape)}, want [max_positions, an even rotary_dim]"
        )
    partner, pair, is_second = _pairs(rotary_dim, interleave)

    def rope_with_cos_sin_cache(x: Any, b: Any, h: Any, position: Any, d: Any) -> Any:
        rotated = (d < rotary_dim) & (position >= 0) & (position < num_cached)
        row, column = torch.clamp(position, 0, num_cached - 1), pair(d)
        cos, sin = cos_sin_cache[row, column], cos_sin_cache[row, column + rotary_dim // 2]
        turned = x * cos + x[partner(d)] * torch.where(is_second(d), 1.0, -1.0) * sin
        return torch.where(rotated, turned, x)

    return rope_with_cos_sin_cache


def _pairs(rotary_dim: int, interleave: bool) -> tuple[Callable[[Any], Any], ...]:
    """Functions of a dim: the dim that it is turned with, the number of their pair, whether it is the second of it.

    Of dims past rotary_dim they say something that is an index all the same.
    """
    half = rotary_dim // 2
    if interleave:
        return lambda d: (d ^ 1) % rotary_dim, lambda d: (d >> 1) % half, lambda d: (d & 1) == 1
    return lambda d: (d + half) % rotary_dim, lambda d: d % half, lambda d: d >= half


def rms_norm(weight: torch.Tensor, eps: float = 1e-6) -> Transform:
    """x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467), the norm of queries and keys of Qwen3 and others.

    weight: floats [D], for `query` and `key` one each.
    """
    check_floats("weight", weight, 1)
    if not (isinstance(eps, int | float) and eps >= 0):
        raise ValueError(f"eps: got {eps!r}, want a number of 0 or more")

    def rms_norm(x: Any, b: Any, h: Any, position: Any, d: Any) -> Any:
        return x * torch.rsqrt(torch.square(x).mean() + eps) * weight[d]

    return rms_norm


def in_turn(*transforms: Transform) -> Transform:
    """One transform after the other: `in_turn(rms_norm(weight), rope(128))`."""

    def in_turn(x: Any, *place: Any) -> Any:
        for transform in transforms:
            x = transform(x, *place)
        return x

    return in_turn

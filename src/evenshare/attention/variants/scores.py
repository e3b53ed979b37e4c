"""Ready-made score functions (score, b, h, q_idx, kv_idx) -> score, or makers of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from evenshare.attention.variants.operations import apply
from evenshare.attention.variants.symbolic import Symbol
from evenshare.attention.variants.variant import Variant
from evenshare.device.checks import check_is_tensor

ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]


def tanh_approx(x: Any) -> Any:
    """tanh, in kernels by the GPU's own instruction, whose relative error is below 2^-10.9; for functions of a `Variant`."""
    return apply("tanh_approx", (x,), {}) if isinstance(x, Symbol) else torch.tanh(x)


def sin_approx(x: Any) -> Any:
    """sin, in kernels by the GPU's own instruction, whose absolute error is below 2^-20.5 between -pi and pi."""
    return apply("sin_approx", (x,), {}) if isinstance(x, Symbol) else torch.sin(x)


def cos_approx(x: Any) -> Any:
    """cos, as `sin_approx`."""
    return apply("cos_approx", (x,), {}) if isinstance(x, Symbol) else torch.cos(x)


def soft_cap(cap: float, approximate: bool = False) -> ScoreMod:
    """cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118, section 2). approximate: by `tanh_approx`, which is faster."""
    if not (isinstance(cap, int | float) and cap > 0 and math.isfinite(cap)):
        raise ValueError(f"cap: got {cap!r}, want a finite number above 0")
    tanh = tanh_approx if approximate else torch.tanh

    def soft_cap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * tanh(score / cap)

    return soft_cap


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """float32 [num_heads]: the geometric series of ALiBi (arXiv 2108.12409, section 3); between powers of two, every other slope of
    the next longer series fills up."""
    if not isinstance(num_heads, int) or num_heads < 1:
        raise ValueError(f"num_heads: got {num_heads!r}, want an int of 1 or more")
    whole = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / whole) for i in range(num_heads - whole)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def alibi(slopes: torch.Tensor) -> ScoreMod:
    """score + slopes[h] * (kv_idx - q_idx) (ALiBi, arXiv 2108.12409). slopes: floats [Hq], such as `alibi_slopes`."""
    check_floats("slopes", slopes, 1)

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi


def relative_bias(table: torch.Tensor) -> ScoreMod:
    """A learned number for each head and distance is added (Shaw et al., arXiv 1803.02155, section 3.2, as a bias).

    table: floats [Hq, 2 * n + 1], of the distances kv_idx - q_idx from -n to n; farther keys have the last one's.
    """
    check_floats("table", table, 2)
    if table.shape[1] % 2 == 0:
        raise ValueError(f"table: got {table.shape[1]} distances, want an odd number, from -n to n")
    longest = table.shape[1] // 2

    def relative_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, torch.clamp(kv_idx - q_idx, -longest, longest) + longest]

    return relative_bias


def sigmoid_attention(bias: float = 0.0, mask_mod: Callable[..., Any] | None = None) -> Variant:
    """sigmoid(score + bias) as the weights, without softmax (Ramapuram et al., arXiv 2409.04431, section 3).

    bias: the paper takes -log(number of keys), so that weights start out as small as those of a softmax.
    """

    def sigmoid(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.sigmoid(score + bias)

    return Variant(score_mod=sigmoid, mask_mod=mask_mod, softmax=False)


def check_floats(name: str, tensor: Any, dims: int) -> None:
    check_is_tensor(**{name: tensor})
    if not tensor.is_floating_point() or tensor.dim() != dims:
        raise ValueError(f"{name}: got {tensor.dtype} of shape {tuple(tensor.shape)}, want floats of {dims} dimensions")

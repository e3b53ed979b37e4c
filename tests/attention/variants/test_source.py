"""What functions become: every operation as torch has it, one kernel for one text, and errors that show the line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import noop_mask

from evenshare import Variant

ROWS, KEYS = 8, 16
SLOPES = torch.linspace(-1, 1, 4)
BIAS = torch.linspace(-2, 2, 4 * 5).view(4, 5)
IDS = torch.arange(40) // 7


@triton.jit
def apply_to_a_tile(scores_ptr, out_ptr, b, h, first_q, first_kv, args, MODIFY: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    rows, keys = tl.arange(0, M), tl.arange(0, N)
    at = rows[:, None] * N + keys[None, :]
    heads = tl.full([M], 0, tl.int32) + h
    score = MODIFY(tl.load(scores_ptr + at), b, heads[:, None], first_q + rows[:, None], first_kv + keys[None, :], args)
    tl.store(out_ptr + at, score)


def in_the_kernel(variant: Variant, scores: torch.Tensor, h: int, first_q: int) -> torch.Tensor:
    out = torch.full_like(scores, math.nan)
    apply_to_a_tile[(1,)](scores, out, 1, h, first_q, 3, variant.arguments, variant.modify, ROWS, KEYS)
    return out


def in_torch(variant: Variant, scores: torch.Tensor, h: int, first_q: int) -> torch.Tensor:
    from evenshare.attention.variants.eager import Place, modified

    heads = scores.expand(h + 1, ROWS, KEYS).double()  # of which the last one is asked for
    place = Place(1, torch.arange(h + 1), torch.arange(first_q, first_q + ROWS), torch.arange(3, 3 + KEYS))
    return modified(variant, heads, place)[h]


def check_both(variant: Variant, device: torch.device, h: int = 2, first_q: int = 4) -> None:
    scores = torch.randn(ROWS, KEYS)
    want = in_torch(variant, scores, h, first_q)
    if device.type == "cuda":  # captured tensors are this module's, on the CPU
        pytest.skip("its tensors are on the CPU")
    got = in_the_kernel(variant, scores, h, first_q)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5, equal_nan=True)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda s, b, h, q, k: 2 * s + (q - k) / 3 - s / (k + 1.5) + (1 - s) * -b,
    "floor": lambda s, b, h, q, k: (q - k) // 3 + (k - q) % 4 + (q - 9) // -2 + (k - 9) % -5 + s,
    "float floor": lambda s, b, h, q, k: s // 0.5 + s % 0.75 + torch.remainder(s, -0.3),
    "rounding mode": lambda s, b, h, q, k: s + torch.div(q - k, 4, rounding_mode="floor") + torch.div(k, q + 0.5),
    "power": lambda s, b, h, q, k: s**2 + (q - k) ** 3 + 2.0 ** (h - q) + (k + 1.0) ** 0.5 + torch.square(s) + torch.pow(s, 4),
    "compare": lambda s, b, h, q, k: torch.where((q >= k) & ~(k == 5) | (q < 6) ^ (s > 0), s, -1.5),
    "bits": lambda s, b, h, q, k: ((q << 2) >> 1 | k & 5 ^ 3) + ~k + s,
    "bools": lambda s, b, h, q, k: s * (q > k) + (q > 2) + (k > 2) + ((q > 2) + (k > 2)) + ((q > 2) * (k > 2)),
    "logical": lambda s, b, h, q, k: s.masked_fill(torch.logical_and(q > k, torch.logical_not(k)), 3).where(q != 7, 0),
    "unary": lambda s, b, h, q, k: torch.exp(s) + s.abs().sqrt() + torch.log1p(s.abs()) + torch.sin(q) * s.cos() + (-s).tanh(),
    "unary of integers": lambda s, b, h, q, k: s + torch.exp2(q - k) + torch.log(k + 1) + torch.rsqrt(q + 1) + abs(q - k),
    "activations": lambda s, b, h, q, k: s.sigmoid() + torch.nn.functional.silu(s) + torch.relu(s) + torch.erf(s) + s.reciprocal(),
    "softplus": lambda s, b, h, q, k: torch.nn.functional.softplus(s) + torch.log2(s.abs() + 1) + s.floor() + torch.ceil(s),
    "clamps": lambda s, b, h, q, k: s.clamp(-0.5, 0.5) + torch.clamp(q - k, min=-2) + torch.maximum(s, q - k) + torch.minimum(q, k),
    "casts": lambda s, b, h, q, k: (3 * s).int() + (q > k).float() + q.to(torch.float32) / 7 + (q - 5).bool() + s.to(s.dtype),
    "filled": lambda s, b, h, q, k: s + torch.ones_like(s) + q.new_zeros(()) + torch.full_like(s, 0.5),
    "infinite": lambda s, b, h, q, k: torch.where(torch.isinf(torch.where(k == 4, -math.inf, s)) | s.isnan(), math.inf, s),
    "tables": lambda s, b, h, q, k: s + SLOPES[h] * (k - q) + BIAS[h, (k + q) % 5] + BIAS[-1][0] * SLOPES[b].exp(),
    "tables as indices": lambda s, b, h, q, k: s + BIAS[h % 4, IDS[k] % 5] + (IDS[q] == IDS[k]) + BIAS[IDS[1]][-2],
    "parts of tables": lambda s, b, h, q, k: s + sum(SLOPES) + BIAS.unbind()[1][k % 5] + BIAS.t()[q % 5, h] + SLOPES.chunk(2)[1][0],
    "constant": lambda s, b, h, q, k: 2,
    "of a row": lambda s, b, h, q, k: q * 2,
    "of a head": lambda s, b, h, q, k: SLOPES[h],
    "nothing": lambda s, b, h, q, k: s,
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(device: torch.device, name: str) -> None:
    check_both(Variant(score_mod=OPERATIONS[name]), device)


@pytest.mark.parametrize("mask_mod", [noop_mask, lambda *_: True, lambda b, h, q, k: False, lambda b, h, q, k: k & 1])
@pytest.mark.parametrize("softmax", [True, False])
def test_masks(device: torch.device, mask_mod: Callable[..., Any], softmax: bool) -> None:
    check_both(Variant(mask_mod=mask_mod, softmax=softmax), device)


def test_names_of_tensors_do_not_clash(device: torch.device) -> None:
    t0, t1, tl, floor_divide, score = (SLOPES + i for i in range(5))

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + t0[h] * t1[h] + tl[h] * floor_divide[h] * score[h] + q // 3

    check_both(Variant(score_mod=score_mod), device)


def test_parameters_of_a_module(device: torch.device) -> None:
    class Bias(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(SLOPES.clone())

        def forward(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + self.weight[h]

    module = Bias()
    variant = Variant(score_mod=module, sinks=module.weight)
    check_both(variant, device)
    assert "from score_mod test_parameters_of_a_module.<locals>.Bias and sinks" in variant.source()


def test_long_chains_of_shared_values() -> None:
    """Of each operation one line, however often its result is used."""

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for _ in range(3000):
            s = s + s * s
        return s

    assert Variant(score_mod=score_mod).source().count("\n    t") == 6000


def expressions(*leaves: str) -> st.SearchStrategy[str]:
    """Python source of numbers."""
    numbers = st.sampled_from(["2", "-3", "4", "0.75"])
    return st.recursive(
        st.sampled_from([*leaves, "b", "h", "q", "k", "SLOPES[h]", "BIAS[h, k % 5]", "IDS[q]"]),
        lambda inner: st.one_of(
            st.builds("({} {} {})".format, inner, st.sampled_from(["+", "*", "<", ">=", "=="]), inner | numbers),
            st.builds("({} * 1 - {} * 1)".format, inner, inner | numbers),
            st.builds("({} {} {})".format, inner, st.sampled_from(["//", "%", "/"]), numbers),
            st.builds("torch.where({} > 1, {}, {})".format, inner, inner, inner | numbers),
            st.builds("torch.{}({}, {})".format, st.sampled_from(["maximum", "minimum"]), inner, inner),
            st.builds("torch.tanh({} * 0.1)".format, inner),
            st.builds("abs({} * 1)".format, inner),
        ),
        max_leaves=8,
    )


@settings(max_examples=50, deadline=None, derandomize=True)
@given(expressions("s"), expressions(), st.integers(0, 3), st.integers(-7, 9))
def test_random_expressions(score: str, seen: str, h: int, first_q: int) -> None:
    """Whatever is composed of the operations means the same in the kernel and in torch."""
    names = {"torch": torch, "SLOPES": SLOPES, "BIAS": BIAS, "IDS": IDS}
    score_mod = eval(f"lambda s, b, h, q, k: s + {score}", names)
    variant = Variant(score_mod=score_mod, mask_mod=eval(f"lambda b, h, q, k: {seen} > 1", names))
    if torch.cuda.is_available():
        return
    scores = torch.randn(ROWS, KEYS, generator=torch.Generator().manual_seed(0))
    want, got = in_torch(variant, scores, h, first_q), in_the_kernel(variant, scores, h, first_q)
    # A comparison of two equal floats, and a floor, may fall to either side by rounding: in few places, an error in all of them.
    wrong = ~torch.isclose(got.double(), want, atol=1e-4, rtol=1e-4, equal_nan=True)
    assert int(wrong.sum()) <= wrong.numel() // 4, variant.source()

"""Every operator by torch's own checks, compiled whole, and equal to its function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from evenshare.compat import torch_ops

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def paged() -> Arguments:
    cache = torch.randn(8, 4, 2, 16)
    table, lens = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32), torch.tensor([7, 2], dtype=torch.int32)
    return (torch.randn(2, 4, 16), cache, cache.clone()), {"block_table": table, "kv_lens": lens, "sm_scale": 0.3}


def appended() -> Arguments:
    where = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([5, 0], dtype=torch.int32)
    caches = torch.zeros(2, 8, 4, 2, 16).unbind()
    return (torch.randn(2, 2, 16), torch.randn(2, 2, 16), *where, *caches), {
        "block_table": torch.tensor([[3, 1], [5, 0]], dtype=torch.int32)
    }


def drawn(x: torch.Tensor) -> Arguments:
    state = {"seed": torch.tensor([3]), "offset": torch.tensor([1])}
    return (x,), state | {
        "top_k": torch.tensor([2, 30, 7]),
        "top_p": torch.tensor([0.5, 0.9, 1.0]),
        "filter_order": "top_k_first",
    }


FP8 = torch.float8_e4m3fn
Q, K = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
POSITIONS = torch.tensor([0, 5, 900])
PROBS = torch.softmax(torch.randn(3, 40) * 2, -1)
STATE = torch.randn(3, 2, 4, 16), torch.randn(3, 2, 4)
CASES: dict[str, Callable[[], Arguments]] = {
    "attention": lambda: (
        (torch.randn(2, 3, 4, 16), *torch.randn(2, 2, 5, 2, 16)),
        {"causal": True, "logits_soft_cap": 3.0},
    ),
    "paged_attention": paged,
    "merge_state": lambda: ((STATE[0][:, 0], STATE[1][:, 0], STATE[0][:, 1], STATE[1][:, 1]), {"base": 2.0}),
    "merge_states": lambda: (STATE, {}),
    "append_paged_kv_cache": appended,
    "matmul": lambda: (
        (torch.randn(3, 5, 8), torch.randn(8, 6)),
        {"bias": torch.randn(6), "activation": "silu_and_multiply", "out_dtype": torch.float16},
    ),
    "grouped_matmul": lambda: (
        (torch.randn(5, 8), torch.randn(2, 8, 6), torch.tensor([0, 3, 4], dtype=torch.int32)),
        {"gather": torch.tensor([4, 0, 1, 4], dtype=torch.int32)},
    ),
    "scaled_matmul": lambda: (
        (torch.randn(3, 5, 8).to(FP8), torch.randn(6, 8).to(FP8).T, torch.rand(3, 5, 1), torch.rand(1, 6)),
        {"activation": "silu_and_multiply"},
    ),
    "rms_norm": lambda: ((torch.randn(8, 3).T, torch.randn(8)), {"weight_offset": 1.0}),
    "add_rms_norm": lambda: ((torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), 1e-5), {}),
    "layer_norm": lambda: ((torch.randn(3, 8), torch.randn(8), torch.randn(8)), {}),
    "activate_and_multiply": lambda: ((torch.randn(2, 3, 8), "gelu_tanh"), {}),
    "apply_rope": lambda: ((Q, K, POSITIONS), {"rotary_dim": 8, "interleave": True, "rope_theta": 5e5}),
    "apply_rope_with_cos_sin_cache": lambda: ((Q, K, POSITIONS, torch.randn(64, 16)), {}),
    "softmax": lambda: ((PROBS.half(), torch.tensor([1.0, 0.5, 2.0])), {}),
    "sample_from_probs": lambda: drawn(PROBS),
    "sample_from_logits": lambda: drawn(PROBS.log()),
    "renormalize_probs": lambda: ((PROBS.half(),), {"top_p": torch.tensor([0.5, 0.9, 1.0])}),
    "mask_logits": lambda: ((PROBS, torch.tensor([3, 1, 99])), {}),
}


def copied(arguments: Arguments) -> Arguments:
    positional, named = arguments
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in positional), named


def test_every_operator_is_tested() -> None:
    assert CASES.keys() == torch_ops.OPERATORS.keys()


@pytest.mark.parametrize("name", CASES)
def test_operator(name: str) -> None:
    operator = getattr(torch.ops.evenshare, name).default
    arguments = CASES[name]()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    has_fp8 = any(isinstance(a, torch.Tensor) and a.dtype == FP8 for a in arguments[0])
    torch.library.opcheck(
        operator, *copied(arguments), test_utils=checks[has_fp8:]
    )  # a schema's test multiplies tensors
    ours, theirs = copied(arguments), copied(arguments)
    got, want = operator(*ours[0], **ours[1]), torch_ops.OPERATORS[name][0](*theirs[0], **theirs[1])
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for a, b in zip(ours[0], theirs[0], strict=True):  # what is written in place
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", CASES)
def test_defaults_are_those_of_the_function(name: str) -> None:
    function = torch_ops.OPERATORS[name][0]
    parameters = inspect.signature(function.func if isinstance(function, partial) else function).parameters
    for argument in getattr(torch.ops.evenshare, name).default._schema.arguments:
        assert argument.name in parameters
        if argument.has_default_value():
            assert argument.default_value == parameters[argument.name].default
        assert argument.kwarg_only == (parameters[argument.name].kind == inspect.Parameter.KEYWORD_ONLY)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_layer_compiles_whole(backend: str) -> None:
    e = torch.ops.evenshare
    weight, norm = torch.randn(64, 6 * 16), torch.randn(64)

    def layer(x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = e.add_rms_norm(x, residual, norm)
        q, k, v = e.matmul(h, weight).view(-1, 6, 16).split([2, 2, 2], 1)
        q, k = e.apply_rope(q, k, positions)
        out, _ = e.attention(q[None], k[None], v[None].contiguous(), causal=True)
        tokens, _ = e.sample_from_logits(out[0].flatten(1), seed=positions[:1], offset=positions[1:2])
        return out, tokens

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for rows in (5, 9):
        x, residual, positions = torch.randn(rows, 64), torch.randn(rows, 64), torch.arange(rows)
        ours, theirs = residual.clone(), residual.clone()
        got, want = compiled(x, ours, positions), layer(x, theirs, positions)
        torch.testing.assert_close((got, ours), (want, theirs))

"""Wrong input raises before any work, and says what was got and what is wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evenshare.gemm import matmul

CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a dtype": ({"a": torch.zeros(3, 8, dtype=torch.int8)}, TypeError, "a: got torch.int8, want float32"),
    "a of codes": (
        {"a": torch.zeros(3, 8).to(torch.float8_e4m3fn)},
        TypeError,
        "a: got torch.float8_e4m3fn, want float32, float16 or bfloat16, or scaled_matmul",
    ),
    "b dtype": ({"b": torch.zeros(8, 4).half()}, TypeError, "b: got torch.float16, want that of a, torch.float32"),
    "a scalar": ({"a": torch.zeros(())}, ValueError, r"a: got shape \(\), want \[..., 8\]"),
    "a k": ({"a": torch.zeros(3, 9)}, ValueError, r"a: got shape \(3, 9\), want \[..., 8\], the k of b \(8, 4\)"),
    "b ndim": ({"b": torch.zeros(8)}, ValueError, r"b: got shape \(8,\), want \[k, n\] or \[batch, k, n\]"),
    "a without batch": (
        {"b": torch.zeros(2, 8, 4)},
        ValueError,
        r"a: got shape \(3, 8\), want \[2, m, 8\], the batch of b",
    ),
    "alpha": ({"alpha": "1"}, TypeError, "alpha: got str, want a number"),
    "beta": ({"beta": torch.ones(())}, TypeError, "beta: got Tensor, want a number"),
    "precision": ({"precision": "bf16x3"}, ValueError, "precision: got 'bf16x3', want one of ieee, tf32"),
    "out_dtype": (
        {"out_dtype": torch.int32},
        TypeError,
        "out_dtype: got torch.int32, want float32, float16 or bfloat16",
    ),
    "out not of out_dtype": ({"out_dtype": torch.float16}, TypeError, "out: got torch.float32, want torch.float16"),
    "b device": ({"b": torch.zeros(8, 4, device="meta")}, ValueError, "b: got device meta, want that of a, cpu"),
    "bias dtype": ({"bias": torch.zeros(4, dtype=torch.int32)}, TypeError, "bias: got torch.int32, want a floating"),
    "bias shape": ({"bias": torch.zeros(1, 4)}, ValueError, r"bias: got shape \(1, 4\), want \[4\]"),
    "bias device": ({"bias": torch.zeros(4, device="meta")}, ValueError, "bias: got device meta, want that of a"),
    "activation": ({"activation": "tanh"}, ValueError, "activation: got 'tanh', want one of None, relu"),
    "odd n": (
        {"b": torch.zeros(8, 3), "activation": "silu_and_multiply"},
        ValueError,
        r"activation: got 'silu_and_multiply' for n = 3, want an even n: \[gate \| up\]",
    ),
    "bias of half": (
        {"activation": "gelu_and_multiply", "bias": torch.zeros(2)},
        ValueError,
        r"bias: got shape \(2,\), want \[4\]",
    ),
    "out not halved": (
        {"activation": "gelu_and_multiply"},
        ValueError,
        r"out: got shape \(3, 4\), want \(3, 2\)",
    ),
    "residual type": ({"residual": 1.0}, TypeError, "residual: got float, want a tensor"),
    "residual dtype": ({"residual": torch.zeros(3, 4).int()}, TypeError, "residual: got torch.int32, want a floating"),
    "residual shape": ({"residual": torch.zeros(4)}, ValueError, r"residual: got shape \(4,\), want \(3, 4\)"),
    "residual not halved": (
        {"activation": "silu_and_multiply", "residual": torch.zeros(3, 4)},
        ValueError,
        r"residual: got shape \(3, 4\), want \(3, 2\)",
    ),
    "residual device": (
        {"residual": torch.zeros(3, 4, device="meta")},
        ValueError,
        "residual: got device meta, want that of a, cpu",
    ),
    "out dtype": ({"out": torch.zeros(3, 4).half()}, TypeError, "out: got torch.float16, want that of a"),
    "out shape": ({"out": torch.zeros(4, 4)}, ValueError, r"out: got shape \(4, 4\), want \(3, 4\)"),
    "out device": ({"out": torch.zeros(3, 4, device="meta")}, ValueError, "out: got device meta, want that of a, cpu"),
    "out overlap": ({"out": torch.zeros(1, 4).expand(3, 4)}, ValueError, r"out: got strides \(0, 1\)"),
    "backend": ({"backend": "cuda"}, ValueError, "backend: got 'cuda', want one of cpu, triton"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_error(case: str) -> None:
    change, error, message = CASES[case]
    out = torch.full((3, 4), 7.0)
    arguments: dict[str, Any] = {
        "a": torch.zeros(3, 8),
        "b": torch.zeros(8, 4),
        "out": out,
        "backend": "triton",
    } | change
    a, b = arguments.pop("a"), arguments.pop("b")
    with pytest.raises(error, match=message):
        matmul(a, b, **arguments)
    assert (out == 7.0).all()

"""`torch.ops.evenshare.*`: the public functions as operators that torch.compile and torch.export keep whole.

    import evenshare.compat.torch_ops
    out, lse = torch.ops.evenshare.attention(q, k, v, causal=True)

An operator has its function's name, arguments and defaults, without `out`, without what is no tensor, number or text, and with
tensors alone where a function takes a number or a tensor. Attention always returns (out, lse), and sampling (tokens, valid), of a
seed and an offset that are given. The product with 4- or 8-bit weights is `torch.ops.evenshare.w4a16` (`evenshare.quant.op`), which
`QuantLinear` calls while it is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import evenshare.quant.op  # noqa: F401  registers w4a16
from evenshare import attention, gemm, ops

Fake = Callable[..., Any]
LIBRARY = torch.library.Library("evenshare", "FRAGMENT")
BACKEND = "str? backend=None"
SCORES = (
    "int window_left=-1, float? logits_soft_cap=None, float? sm_scale=None, Tensor? q_scale=None, Tensor? k_scale=None, "
    f"Tensor? v_scale=None, float base={math.e!r}, ScalarType? out_dtype=None, {BACKEND}"
)
FILTERS = (
    "Tensor seed, Tensor offset, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, str filter_order='joint', "
    f"Tensor? indices=None, {BACKEND}"
)
ROPE = "Tensor q, Tensor k, Tensor positions"


def _like(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_both(q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(q), _like(k)


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out_dtype: torch.dtype | None = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = out_dtype or (torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype)
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    *_: Any,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    gather: torch.Tensor | None = None,
    **__: Any,
) -> torch.Tensor:
    n = b.shape[-1] // 2 if activation and activation.endswith("_and_multiply") else b.shape[-1]
    rows = a.shape[:-1] if gather is None else gather.shape
    return a.new_empty(*rows, n, dtype=out_dtype or a.dtype)


def _scaled(
    a: torch.Tensor, b: torch.Tensor, *_: Any, out_dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:
    return _product(a, b, out_dtype=out_dtype or torch.bfloat16, **options)


def _halved(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _merged(o: torch.Tensor, lse: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(o), _like(lse)


def _all_merged(o: torch.Tensor, lse: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(o[:, 0]), _like(lse[:, 0])


def _drawn(
    x: torch.Tensor, *_: Any, indices: torch.Tensor | None = None, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    n, dtype = (x.shape[0], torch.int32) if indices is None else (indices.shape[0], indices.dtype)
    return x.new_empty(n, dtype=dtype), x.new_empty(n, dtype=torch.bool)


def _float_like(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


def _nothing(*_: Any, **__: Any) -> None:
    """A cache is written in place."""


PAIR = "(Tensor, Tensor)"
# What computes it; its arguments and what it returns, as torch writes schemas; shapes and dtypes of that.
OPERATORS: dict[str, tuple[Callable[..., Any], str, str, Fake]] = {
    "attention": (
        partial(attention.attention, return_lse=True),
        f"Tensor q, Tensor k, Tensor v, *, Tensor? qo_indptr=None, Tensor? kv_indptr=None, bool causal=False, {SCORES}",
        PAIR,
        _attended,
    ),
    "paged_attention": (
        partial(attention.paged_attention, return_lse=True),
        "Tensor q, Tensor k_cache, Tensor v_cache, *, Tensor? qo_indptr=None, Tensor? kv_indptr=None, Tensor? kv_indices=None, "
        "Tensor? last_page_len=None, Tensor? block_table=None, Tensor? kv_lens=None, str kv_layout='NHD', bool? causal=None, "
        + SCORES,
        PAIR,
        _attended,
    ),
    "merge_state": (
        attention.merge_state,
        f"Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, float base={math.e!r}, *, {BACKEND}",
        PAIR,
        _merged,
    ),
    "merge_states": (
        attention.merge_states,
        f"Tensor o, Tensor lse, float base={math.e!r}, *, {BACKEND}",
        PAIR,
        _all_merged,
    ),
    "append_paged_kv_cache": (
        ops.append_paged_kv_cache,
        "Tensor k, Tensor v, Tensor batch_indices, Tensor positions, Tensor(a!) k_cache, Tensor(b!) v_cache, *, "
        f"Tensor? kv_indptr=None, Tensor? kv_indices=None, Tensor? block_table=None, str kv_layout='NHD', {BACKEND}",
        "()",
        _nothing,
    ),
    "matmul": (
        gemm.matmul,
        "Tensor a, Tensor b, *, Tensor? bias=None, str? activation=None, Tensor? residual=None, float alpha=1.0, float beta=1.0, "
        f"ScalarType? out_dtype=None, str precision='ieee', {BACKEND}",
        "Tensor",
        _product,
    ),
    "grouped_matmul": (
        gemm.grouped_matmul,
        "Tensor x, Tensor w, Tensor offsets, *, Tensor? bias=None, str? activation=None, Tensor? gather=None, "
        f"Tensor? scatter=None, {BACKEND}",
        "Tensor",
        _product,
    ),
    "scaled_matmul": (
        gemm.scaled_matmul,
        "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, *, Tensor? bias=None, str? activation=None, Tensor? residual=None, "
        f"ScalarType? out_dtype=None, {BACKEND}",
        "Tensor",
        _scaled,
    ),
    "rms_norm": (
        ops.rms_norm,
        f"Tensor x, Tensor weight, float eps=1e-6, *, float weight_offset=0.0, {BACKEND}",
        "Tensor",
        _like,
    ),
    "add_rms_norm": (
        ops.add_rms_norm,
        f"Tensor x, Tensor(a!) residual, Tensor weight, float eps=1e-6, *, float weight_offset=0.0, {BACKEND}",
        "Tensor",
        _like,
    ),
    "layer_norm": (
        ops.layer_norm,
        f"Tensor x, Tensor weight, Tensor bias, float eps=1e-6, *, {BACKEND}",
        "Tensor",
        _like,
    ),
    "activate_and_multiply": (
        ops.activate_and_multiply,
        f"Tensor x, str activation, *, {BACKEND}",
        "Tensor",
        _halved,
    ),
    "apply_rope": (
        ops.apply_rope,
        f"{ROPE}, *, int? rotary_dim=None, bool interleave=False, float rope_scale=1.0, float rope_theta=10000.0, {BACKEND}",
        PAIR,
        _like_both,
    ),
    "apply_rope_with_cos_sin_cache": (
        ops.apply_rope_with_cos_sin_cache,
        f"{ROPE}, Tensor cos_sin_cache, *, bool interleave=False, {BACKEND}",
        PAIR,
        _like_both,
    ),
    "softmax": (ops.softmax, f"Tensor logits, Tensor? temperature=None, *, {BACKEND}", "Tensor", _float_like),
    "sample_from_probs": (
        partial(ops.sample_from_probs, return_valid=True),
        f"Tensor probs, *, {FILTERS}",
        PAIR,
        _drawn,
    ),
    "sample_from_logits": (
        partial(ops.sample_from_logits, return_valid=True),
        f"Tensor logits, Tensor? temperature=None, *, {FILTERS}",
        PAIR,
        _drawn,
    ),
    "renormalize_probs": (
        ops.renormalize_probs,
        f"Tensor probs, *, Tensor? top_k=None, Tensor? top_p=None, {BACKEND}",
        "Tensor",
        _like,
    ),
    "mask_logits": (ops.mask_logits, f"Tensor logits, Tensor top_k, *, {BACKEND}", "Tensor", _like),
}

# `define` and `impl`, not custom_op, whose bookkeeping costs 50 to 150 us a call.
for _name, (_function, _arguments, _returns, _fake) in OPERATORS.items():
    LIBRARY.define(f"{_name}({_arguments}) -> {_returns}")
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _function, _key)
    torch.library.register_fake(f"evenshare::{_name}", _fake, lib=LIBRARY)

"""Specs of the operators around attention: norms, gated activations, rotary embedding, sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from evenshare.device import epilogue
from evenshare.ops.kernels import activation, norm, rope, sampling


def ops_specs(make: Callable[..., Any], pointers: Callable[..., dict[str, str]]) -> Iterator[Any]:
    """make: `Spec`, and pointers: of specs.py, which imports this file."""
    # width, rows of a block, columns of a block, warps: one block of one row, several rows, several blocks
    widths = [(4096, 1, 4096, 4), (128, 16, 128, 4), (8192, 1, 8192, 8), (16384, 1, 8192, 8)]
    counts = ("num_rows", "inner")
    for width, rows, columns, num_warps in widths:
        for has_residual, fp8_max in ((False, 0.0), (True, 0.0), (False, 448.0)):
            constants = {
                "D": width,
                "BLOCK_M": rows,
                "BLOCK_D": columns,
                "HAS_RESIDUAL": has_residual,
                "FP8_MAX": fp8_max,
            }
            out = "fp8e4nv" if fp8_max else "bf16"
            types = (
                pointers("bf16", "x", "residual", "weight")
                | pointers(out, "out")
                | {"eps": "fp32", "weight_offset": "fp32"}
            )
            types |= pointers("fp32" if fp8_max else "bf16", "scale")
            ones = ("stride_x_dim", "stride_residual_dim", "stride_weight", "stride_out_dim")
            form = "add_rms_norm" if has_residual else "rms_norm fp8" if fp8_max else "rms_norm"
            architectures = (90,) if fp8_max else (80, 90)
            yield make(
                f"{form} {width}", norm.rms_norm, constants, types, ones, counts, num_warps,
                architectures=architectures,
            )  # fmt: skip
        constants = {"D": width, "BLOCK_M": rows, "BLOCK_D": columns}
        types = pointers("bf16", "x", "out") | pointers("fp32", "weight", "bias") | {"eps": "fp32"}
        ones = ("stride_x_dim", "stride_weight", "stride_bias", "stride_out_dim")
        yield make(f"layer_norm {width}", norm.layer_norm, constants, types, ones, counts, num_warps)
    for name in ("silu", "gelu", "gelu_tanh"):
        constants = {"ACTIVATION": epilogue.get_activation(name), "BLOCK_M": 2, "BLOCK_D": 1024}
        ones = ("stride_x_dim", "stride_out_dim")
        yield make(
            f"gated_activation {name}", activation.gated_activation, constants, pointers("bf16", "x", "out"), ones, counts,
        )  # fmt: skip
    for interleave in (False, True):
        for has_cache, rotary_dim in ((False, 128), (True, 64)):
            constants = {"HAS_CACHE": has_cache, "HEAD_DIM": 128, "ROTARY_DIM": rotary_dim, "INTERLEAVE": interleave}
            constants |= {
                "COPY_REST": rotary_dim < 128,
                "BLOCK_H": 1024 // rotary_dim * 2,
                "BLOCK_HALF": rotary_dim // 2,
            }
            constants |= {"BLOCK_REST": max(128 - rotary_dim, 1)}
            types = pointers("bf16", "q", "k", "q_out", "k_out") | pointers("i32", "positions")
            types |= pointers("fp32" if has_cache else "i64", "table")
            tensors = ("q", "k", "qo", "ko")
            ones = (*(f"stride_{tensor}_dim" for tensor in tensors), "stride_position", "stride_table_dim")
            counts_of_heads = ("num_q_heads", "num_k_heads", "num_cached")
            form = f"{'table' if has_cache else 'angles'} {'pairs' if interleave else 'halves'}"
            yield make(f"rope {form}", rope.rope, constants, types, ones, counts_of_heads)
    yield from sampling_specs(make, pointers)


def sampling_specs(make: Callable[..., Any], pointers: Callable[..., dict[str, str]]) -> Iterator[Any]:
    strides = ("stride_x_dim", "stride_out_dim")
    numbers = dict.fromkeys(("temperature", "top_p", "min_p"), "fp32")
    none = dict.fromkeys(("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "indices_ptr", "valid_ptr"))
    rows = {
        **pointers("fp32", "top_p", "min_p", "temperature"), **pointers("i32", "top_k", "indices"), **pointers("i1", "valid"),
    }  # fmt: skip
    for dtype, settings in (("fp32", none), ("bf16", rows)):
        constants = {"BLOCK": 4096, "temperature_ptr": None}
        types = pointers(dtype, "x") | pointers("fp32", "out") | {"temperature": "fp32"}
        yield make(f"softmax {dtype}", sampling.softmax, constants, types, strides, num_warps=16)
        for has_k, has_p, logits in (
            (True, False, False),
            (False, True, False),
            (True, True, False),
            (True, False, True),
        ):
            flags = {"HAS_TOP_K": has_k, "HAS_TOP_P": has_p, "LOGITS": logits, "PIVOTS": 8, "BLOCK": 2048}
            form = f"{dtype} {'logits' if logits else 'probs'}{' k' * has_k}{' p' * has_p}"
            given = {name: value for name, value in settings.items() if name in ("top_k_ptr", "top_p_ptr")}
            constants, types = (flags | given, {}) if settings is none else (flags, given)
            types |= pointers(dtype, "x", "out") | {"top_p": "fp32"}
            yield make(f"keep {form}", sampling.keep, constants, types, strides, num_warps=16)
        filters = [(k, p, m, False) for k in (False, True) for p in (False, True) for m in (False, True)]
        for has_k, has_p, has_min, first in (*filters, (True, True, True, True)):
            for logits in (False, True):
                flags = {
                    "HAS_TOP_K": has_k,
                    "HAS_TOP_P": has_p,
                    "HAS_MIN_P": has_min,
                    "TOP_K_FIRST": first,
                    "LOGITS": logits,
                }
                flags |= {"PIVOTS": 8, "BLOCK": 2048 if first else 4096}
                form = f"{'logits' if logits else 'probs'}{' k' * has_k}{' p' * has_p}{' min' * has_min}{' k first' * first}"
                constants, types = (flags | settings, {}) if settings is none else (flags, dict(settings))
                types |= pointers(dtype, "x") | pointers("i32", "out") | pointers("i64", "seed", "offset") | numbers
                yield make(f"sample {dtype} {form}", sampling.sample, constants, types, ("stride_x_dim",), num_warps=16)
        constants = {"BLOCK_DRAFT": 8, "BLOCK": 4096}
        types = pointers(dtype, "draft", "target") | pointers("i64", "seed", "offset")
        types |= pointers("i32", "ids", "out", "accepted", "emitted")
        ones = ("stride_draft_dim", "stride_ids_token", "stride_target_dim")
        yield make(f"verify_chain {dtype}", sampling.verify_chain, constants, types, ones, num_warps=16)

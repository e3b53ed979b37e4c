"""Specs of the operators around attention: norms, gated activations, rotary embedding, sampling."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from evenshare.device import epilogue
from evenshare.ops.kernels import activation, norm, rope, sampling, sampling_speculative

AROUND_SEARCH = 16


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
    """Rows of 128k tokens; float32 with settings for all rows, bfloat16 with settings of their own and indices."""
    cuts = {"PARTS": 16, "PIVOTS": 8, "GROUPS": 1024, "GROUP": 128, "PART": 8192, "BLOCK": 2048}
    numbers = dict.fromkeys(("temperature", "top_p", "min_p"), "fp32")
    surveyed = pointers("fp32", "best", "top", "total") | pointers("i32", "best_at", "peaks", "groups")
    own = {
        **pointers("fp32", "top_p", "min_p", "temperature"), **pointers("i32", "top_k", "indices"), **pointers("i1", "valid"),
    }  # fmt: skip
    for dtype, per_row in (("fp32", False), ("bf16", True)):
        types = pointers(dtype, "x", "draft", "target") | pointers("i64", "seed", "offset") | surveyed | numbers
        types |= pointers("fp32", "mass", "spare")
        types |= pointers("i32", "low", "ids", "accepted", "emitted", "end", "spare_at")
        ones = ("stride_x_dim", "stride_out_dim", "stride_draft_dim", "stride_ids_token", "stride_target_dim")

        def spec(
            name: str,
            kernel: Any,
            out: str | None = None,
            *,
            types: Any = types,
            per_row: Any = per_row,
            ones: Any = ones,
            **flags: Any,
        ) -> Any:
            known = list(inspect.signature(kernel.fn).parameters)
            constants = {key: value for key, value in (cuts | flags).items() if key in known}
            constants |= {key: None for key in own if key in known and not per_row}
            given = types | (own if per_row else {}) | (pointers(out, "out") if out else {})
            given = {key: kind for key, kind in given.items() if key in known and key not in constants}
            ones = tuple(one for one in ones if one in known)
            # ptxas fits two programs of the search into an SM, for a few registers on the stack.
            spills = AROUND_SEARCH if kernel is sampling.find_kept else 0
            name = f"{name} {'bf16' if per_row else 'fp32'}"
            return make(name, kernel, constants, given, ones, num_warps=8, known_spills=spills)

        yield spec("softmax", sampling.softmax, "fp32")
        yield spec("speculative judge", sampling_speculative.judge_drafts, "i32", BLOCK=8)
        yield spec("speculative survey", sampling_speculative.survey_rest)
        if not per_row:
            yield spec("speculative place", sampling_speculative.place_token, "i32")
        for logits in (False, True):
            form = "logits" if logits else "probs"
            yield spec(f"keep {form}", sampling.keep, dtype, LOGITS=logits)
            no_race = dict.fromkeys(("seed_ptr", "offset_ptr", "best_ptr", "best_at_ptr"))
            for race, mass, peaks in (
                (True, False, False),
                (True, False, True),
                (True, True, True),
                (False, True, not logits),
            ):
                flags = {"RACE": race, "MASS": mass, "PEAKS": peaks, "LOGITS": logits}
                flags |= {} if race else no_race
                words = f"{' race' * race}{' mass' * mass}{' peaks' * peaks}"
                yield spec(f"survey {form}{words}", sampling.survey, **flags)
            for has_k, has_p in ((True, False),) if logits else ((True, False), (False, True), (True, True)):
                flags = {"HAS_TOP_K": has_k, "HAS_TOP_P": has_p, "LOGITS": logits}
                yield spec(f"find_kept {form}{' k' * has_k}{' p' * has_p}", sampling.find_kept, **flags)
            filters = ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (1, 1, 0, 0), (1, 1, 1, 1))
            for has_k, has_p, has_min, first in (map(bool, flags) for flags in filters):
                flags = {
                    "HAS_TOP_K": has_k,
                    "HAS_TOP_P": has_p,
                    "HAS_MIN_P": has_min,
                    "TOP_K_FIRST": first,
                    "LOGITS": logits,
                }
                words = f"{' k' * has_k}{' p' * has_p}{' min' * has_min}{' k first' * first}"
                yield spec(f"sample {form}{words}", sampling.sample, "i32", **flags)

"""Specs of latent attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from triton.experimental.gluon.language import NVMMASharedLayout

from evenshare.attention.kernels import hopper_mla, mla


def mla_specs(make: Callable[..., Any], pointers: Callable[..., dict[str, str]]) -> Iterator[Any]:
    """make: `Spec`, and pointers: of specs.py, which imports this file."""
    shared = pointers("fp32", "lse", "partial_o", "partial_lse")
    shared |= pointers("i32", "kv_indices", "worker_indptr", "segments", "tiles", "counters", "status")
    shared |= dict.fromkeys(("sm_scale", "lse_scale"), "fp32")
    # dtype, heads, (block m, n), warps, stages, page size, causal, known spills (outside the loop over keys)
    cases: list[tuple[str, int, tuple[int, int], int, int, int, bool, int]] = [
        ("bf16", 16, (16, 32), 8, 5, 64, False, 10),
        ("bf16", 16, (16, 32), 8, 5, 16, True, 0),
        ("fp16", 5, (16, 32), 8, 5, 1, True, 0),
        ("bf16", 128, (32, 32), 8, 5, 64, False, 0),
        ("bf16", 128, (32, 32), 8, 5, 16, True, 4),
        ("fp32", 16, (16, 16), 8, 2, 64, False, 27),
        ("fp32", 128, (16, 16), 8, 2, 1, True, 0),
    ]
    for dtype, heads, (block_m, block_n), num_warps, stages, page_size, causal, known_spills in cases:
        constants = {
            "GROUP": heads,
            "DIM_CKV": 512,
            "DIM_KPE": 64,
            "PAGE_SIZE": page_size,
            "CAUSAL": causal,
            "HAS_LSE": True,
        }
        constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_MERGE": 128, "NUM_STAGES": stages}
        constants |= {"PRECISION": "ieee"}
        yield make(
            f"mla {dtype} {heads} heads {block_m}x{block_n} page={page_size} causal={causal}",
            mla.mla,
            constants,
            shared | pointers(dtype, "q_nope", "q_pe", "ckv", "kpe", "out"),
            ("stride_lse_head",),
            ("num_q_tokens", "num_pages", "num_indices"),
            num_warps,
            tensor_cores=dtype != "fp32",
            known_spills=known_spills,
        )


def hopper_mla_specs(make: Callable[..., Any], pointers: Callable[..., dict[str, str]]) -> Iterator[Any]:
    """Latent attention in Gluon."""
    shared = pointers("fp32", "lse", "partial_o", "partial_lse")
    shared |= pointers("i32", "kv_indices", "worker_indptr", "segments", "tiles", "counters", "status")
    shared |= dict.fromkeys(("sm_scale", "lse_scale"), "fp32")
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    # dtype, heads, page size, keys of a box, causal, lse, known spills
    cases = [("bf16", 128, 64, 64, True, True, 460), ("fp16", 48, 16, 16, False, False, 460)]
    for dtype, heads, page_size, box, causal, has_lse, known_spills in cases:
        constants = {"GROUP": heads, "PAGE_SIZE": page_size, "CAUSAL": causal, "HAS_LSE": has_lse, "BLOCK_N": 64}
        constants |= {"BOX": box, "STAGES": 2, "num_warps": 4}
        keys = f"tensordesc<{dtype}[1, 1, {box}, 64],{layout!r}>"
        yield make(
            f"hopper mla {dtype} {heads} heads page={page_size} causal={causal}",
            hopper_mla.mla,
            constants,
            shared | pointers(dtype, "q_nope", "q_pe", "out") | {"ckv": keys, "kpe": keys},
            ("stride_lse_head",),
            ("num_q_tokens", "num_pages", "num_indices"),
            tensor_cores=True,
            known_spills=known_spills,
            architectures=(90,),
        )

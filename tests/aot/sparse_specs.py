"""Specs of the block-sparse attention kernel, without a mask function and with the variants that lie beside this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from evenshare.attention.kernels import block_sparse

if __package__:
    from tests.aot.variant_specs import ARGUMENTS, load
else:  # beside the script that compiles them
    from variant_specs import ARGUMENTS, load

NO_FUNCTIONS = dict.fromkeys(("RESCORE", "SINK", "QUERY", "KEY", "VALUE", "OUTPUT"))


def sparse_specs(make: Callable[..., Any], pointers: Callable[..., dict[str, str]]) -> Iterator[Any]:
    """make: `Spec`, and pointers: of specs.py, which imports this file."""
    shared = pointers("fp32", "lse", "partial_o", "partial_lse")
    shared |= pointers("i32", "indices", "worker_indptr", "segments", "tiles", "counters", "status")
    shared |= dict.fromkeys(("sm_scale", "logits_soft_cap", "lse_scale"), "fp32")
    plain = {"GROUP": 4, "KV_SHARE": 1, "BLOCK_SIZE": 128, "EVEN_KEYS": True, "HAS_MASK": False, "HAS_SOFT_CAP": False}
    plain |= {"HAS_LSE": True, "PRECISION": "ieee", "BASE_2": True, "SOFTMAX": True}
    # dtype, head dim, (block m, n), warps, stages, variant, known spills, what differs from `plain`
    cases: list[tuple[str, int, tuple[int, int], int, int, str, int, dict[str, Any]]] = [
        ("bf16", 128, (128, 64), 8, 3, "", 66, {}),
        ("bf16", 128, (128, 64), 8, 3, "capped_alibi", 68, {"HAS_MASK": True}),
        ("bf16", 128, (16, 128), 4, 3, "", 40, {"BLOCK_SIZE": 1, "EVEN_KEYS": False}),
        ("bf16", 256, (64, 32), 8, 2, "", 16, {"GROUP": 1, "KV_SHARE": 4, "HAS_SOFT_CAP": True}),
        ("fp16", 64, (64, 64), 8, 2, "capped_alibi", 0, {"BLOCK_SIZE": 96, "HAS_MASK": True, "EVEN_KEYS": False}),
        ("bf16", 128, (64, 32), 8, 2, "transforms", 190, {}),
        ("fp32", 128, (32, 32), 8, 2, "capped_alibi", 18, {"HAS_MASK": True}),
    ]
    for dtype, dim, blocks, num_warps, stages, variant, known_spills, changed in cases:
        functions = NO_FUNCTIONS | {"MODIFY": None, "variant_args": None}
        types = shared | pointers(dtype, "q", "k", "v", "out")
        if variant:
            module = load(variant)
            functions |= {name: getattr(module, name.lower(), None) for name in NO_FUNCTIONS}
            functions |= {"MODIFY": module.modify, "BASE_2": variant == "transforms"}
            del functions["variant_args"]
            types |= {"variant_args": ARGUMENTS[variant]}
        constants = plain | functions | changed
        constants |= {"HEAD_DIM": dim, "HEAD_DIM_V": dim, "BLOCK_D": dim, "BLOCK_DV": dim}
        constants |= {"BLOCK_M": blocks[0], "BLOCK_N": blocks[1], "NUM_STAGES": stages}
        details = ", ".join([variant] * bool(variant) + [f"{name.lower()}={value}" for name, value in changed.items()])
        yield make(
            f"block_sparse {dtype} D={dim} {blocks[0]}x{blocks[1]} {details}".strip(),
            block_sparse.block_sparse,
            constants,
            types,
            ("stride_lse_head",),
            ("kv_len",),
            num_warps,
            tensor_cores=dtype != "fp32",
            known_spills=known_spills,
        )

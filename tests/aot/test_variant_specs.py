"""The variants that are compiled ahead of time are those that are generated today. To write their sources anew:

python -m tests.aot.test_variant_specs
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # as in the tests

from typing import Any

import pytest
import torch

from evenshare import Variant
from evenshare.attention import variants
from tests.aot.variant_specs import ARGUMENTS, source_of
from tests.attention.variants.test_source import OPERATIONS

POINTERS = {torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32", torch.bfloat16: "*bf16"}


def compiled() -> dict[str, Variant]:
    """Integers and floats from tables, an instruction of the GPU, sinks of 16 bits; every operation at once; all transforms."""
    capped, biased = variants.soft_cap(30.0, approximate=True), variants.alibi(torch.rand(32))

    def capped_alibi(score: Any, *positions: Any) -> Any:
        return biased(capped(score, *positions), *positions)

    def operations(score: Any, *positions: Any) -> Any:
        for operation in OPERATIONS.values():
            score = score + operation(score, *positions)
        return score

    turn = variants.in_turn(variants.rms_norm(torch.rand(128, dtype=torch.bfloat16)), variants.rope(128))
    scales = torch.rand(8, 64)
    ids, sinks = torch.zeros(2, 64, dtype=torch.int32), torch.rand(32, dtype=torch.bfloat16)
    return {
        "capped_alibi": Variant(score_mod=capped_alibi, mask_mod=variants.documents(ids), sinks=sinks),
        "operations": Variant(score_mod=operations),
        "transforms": Variant(
            query=turn,
            key=turn,
            value=lambda x, b, h, kv_idx, d: x * scales[h, kv_idx],
            output=lambda x, b, h, q_idx, d: x / (x.abs().amax() + x.abs().sum() - x.amin()),
        ),
    }


def types_of(variant: Variant) -> tuple[str, ...]:
    arguments = variant.arguments or ()
    return tuple(POINTERS[a.dtype] if isinstance(a, torch.Tensor) else "1" if a == 1 else "i32" for a in arguments)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_sources_are_those_of_today(name: str) -> None:
    variant = compiled()[name]
    assert variant.source() == source_of(name).read_text()
    assert types_of(variant) == ARGUMENTS[name]


if __name__ == "__main__":
    for name, variant in compiled().items():
        source_of(name).write_text(variant.source())
        print(name, types_of(variant))

"""Attention variants in bf16: prefill with scores and masks of the user's own against FlexAttention, compiled; decode with rotation
and dequantisation in the kernel against a cache that needs neither. TFLOP/s count the visible (query, key) pairs alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

from benchmarks import harness
from benchmarks.batches import MAX_ERROR as BATCH_MAX_ERROR
from benchmarks.batches import Batch, Shape, make_batch
from benchmarks.masks import MAX_ERROR, Function, Tensors, make_tensors
from benchmarks.workloads import const
from evenshare import Variant, plan_attention, plan_block_sparse_attention
from evenshare.attention import variants
from evenshare.ops import apply_rope

USUAL_PEERS = ("flex",)
WINDOW, DOCUMENT, PREFIX, CAP = 1024, 1500, 2048, 30.0
Made = tuple[Function | None, Function]  # score_mod, and mask_mod under the causal mask


@dataclass(frozen=True)
class Case:
    """make: of the device, the number of heads and of tokens."""

    name: str
    length: int
    make: Callable[[torch.device, int, int], Made]
    causal: bool = True  # bounds the keys, beside the functions
    heads: tuple[int, int] = (16, 16)
    head_dim: int = 128
    total: int = 16384  # tokens, of requests of this length

    @property
    def title(self) -> str:
        return f"{self.name}, D={self.head_dim}, {self.heads[0]}/{self.heads[1]} heads, S={self.length}"


def everything(*_: Any) -> Any:
    return _[3] >= 0


def alibi(device: torch.device, heads: int, length: int) -> Made:
    return variants.alibi(variants.alibi_slopes(heads, device)), everything


def documents(device: torch.device, heads: int, length: int) -> Made:
    return None, variants.documents(torch.arange(length, device=device) // DOCUMENT)


VARIANTS: dict[str, tuple[Callable[[torch.device, int, int], Made], bool]] = {
    "causal": (lambda *_: (None, everything), True),
    "soft cap": (lambda *_: (variants.soft_cap(CAP, approximate=True), everything), True),
    "ALiBi": (alibi, True),
    "window of 1024": (lambda *_: (None, variants.sliding_window(WINDOW)), True),
    "documents of 1500": (documents, True),
    "prefix of 2048": (
        lambda *_: (None, or_masks(variants.causal, lambda b, h, q_idx, kv_idx: kv_idx < PREFIX)),
        False,
    ),
}
CASES = [
    *(Case(name, length, make, causal) for name, (make, causal) in VARIANTS.items() for length in (4096, 16384)),
    Case("causal, GQA", 8192, *VARIANTS["causal"], heads=(32, 8)),
    Case("ALiBi, D=64", 8192, *VARIANTS["ALiBi"], head_dim=64),
]


def measure_prefill(bench: harness.Bench, case: Case) -> None:
    """The variant on the tiles of its causal bound, and on FlexAttention's own blocks, beside FlexAttention."""
    batch = max(case.total // case.length, 1)
    score_mod, under = case.make(bench.device, case.heads[0], case.length)
    mask_mod = and_masks(variants.causal, under) if case.causal else under
    tensors = make_tensors(batch, case.length, case.heads, case.head_dim, bench.device, mask_mod, score_mod)
    block_mask = tensors.block_mask()
    sparse = plan_block_sparse_attention(
        block_mask, batch=batch, qo_len=case.length, kv_len=case.length, num_qo_heads=case.heads[0], num_kv_heads=case.heads[1],
        head_dim=case.head_dim, variant=Variant(score_mod=score_mod), device=bench.device,
    )  # fmt: skip
    row = bench.compare(
        case.title,
        tiles_call(tensors, None if under is everything else under, case.causal),
        lambda name: tensors.peer(name, block_mask),
        tensors.reference(),
        MAX_ERROR,
        variants={"blocks": sparse_call(tensors, sparse)},
        sample=tensors.sample,
        flops=tensors.flops(),
    )
    sparse.check()
    bench.add_rate(row, "TFLOP/s")
    for ours in ("ours", "blocks"):
        bench.add_speed(row, ours, "flex")


def tiles_call(tensors: Tensors, mask_mod: Function | None, causal: bool) -> harness.Call:
    """A run of a plan whose only bound is the causal one."""
    batch, length, heads, head_dim = tensors.q.shape
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=tensors.q.device) * length
    plan = plan_attention(
        num_qo_heads=heads, num_kv_heads=tensors.k.shape[2], head_dim=head_dim, qo_indptr=indptr, kv_indptr=indptr,
        causal=causal, variant=Variant(score_mod=tensors.score_mod, mask_mod=mask_mod), max_q_rows=batch * length,
        dtype=tensors.q.dtype,
    )  # fmt: skip
    q, k, v = (x.flatten(0, 1) for x in (tensors.q, tensors.k, tensors.v))
    out = torch.full_like(q, float("nan"))
    return lambda: plan.run(q, k, v, out=out)


def sparse_call(tensors: Tensors, plan: Any) -> harness.Call:
    out = torch.full_like(tensors.q, float("nan"))
    return lambda: plan.run(tensors.q, tensors.k, tensors.v, out=out)


@dataclass(frozen=True)
class Decode:
    """Decode over a cache that the kernel transforms. codes: int8, otherwise unrotated keys in bf16."""

    batch: int
    length: int
    codes: bool
    shape: Shape = field(default_factory=lambda: Shape([], [], page_size=16))

    @property
    def title(self) -> str:
        what = "int8 cache, dequantised" if self.codes else "unrotated cache, rotated"
        return f"decode, {what} in the kernel, {self.shape.label}, B={self.batch} L={self.length}"


DECODES = [Decode(batch, length, codes) for codes in (False, True) for batch, length in ((64, 4096), (16, 16384))]


def measure_decode(bench: harness.Bench, case: Decode) -> None:
    """Beside the same keys rotated, or in bf16: what the transform costs, or what half the bytes bring."""
    shape = replace(case.shape, qo_lens=const(1, case.batch), kv_lens=const(case.length, case.batch), page_size=0)
    cached = make_batch(shape, bench.device)
    plain, variant = (quantised if case.codes else rotated)(cached)
    cached, plain = (batch.paged(case.shape.page_size) for batch in (cached, plain))
    if case.codes:
        cached = replace(cached, k=as_codes(cached.k), v=as_codes(cached.v))
    tokens = plain.sampled_tokens()
    plan = cached.plan(variant=variant, kv_dtype=torch.int8 if case.codes else None)
    row = bench.compare(
        case.title,
        cached.run_call(plan),
        lambda name: None,
        plain.reference(),
        BATCH_MAX_ERROR,
        variants={"ready": plain.run_call(plain.plan())},
        sample=lambda output: output[tokens],
        bytes=plain.shape.kv_bytes // (1 + case.codes),
    )
    plan.check()
    bench.add_rate(row, "TB/s")
    bench.add_speed(row, "ours", "ready")


def rotated(cached: Batch) -> tuple[Batch, Variant]:
    """The batch with q and k rotated, and the variant that does so."""
    device, lens = cached.q.device, torch.tensor(cached.shape.kv_lens)
    places = torch.cat([torch.arange(n) for n in lens.tolist()]).to(device)
    q, _ = apply_rope(cached.q, cached.q, (lens - 1).to(device))
    k, _ = apply_rope(cached.k, cached.k, places)
    turn = variants.rope(cached.shape.head_dim, device=device)
    return replace(cached, q=q, k=k), Variant(query=turn, key=turn)


CODES_A_UNIT = 24.0  # of keys and values, which hardly exceed 5


def as_codes(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * CODES_A_UNIT).round().clamp(-128, 127).to(torch.int8)


def quantised(cached: Batch) -> tuple[Batch, Variant]:
    """The batch with the values that codes of k and v stand for, and the variant that makes these of the codes."""
    scales = torch.full((cached.shape.num_kv_heads,), 1 / CODES_A_UNIT, device=cached.q.device)

    def dequantised(x: Any, b: Any, h: Any, kv_idx: Any, d: Any) -> Any:
        return x * scales[h]

    k, v = ((as_codes(x).float() / CODES_A_UNIT).to(x.dtype) for x in (cached.k, cached.v))
    return replace(cached, k=k, v=v), Variant(key=dequantised, value=dequantised)


def fill(bench: harness.Bench) -> None:
    bench.measure_all(CASES, measure_prefill)
    bench.measure_all(DECODES, measure_decode)


if __name__ == "__main__":
    harness.run("variants", __doc__, fill, USUAL_PEERS)

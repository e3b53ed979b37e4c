"""Latent attention (DeepSeek MLA) over pages of [512 latent | 64 rotary] numbers, bf16: decode of 128 heads, which is bound by the
tensor cores, and of 16 heads, a rank's share of them, which is bound by memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from benchmarks import harness, peers
from benchmarks.batches import MAX_ERROR, Batch, Shape, make_batch
from benchmarks.workloads import LONG_TAIL, const, visible_pairs
from evenshare import plan_mla
from evenshare.attention import MLAPlan

USUAL_PEERS = ("flashinfer",)
CKV, KPE = 512, 64
TFLOPS = 600.0  # of 128 heads over a large cache
READ_SHARE = 0.85  # of the read ceiling, of 16 heads over a large cache
COMPUTE_HEADS = 64  # from which on a decode step is bound by the tensor cores


@dataclass(frozen=True)
class Case:
    name: str
    shape: Shape
    has_target: bool = False

    @property
    def title(self) -> str:
        return f"{self.shape.num_qo_heads} heads, page {self.shape.page_size}, {self.name}"

    @property
    def flops(self) -> int:
        shape = self.shape
        pairs = sum(visible_pairs(*lens, shape.causal) for lens in zip(shape.qo_lens, shape.kv_lens, strict=True))
        return 2 * (shape.head_dim + CKV) * shape.num_qo_heads * pairs

    @property
    def bytes(self) -> int:
        """The cache, once."""
        return sum(self.shape.kv_lens) * self.shape.head_dim * 2


def case(
    name: str, lengths: list[int], heads: int, page_size: int = 64, rows: int = 1, has_target: bool = False
) -> Case:
    """lengths: keys of each request; rows: query tokens of each."""
    return Case(name, Shape(const(rows, len(lengths)), lengths, heads, 1, CKV + KPE, page_size), has_target)


CASES = [
    *(case("B=64 L=8192", const(8192, 64), heads, has_target=True) for heads in (128, 16)),
    *(case("B=64 L=8192", const(8192, 64), heads, page_size) for heads in (128, 16) for page_size in (1, 16)),
    case("B=64 L=8192", const(8192, 64), 64),
    *(case("B=64 L=8192, 2 rows", const(8192, 64), heads, rows=2) for heads in (128, 16)),
    *(case("B=1 L=131072", [131072], heads) for heads in (128, 16)),
    *(case("B=16 L=1024", const(1024, 16), heads) for heads in (128, 16)),
    *(case("B=256 L=2048", const(2048, 256), heads) for heads in (128, 16)),
    *(case("B=16 64k + 15x256", LONG_TAIL["64k + 15x256"], heads) for heads in (128, 16)),
]


def make_latents(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Batch:
    """Keys are whole rows of the cache, values their latents: views of one tensor, as engines keep it."""
    batch = make_batch(shape, device, dtype)
    return replace(batch, v=batch.k[..., :CKV])


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(latent, rotary) views of [..., 576]."""
    return x[..., :CKV], x[..., CKV:]


def make_plan(batch: Batch) -> MLAPlan:
    """The batch's plan, from metadata on the GPU."""
    shape, device = batch.shape, batch.q.device
    assert batch.kv_indices is not None
    assert batch.last_page_len is not None
    return plan_mla(
        num_heads=shape.num_qo_heads,
        page_size=shape.page_size,
        sm_scale=shape.head_dim**-0.5,
        qo_indptr=batch.qo_indptr.to(device) if max(shape.qo_lens) > 1 else None,
        kv_indptr=batch.kv_indptr.to(device),
        kv_indices=batch.kv_indices.to(device),
        last_page_len=batch.last_page_len.to(device),
        causal=shape.causal,
        dtype=batch.q.dtype,
        max_q_rows=batch.q.shape[0],
    )


def run_call(batch: Batch, plan: MLAPlan) -> harness.Call:
    """A run of the plan into an output that begins as NaN, so that what is left unwritten shows."""
    # Engines have q in two tensors.
    q_nope, q_pe = (x.contiguous() for x in split(batch.q))
    ckv, kpe = split(batch.k.squeeze(2))
    out = torch.full_like(q_nope, float("nan"))
    return lambda: plan.run(q_nope, q_pe, ckv, kpe, out=out)


def peer(name: str, batch: Batch) -> harness.Call | None:
    q_nope, q_pe = (x.contiguous() for x in split(batch.q))
    ckv, kpe = split(batch.k.squeeze(2))
    lengths = torch.tensor(batch.shape.kv_lens, dtype=torch.int32)
    assert batch.kv_indices is not None
    return peers.paged_mla(
        name, q_nope, q_pe, ckv, kpe, batch.qo_indptr, batch.kv_indptr, batch.kv_indices, lengths, batch.shape.head_dim**-0.5
    )  # fmt: skip


def measure(bench: harness.Bench, case: Case) -> None:
    """The case's time, and its rate beside what bounds it."""
    batch = make_latents(case.shape, bench.device)
    plan = make_plan(batch)
    tokens = batch.sampled_tokens()
    row = bench.compare(
        case.title,
        run_call(batch, plan),
        lambda name: peer(name, batch),
        batch.reference(),
        MAX_ERROR,
        sample=lambda output: output[tokens],
        flops=case.flops,
        bytes=case.bytes,
    )
    plan.check()
    if case.shape.num_qo_heads >= COMPUTE_HEADS:
        bench.add_rate(row, "TFLOP/s", target=TFLOPS if case.has_target else None)
        bench.add_ratio(row, "matmul_bf16_tflop_s")
    else:
        bench.add_rate(row, "TB/s")
        bench.add_ratio(row, "read_tb_s", target=READ_SHARE if case.has_target else None)


def fill(bench: harness.Bench) -> None:
    bench.measure_all(CASES, measure)


if __name__ == "__main__":
    harness.run("mla", __doc__, fill, USUAL_PEERS)

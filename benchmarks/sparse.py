"""Sparse attention in bf16: block masks and random blocks against FlexAttention, compiled; decode over selected pages against
decode over all. TFLOP/s count the visible (query, key) pairs alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, or_masks

from benchmarks import harness
from benchmarks.batches import Batch, Shape, make_batch
from benchmarks.masks import MAX_ERROR, Function, Tensors, make_tensors
from benchmarks.workloads import const
from evenshare import BlockSparsity, plan_attention, plan_block_sparse_attention
from evenshare.attention import variants
from evenshare.attention.sparse import page_bounds, pages_by_head, select_pages

USUAL_PEERS = ("flex",)
SINKS = 128


@dataclass(frozen=True)
class Masked:
    """A mask function, of the device and the number of tokens."""

    name: str
    length: int
    make: Callable[[torch.device, int], Function]
    heads: tuple[int, int] = (16, 16)
    head_dim: int = 128

    @property
    def title(self) -> str:
        return f"{self.name}, D={self.head_dim}, {self.heads[0]}/{self.heads[1]} heads, S={self.length}"


def window_and_sinks(device: torch.device, length: int) -> Function:
    return and_masks(
        variants.causal, or_masks(variants.sliding_window(1024), lambda b, h, q_idx, kv_idx: kv_idx < SINKS)
    )


def packed_documents(device: torch.device, length: int) -> Function:
    """Of uneven lengths, 1/2 to 1/3 to 1/4 ... of the tokens, one causal document after the other."""
    shares = torch.arange(2, 34, dtype=torch.float64).reciprocal()
    ends = (shares.cumsum(0) / shares.sum() * length).round()
    ids = torch.searchsorted(ends, torch.arange(length, dtype=torch.float64), right=True)
    return and_masks(variants.causal, variants.documents(ids.to(device)))


MASKED = [
    *(Masked("window of 1024 and sinks", length, window_and_sinks) for length in (16384, 65536)),
    *(Masked("packed documents", length, packed_documents) for length in (16384, 65536)),
    Masked("window of 1024 and sinks", 32768, window_and_sinks, heads=(32, 8)),
]


@dataclass(frozen=True)
class Random:
    """Random blocks of `block` rows and keys, as many in each row block: its own, and others."""

    length: int
    block: int
    share: float
    heads: tuple[int, int] = (16, 16)
    head_dim: int = 128

    @property
    def title(self) -> str:
        size = f"D={self.head_dim}, {self.heads[0]}/{self.heads[1]} heads, S={self.length}"
        return f"{self.share:.0%} of the blocks of {self.block}, {size}"

    def lists(self, device: torch.device) -> torch.Tensor:
        """int32 [row blocks, blocks of each], in order."""
        blocks = self.length // self.block
        count = max(round(blocks * self.share), 1)
        rank = torch.rand(blocks, blocks, device=device).fill_diagonal_(2.0)
        return rank.topk(count).indices.sort().values.to(torch.int32)


RANDOM = [Random(length, block, share) for length, block in ((16384, 128), (16384, 64)) for share in (0.05, 0.25)]


@dataclass(frozen=True)
class Selected:
    """Decode over `selected` pages of each request and KV head."""

    batch: int
    length: int
    selected: int
    page_size: int = 16

    @property
    def shape(self) -> Shape:
        return Shape(const(1, self.batch), const(self.length, self.batch), page_size=self.page_size)

    @property
    def title(self) -> str:
        return f"decode, {self.selected} pages of each head, {self.shape.label}, B={self.batch} L={self.length}"


SELECTED = [Selected(16, 32768, 128), Selected(64, 8192, 64), Selected(1, 131072, 256)]


def sparse_call(tensors: Tensors, blocks: BlockMask | BlockSparsity) -> tuple[harness.Call, Any]:
    """A run of a plan, and the plan."""
    batch, length, heads, head_dim = tensors.q.shape
    plan = plan_block_sparse_attention(
        blocks, batch=batch, qo_len=length, kv_len=length, num_qo_heads=heads, num_kv_heads=tensors.k.shape[2], head_dim=head_dim,
        dtype=tensors.q.dtype, device=tensors.q.device,
    )  # fmt: skip
    out = torch.full_like(tensors.q, float("nan"))
    return lambda: plan.run(tensors.q, tensors.k, tensors.v, out=out), plan


def compare(bench: harness.Bench, title: str, tensors: Tensors, blocks: Any, block_mask: BlockMask) -> None:
    ours, plan = sparse_call(tensors, blocks)
    row = bench.compare(
        title,
        ours,
        lambda name: tensors.peer(name, block_mask),
        tensors.reference(),
        MAX_ERROR,
        sample=tensors.sample,
        flops=tensors.flops(),
    )
    plan.check()
    bench.add_rate(row, "TFLOP/s")
    bench.add_speed(row, "ours", "flex")
    bench.add_time(f"{title}: planning", lambda: plan.update(blocks))


def measure_masked(bench: harness.Bench, case: Masked) -> None:
    mask_mod = case.make(bench.device, case.length)
    tensors = make_tensors(1, case.length, case.heads, case.head_dim, bench.device, mask_mod)
    block_mask = tensors.block_mask()
    compare(bench, case.title, tensors, block_mask, block_mask)


def measure_random(bench: harness.Bench, case: Random) -> None:
    """Whole blocks: lists of ours, a BlockMask of theirs."""
    lists = case.lists(bench.device)
    blocks, count = lists.shape
    seen = torch.zeros(blocks, blocks, dtype=torch.bool, device=bench.device).scatter_(1, lists.long(), True)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return seen[q_idx // case.block, kv_idx // case.block]

    tensors = make_tensors(1, case.length, case.heads, case.head_dim, bench.device, mask_mod)
    indptr = torch.arange(blocks + 1, dtype=torch.int32, device=bench.device) * count
    padded = torch.nn.functional.pad(lists, (0, blocks - count))[None, None]
    counts = torch.full((1, 1, blocks), count, dtype=torch.int32, device=bench.device)
    block_mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(padded), counts, padded, BLOCK_SIZE=case.block, mask_mod=mask_mod
    )
    compare(bench, case.title, tensors, BlockSparsity.from_bsr(indptr, lists.flatten(), case.block), block_mask)


def measure_selected(bench: harness.Bench, case: Selected) -> None:
    """Beside all pages, and what the selection costs."""
    batch = make_batch(case.shape, bench.device)
    assert batch.kv_indices is not None
    table = batch.kv_indices.view(case.batch, -1).to(bench.device)
    lens = torch.tensor(case.shape.kv_lens, dtype=torch.int32, device=bench.device)
    bounds = page_bounds(batch.k)

    def select() -> tuple[torch.Tensor, torch.Tensor]:
        return select_pages(batch.q, bounds, table, lens, case.page_size, case.selected)

    pages, own_lens = select()
    all_pages = batch.plan()
    everything = batch.run_call(all_pages)
    row = bench.compare(
        case.title,
        by_head_call(batch, pages, own_lens),
        lambda name: None,
        selected_reference(batch, pages, own_lens),
        MAX_ERROR,
        sample=lambda output: output[batch.sampled_tokens()],
        bytes=case.shape.kv_bytes * case.selected * case.page_size // case.length,
    )
    bench.add_rate(row, "TB/s")
    bench.add_time(f"{case.title}: selection", select)
    bench.add_time(f"{case.title}: all pages", everything)


def by_head_call(batch: Batch, pages: torch.Tensor, lens: torch.Tensor) -> harness.Call:
    """A run of a plan whose requests are the KV heads."""
    shape = batch.shape
    (k, ids), (v, _) = (pages_by_head(cache, pages) for cache in (batch.k, batch.v))
    plan = plan_attention(
        num_qo_heads=shape.num_qo_heads // shape.num_kv_heads, num_kv_heads=1, head_dim=shape.head_dim, page_size=shape.page_size,
        block_table=ids.flatten(0, 1), kv_lens=lens.flatten(), dtype=batch.q.dtype,
    )  # fmt: skip
    q = batch.q.unflatten(1, (shape.num_kv_heads, -1)).flatten(0, 1)
    out = torch.full_like(q, float("nan"))
    return lambda: plan.run(q, k, v, out=out).view_as(batch.q)


def selected_reference(batch: Batch, pages: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """float64 [sampled tokens, Hq, D]."""
    shape = batch.shape
    rows = []
    for token in batch.sampled_tokens().tolist():
        q = batch.q[token].double().unflatten(0, (shape.num_kv_heads, -1))
        heads = []
        for h in range(shape.num_kv_heads):
            length = int(lens[token, h])
            k, v = (x[pages[token, h].long(), :, h].flatten(0, 1)[:length].double() for x in (batch.k, batch.v))
            heads.append((q[h] @ k.T * shape.head_dim**-0.5).softmax(-1) @ v)
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def fill(bench: harness.Bench) -> None:
    bench.measure_all(MASKED, measure_masked)
    bench.measure_all(RANDOM, measure_random)
    bench.measure_all(SELECTED, measure_selected)


if __name__ == "__main__":
    harness.run("sparse", __doc__, fill, USUAL_PEERS)

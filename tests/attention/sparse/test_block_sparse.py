"""Block-sparse attention in every backend against FlexAttention, and against a dense mask in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import evenshare
from evenshare import BlockSparsity, Variant
from evenshare.attention import variants
from evenshare.attention.kernels.forward import BAD_INDEX as BIT
from tests.attention.helpers import Place, exact_random

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tensors(qo_len: int, kv_len: int, dim: int = DIM) -> Tensors:
    return (
        exact_random(BATCH, qo_len, HEADS, dim),
        exact_random(BATCH, kv_len, KV_HEADS, dim),
        exact_random(BATCH, kv_len, KV_HEADS, dim),
    )


def near_or_first(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx <= q_idx) & ((q_idx - kv_idx < 25) | (kv_idx < 5))


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx // 7 + h + b) % 3 == 0


MASKS: dict[str, tuple[Callable[..., Any], int | None, int | None]] = {
    "one for all": (near_or_first, None, None),
    "of each entry and head": (by_head, BATCH, HEADS),
    "of each head": (lambda b, h, q_idx, kv_idx: by_head(0, h, q_idx, kv_idx), None, HEADS),
    "of each entry": (lambda b, h, q_idx, kv_idx: kv_idx < 9 + 30 * b, BATCH, None),
    "nothing": (lambda b, h, q_idx, kv_idx: kv_idx < 0, None, None),
    "everything": (lambda b, h, q_idx, kv_idx: kv_idx >= 0, None, None),
}


def block_mask(name: str, qo_len: int, kv_len: int, block: tuple[int, int], device: torch.device) -> BlockMask:
    mask_mod, batch, heads = MASKS[name]
    return create_block_mask(mask_mod, batch, heads, qo_len, kv_len, device=str(device), BLOCK_SIZE=block)


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64; seen: bool, broadcast to [B, Hq, Sq, Skv]."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[3])
    scores = scores.masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).nan_to_num()
    return torch.einsum("bhij,bjhd->bihd", weights, v), scores.logsumexp(-1).transpose(1, 2)


def dense(sparsity: BlockSparsity, qo_len: int, kv_len: int) -> torch.Tensor:
    """bool [B, H, Sq, Skv] of lists without a mask, by a plain loop, the heads of a list repeated for the query heads."""
    batch, heads, blocks = sparsity.num_blocks.shape
    rows, keys = sparsity.block_size
    seen = torch.zeros(batch, heads, qo_len, kv_len, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for i in range(blocks):
                begin, count = int(sparsity.begin[b, h, i]), int(sparsity.num_blocks[b, h, i])
                for j in sparsity.indices[begin : begin + count].tolist():
                    seen[b, h, i * rows : (i + 1) * rows, j * keys : (j + 1) * keys] = True
    return seen if heads == 1 else seen.repeat_interleave(HEADS // heads, 1)


def assert_close(got: Any, want: Any, atol: float = 2e-5) -> None:
    out, lse = (x.cpu().double() for x in got)
    torch.testing.assert_close(out, want[0], atol=atol, rtol=0)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want[1]))
    torch.testing.assert_close(lse, want[1], atol=max(atol, 2e-5), rtol=2e-6)
    assert (out[torch.isneginf(lse)] == 0).all()


def run(qkv: Tensors, blocks: Any, place: Place, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    q, k, v = (x.to(place.device, dtype) for x in qkv)
    out = torch.full(q.shape, math.nan, dtype=dtype, device=place.device)
    lse = torch.full(q.shape[:-1], math.nan, device=place.device)
    outputs = {"out": out, "lse": lse}
    return evenshare.block_sparse_attention(q, k, v, blocks, backend=place.backend, **outputs, **options)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("lengths", "block"), [((70, 90), (32, 16)), ((40, 40), (16, 24)), ((33, 64), (128, 128))])
def test_block_masks(place: Place, name: str, lengths: tuple[int, int], block: tuple[int, int]) -> None:
    """Lengths that are no multiples of the blocks; key blocks smaller and larger than an iteration, and no multiples of it."""
    qkv = tensors(*lengths)
    got = run(qkv, block_mask(name, *lengths, block, place.device), place)
    mask_mod = MASKS[name][0]
    axes = [torch.arange(n).view([-1 if i == j else 1 for j in range(4)])
            for i, n in enumerate((BATCH, HEADS, *lengths))]  # fmt: skip
    assert_close(got, formula(*qkv, mask_mod(*axes).expand(BATCH, HEADS, *lengths)))
    judged = block_mask(name, *lengths, block, torch.device("cpu"))
    flex = flex_attention(*(x.transpose(1, 2).double() for x in qkv), block_mask=judged, enable_gqa=True)
    torch.testing.assert_close(got[0].cpu().double(), flex.transpose(1, 2), atol=2e-5, rtol=0)


@pytest.mark.parametrize("heads", [(), (1,), (KV_HEADS,), (HEADS,), (BATCH, 1), (BATCH, HEADS)])
@pytest.mark.parametrize("block", [(16, 16), (24, 1), (8, 20)])
def test_lists_in_bsr_form(place: Place, heads: tuple[int, ...], block: tuple[int, int]) -> None:
    """Of each head, KV head or batch entry; one row block without keys; the last key block is cut off by the keys' end."""
    qo_len, kv_len = 40, 50
    generator = torch.Generator().manual_seed(sum(block))
    rows, columns = -(-qo_len // block[0]), -(-kv_len // block[1])
    listed = torch.rand(*heads, rows, columns, generator=generator) < 0.4
    listed[..., 0, :] = False
    listed[..., -1, -1] = True
    counts = listed.sum(-1)
    indptr = torch.nn.functional.pad(counts.cumsum(-1), (1, 0))
    indices = torch.zeros(*heads, int(indptr.max()), dtype=torch.int64)
    for lead in torch.cartesian_prod(*map(torch.arange, heads)).view(-1, len(heads)).tolist() if heads else [[]]:
        found = listed[tuple(lead)].nonzero()[:, 1]
        indices[(*lead, slice(len(found)))] = found
    host = BlockSparsity.from_bsr(indptr, indices, block)
    blocks = BlockSparsity.from_bsr(indptr.to(place.device), indices.to(place.device), block)
    qkv = tensors(qo_len, kv_len)
    want = formula(*qkv, dense(host, qo_len, kv_len))
    assert torch.isneginf(want[1]).any()
    assert_close(run(qkv, blocks, place), want)
    assert_close(run(qkv, host, place), want)


def test_lists_with_a_mask(place: Place) -> None:
    indptr, indices = torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1])
    blocks = BlockSparsity.from_bsr(indptr.to(place.device), indices.to(place.device), 16, near_or_first)
    qkv = tensors(32, 32)
    seen = near_or_first(0, 0, torch.arange(32)[:, None], torch.arange(32))
    assert_close(run(qkv, blocks, place), formula(*qkv, seen))


@pytest.mark.parametrize("name", ["one for all", "of each head"])
@pytest.mark.parametrize("softmax", [True, False])
def test_variants(place: Place, name: str, softmax: bool) -> None:
    """Scores, sinks and transforms, with positions that count from 0; of full blocks too, which the mask does not touch."""
    qo_len, kv_len, block = 40, 70, (16, 32)
    slopes = torch.linspace(-0.3, 0.3, HEADS)
    turn = {str(d): variants.rope(DIM, device=d) for d in {torch.device("cpu"), place.device}}

    def make(device: torch.device) -> Variant:
        rates, rotate = slopes.to(device), turn[str(device)]
        return Variant(
            score_mod=lambda score, b, h, q_idx, kv_idx: score + rates[h] * (kv_idx - q_idx) * 0.1 + b,
            query=rotate, key=rotate, value=lambda x, b, h, kv_idx, d: x + h + kv_idx * 0.1,
            output=lambda x, b, h, q_idx, d: x * 0.5 + q_idx, softmax=softmax, sinks=rates if softmax else None,
        )  # fmt: skip

    qkv = tensors(qo_len, kv_len)
    mask = block_mask(name, qo_len, kv_len, block, place.device)
    q, k, v = (x.to(place.device) for x in qkv)
    got = evenshare.block_sparse_attention(q, k, v, mask, variant=make(place.device), backend=place.backend)
    # The same positions without lists: as many queries as keys, the first ones of no interest.
    longer = torch.cat([qkv[0], qkv[0].new_zeros(BATCH, kv_len - qo_len, HEADS, DIM)], 1)
    plain = make(torch.device("cpu"))
    masked = Variant(
        score_mod=plain.score_mod, mask_mod=MASKS[name][0], softmax=softmax, sinks=plain.sinks, **plain.transforms
    )
    want = evenshare.attention(longer, *qkv[1:], variant=masked, backend="cpu")[:, :qo_len]
    torch.testing.assert_close(got.cpu(), want, atol=3e-5, rtol=1e-5)


def test_full_blocks_do_without_the_mask(place: Place) -> None:
    """Of a mask made by hand, whose full blocks the function would hide."""
    device = place.device
    counts = torch.tensor([[[1, 1]]], dtype=torch.int32, device=device)
    full = torch.tensor([[[[1, 0], [0, 0]]]], dtype=torch.int32, device=device)
    partial = torch.tensor([[[[0, 0], [1, 0]]]], dtype=torch.int32, device=device)
    mask = BlockMask.from_kv_blocks(
        counts, partial, counts.clone(), full, BLOCK_SIZE=16, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0
    )
    even, whole = torch.arange(16) % 2 == 0, torch.ones(16, dtype=torch.bool)
    seen = torch.stack([torch.cat([even, whole]), torch.cat([whole, even])]).repeat_interleave(16, 0)
    qkv = tensors(32, 32)
    assert_close(run(qkv, mask, place), formula(*qkv, seen))


def test_types_strides_and_options(place: Place) -> None:
    qo_len, kv_len = 40, 48
    q, k, v = tensors(qo_len, kv_len, 40)
    mask = block_mask("one for all", qo_len, kv_len, (16, 16), place.device)
    seen = near_or_first(0, 0, torch.arange(qo_len)[:, None], torch.arange(kv_len))
    want = formula(q * 0.5, k, v[..., :24], seen)
    for dtype in place.dtypes:
        heads_first = (x.to(place.device, dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        qq, kk, vv = heads_first
        out, lse = evenshare.block_sparse_attention(
            qq, kk, vv[..., :24], mask, sm_scale=0.5 / math.sqrt(40), base=2.0, return_lse=True, backend=place.backend
        )
        assert out.dtype == dtype
        assert_close((out, lse * math.log(2)), want, 2e-5 if dtype == torch.float32 else 2e-2)
    capped = evenshare.block_sparse_attention(
        *(x.to(place.device) for x in (q, k, v)), mask, logits_soft_cap=1.5, backend=place.backend
    )
    variant = Variant(mask_mod=near_or_first)
    padded = torch.cat([q, q.new_zeros(BATCH, kv_len - qo_len, HEADS, 40)], 1)
    same = evenshare.attention(padded, k, v, logits_soft_cap=1.5, variant=variant, backend="cpu")[:, :qo_len]
    torch.testing.assert_close(capped.cpu(), same, atol=2e-5, rtol=0)


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_plan_and_its_update(kernel_place: Place, where: str) -> None:
    """The same arrays for other lists; only listed blocks cost iterations; results repeat bit for bit."""
    place, qo_len, kv_len = kernel_place, 64, 64
    device = place.device if where == "device" else torch.device("cpu")
    indptr = torch.tensor([0, 1, 3, 3, 7], device=device)
    lists = [torch.tensor(x, device=device) for x in ([0, 0, 1, 0, 1, 2, 3], [3, 2, 0, 3, 0, 2, 1])]
    first, second = (BlockSparsity.from_bsr(indptr, indices, 16) for indices in lists)
    options: dict[str, Any] = {
        "batch": BATCH, "qo_len": qo_len, "kv_len": kv_len, "num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM,
        "dtype": torch.float32, "device": place.device, "backend": place.backend,
    }  # fmt: skip
    plan = evenshare.plan_block_sparse_attention(first, **options)
    qkv = tensors(qo_len, kv_len)
    q, k, v = (x.to(place.device) for x in qkv)
    tile = plan._tile
    row_tiles = -(-16 * HEADS // KV_HEADS // tile.block_m)
    iterations = sum(max(-(-count * 16 // tile.block_n), 1) for count in (1, 2, 0, 4))
    assert plan.num_iterations == BATCH * KV_HEADS * row_tiles * iterations
    for blocks in (first, second, first):
        plan.update(blocks)
        got = plan.run(q, k, v, return_lse=True)
        host = BlockSparsity.from_bsr(indptr.cpu(), blocks.indices.cpu(), 16)
        assert_close(got, formula(*qkv, dense(host, qo_len, kv_len)))
        assert torch.equal(plan.run(q, k, v), got[0])
    plan.check()


def test_lists_on_the_device_are_not_trusted(kernel_place: Place) -> None:
    """Rows whose blocks lie outside the keys are zero and set a bit; lists past the end of the indices are cut."""
    place = kernel_place
    indices = torch.tensor([0, 5, -1, 1])
    blocks = BlockSparsity.from_bsr(torch.tensor([0, 3, 900]), indices, 16)
    if place.device.type == "cpu":
        object.__setattr__(blocks, "check", lambda *_: None)  # as on a device
    else:
        blocks = BlockSparsity.from_bsr(torch.tensor([0, 3, 900], device="cuda"), indices.cuda(), 16)
    plan = evenshare.plan_block_sparse_attention(
        blocks, batch=BATCH, qo_len=32, kv_len=32, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32,
        device=place.device, backend=place.backend,
    )  # fmt: skip
    qkv = tensors(32, 32)
    seen = torch.tensor([[False, False], [False, True]]).repeat_interleave(16, 0).repeat_interleave(16, 1)
    got = plan.run(*(x.to(place.device) for x in qkv), return_lse=True)
    assert_close(got, formula(*qkv, seen))
    assert int(plan.status) == BIT.value
    with pytest.raises(RuntimeError, match="a key block outside the keys"):
        plan.check()


@pytest.mark.parametrize("sizes", [(0, 32, 32), (2, 0, 32), (2, 32, 0)])
def test_empty_inputs(place: Place, sizes: tuple[int, int, int]) -> None:
    batch, qo_len, kv_len = sizes
    blocks = BlockSparsity.from_bsr(torch.zeros(3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 16)
    q = torch.ones(batch, qo_len, HEADS, DIM, device=place.device)
    k = torch.ones(batch, kv_len, KV_HEADS, DIM, device=place.device)
    out, lse = evenshare.block_sparse_attention(q, k, k, blocks, return_lse=True, backend=place.backend)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


def test_what_is_refused(place: Place) -> None:
    q, k, v = (x.to(place.device) for x in tensors(32, 32))
    good = torch.tensor([0, 1, 2]), torch.tensor([0, 1])

    def attend(blocks: Any, **options: Any) -> None:
        evenshare.block_sparse_attention(q, k, v, blocks, backend=place.backend, **options)

    bsr = BlockSparsity.from_bsr
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: attend(good), TypeError, "blocks: got tuple, want a BlockMask"),
        (lambda: attend(bsr(*good, 8)), ValueError, "got 2 row blocks of 8, want enough for 32 query tokens"),
        (lambda: attend(bsr(good[0], good[1] + 1, 16)), ValueError, "got key block 2, want 0 to 1"),
        (lambda: attend(bsr(torch.tensor([0, 2, 1]), good[1], 16)), ValueError, "got a list of -1 blocks"),
        (lambda: attend(bsr(torch.tensor([0, 2, 3]), good[1], 16)), ValueError, "past the end of the 2 indices"),
        (lambda: attend(bsr(good[0].expand(3, 3), good[1].expand(3, 2), 16)), ValueError, "got lists of 3 heads, want 1, 2 KV"),
        (lambda: attend(bsr(good[0].expand(3, 1, 3), good[1].expand(3, 1, 2), 16)), ValueError, "got lists of 3 batch entries"),
        (lambda: bsr(*good, 0), ValueError, r"block_size\[0\]: got 0"),
        (lambda: bsr(good[0].float(), good[1], 16), TypeError, "indptr: got dtype torch.float32"),
        (lambda: bsr(good[0], good[1].view(1, 2), 16), ValueError, r"indices: got shape \(1, 2\)"),
        (lambda: attend(bsr(*good, 16), variant=Variant(mask_mod=near_or_first)), ValueError, "variant: got a mask_mod"),
        (lambda: attend(bsr(*good, 16), variant=3), TypeError, "variant: got int"),
        (lambda: attend(bsr(*good, 16), return_lse=True, variant=Variant(softmax=False)), ValueError, "want neither"),
        (lambda: evenshare.block_sparse_attention(q[0], k, v, bsr(*good, 16)), ValueError, "q: got shape"),
        (lambda: evenshare.block_sparse_attention(q, k.half(), v, bsr(*good, 16)), TypeError, "k: got dtype torch.float16"),
    ]  # fmt: skip
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    plan = evenshare.plan_block_sparse_attention(
        bsr(*good, 16), batch=2, qo_len=32, kv_len=32, num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32,
        device=place.device, backend=place.backend,
    )  # fmt: skip
    for other, message in ((bsr(*good, 16, near_or_first), "another block size or mask_mod"),
                           (bsr(good[0], torch.tensor([0, 1, 1]), 16), "got indices of shape")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            plan.update(other)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    lengths=st.tuples(st.integers(1, 50), st.integers(1, 70)), block=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    share=st.floats(0, 1), heads=st.sampled_from([1, KV_HEADS, HEADS]), batch=st.sampled_from([1, BATCH]),
    masked=st.booleans(), seed=st.integers(0, 999),
)  # fmt: skip
def test_random_lists(
    backend: str, lengths: tuple[int, int], block: tuple[int, int], share: float, heads: int, batch: int, masked: bool, seed: int
) -> None:  # fmt: skip
    """Of any lengths, blocks and shares, in any order within a list."""
    if torch.cuda.is_available() and backend == "triton":
        pytest.skip("the interpreter is chosen at import, and this machine has a GPU")
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (-(-n // size) for n, size in zip(lengths, block, strict=True))
    listed = torch.rand(batch, heads, rows, columns, generator=generator) < share
    order = torch.rand(listed.shape, generator=generator).masked_fill(~listed, 2.0).argsort(-1)
    indptr = torch.nn.functional.pad(listed.sum(-1).cumsum(-1), (1, 0))
    indices = torch.zeros(batch, heads, rows * columns, dtype=torch.int64)
    for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).tolist():
        found = torch.cat([order[b, h, i, : int(n)] for i, n in enumerate(listed[b, h].sum(-1))])
        indices[b, h, : len(found)] = found
    blocks = BlockSparsity.from_bsr(indptr, indices, block, by_head if masked else None)
    qkv = tensors(*lengths)
    seen = dense(blocks, *lengths).expand(BATCH, -1, -1, -1)
    if masked:
        axes = [
            torch.arange(n).view([-1 if i == j else 1 for j in range(4)])
            for i, n in enumerate((BATCH, HEADS, *lengths))
        ]
        seen = seen & by_head(*axes)
    assert_close(run(qkv, blocks, Place(torch.device("cpu"), backend, (torch.float32,))), formula(*qkv, seen))


@pytest.mark.gpu
def test_no_sync_and_in_a_graph() -> None:
    """Lists on the GPU are planned and run without a sync, and replayed with other values; bf16 on the GPU's own tiles."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    length, block, count = 1024, 64, 5
    indptr = torch.arange(0, length // block * count + 1, count, device="cuda", dtype=torch.int32)
    indices = torch.zeros(length // block * count, device="cuda", dtype=torch.int32)

    def fill(seed: int) -> None:
        torch.manual_seed(seed)
        indices.copy_(torch.rand(length // block, length // block).topk(count).indices.flatten().int())

    q = torch.randn(2, length, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, length, 2, 128, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = {
        "batch": 2,
        "qo_len": length,
        "kv_len": length,
        "num_qo_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 128,
    }
    fill(0)
    plan = evenshare.plan_block_sparse_attention(BlockSparsity.from_bsr(indptr, indices, block), **options)

    def step() -> torch.Tensor:
        plan.update(BlockSparsity.from_bsr(indptr, indices, block))
        return plan.run(q, k, v)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in (1, 2):
        fill(seed)
        graph.replay()
        seen = torch.zeros(length // block, length // block, dtype=torch.bool)
        seen.scatter_(1, indices.view(-1, count).long().cpu(), True)
        seen = seen.repeat_interleave(block, 0).repeat_interleave(block, 1)
        want, _ = formula(*(x.float().cpu() for x in (q, k, v)), seen)
        torch.testing.assert_close(out.cpu().double(), want, atol=2e-2, rtol=2e-2)
    plan.check()

"""Random ragged batches, dense keys dealt to pages, and the float64 oracle with its error budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

import evenshare.attention as api
from evenshare.attention import reference


@dataclass(frozen=True)
class Place:
    device: torch.device
    backend: str
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class Batch:
    """A ragged batch on the CPU in fp32, whose values are exact in fp16 and bf16, so that all dtypes share an oracle."""

    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    q: torch.Tensor  # [total_q, Hq, D]
    k: torch.Tensor  # [total_kv, Hkv, D]
    v: torch.Tensor  # [total_kv, Hkv, Dv]

    @property
    def qo_indptr(self) -> list[int]:
        return indptr(self.qo_lens)

    @property
    def kv_indptr(self) -> list[int]:
        return indptr(self.kv_lens)


@dataclass(frozen=True)
class Pages:
    """A batch's keys in pages, in random order among unused pages; whatever is not a key is NaN."""

    k: torch.Tensor
    v: torch.Tensor
    kv_layout: str
    page_size: int
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    block_table: torch.Tensor
    kv_lens: torch.Tensor

    def table(self, form: str = "indptr", device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """The page table's arguments in one of its two forms."""
        names = ("kv_indptr", "kv_indices", "last_page_len") if form == "indptr" else ("block_table", "kv_lens")
        return {name: getattr(self, name).to(device) for name in names}


def indptr(lens: Sequence[int]) -> list[int]:
    return list(accumulate(lens, initial=0))


def int32(values: Sequence[Any], device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def exact_random(*shape: int) -> torch.Tensor:
    """fp32 values with 8 significant bits: exact in fp16 and in bf16."""
    return torch.randn(*shape).bfloat16().float()


def random_batch(
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    heads: tuple[int, int] = (2, 1),
    dim: int = 32,
    dim_v: int | None = None,
) -> Batch:
    q = exact_random(sum(qo_lens), heads[0], dim)
    k = exact_random(sum(kv_lens), heads[1], dim)
    v = exact_random(sum(kv_lens), heads[1], dim if dim_v is None else dim_v)
    return Batch(tuple(qo_lens), tuple(kv_lens), q, k, v)


def move(batch: Batch, place: Place, dtype: torch.dtype = torch.float32) -> Batch:
    tensors = {name: getattr(batch, name).to(place.device, dtype) for name in ("q", "k", "v")}
    return replace(batch, **tensors)


def to_pages(
    batch: Batch, page_size: int, kv_layout: str = "NHD", *, extra_pages: int = 2, extra_columns: int = 1
) -> Pages:
    """Deal the keys to pages of a cache that is otherwise NaN; unused block table entries point far outside the cache."""
    counts = [-(-n // page_size) for n in batch.kv_lens]
    num_pages = sum(counts) + extra_pages
    ids = torch.randperm(num_pages)[: sum(counts)]
    table = torch.full((len(counts), max(counts, default=0) + extra_columns), 2**31 - 1, dtype=torch.int32)
    caches = []
    for x in (batch.k, batch.v):
        cache = torch.full((num_pages, page_size, *x.shape[1:]), float("nan"), dtype=x.dtype, device=x.device)
        flat, begin = cache.view(-1, *x.shape[1:]), 0
        for r, n in enumerate(batch.kv_lens):
            pages = ids[indptr(counts)[r] : indptr(counts)[r + 1]]
            table[r, : counts[r]] = pages
            position = torch.arange(n)
            flat[(pages[position // page_size] * page_size + position % page_size).to(x.device)] = x[begin : begin + n]
            begin += n
        caches.append(cache if kv_layout == "NHD" else cache.transpose(1, 2).contiguous())
    last = [n - (c - 1) * page_size if c else 0 for n, c in zip(batch.kv_lens, counts, strict=True)]
    return Pages(
        *caches, kv_layout, page_size, int32(indptr(counts)), ids.int(), int32(last), table, int32(batch.kv_lens)
    )  # fmt: skip


def oracle(batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, natural lse) in float64 where the batch is; tests/attention/test_reference.py checks it against a plain loop."""
    out, lse = (batch.q.new_full(shape, float("nan"), dtype=torch.float64)
                for shape in ((*batch.q.shape[:2], batch.v.shape[2]), batch.q.shape[:2]))  # fmt: skip
    tensors = (x.double() for x in (batch.q, batch.k, batch.v))
    reference.ragged_attention(
        *tensors, batch.qo_indptr, batch.kv_indptr, out=out, lse=lse, compute_dtype=torch.float64,
        **full_options(batch, **options),
    )  # fmt: skip
    return out, lse


def full_options(batch: Batch, **options: Any) -> dict[str, Any]:
    defaults = {"causal": True, "window_left": -1, "logits_soft_cap": None, "sm_scale": batch.q.shape[2] ** -0.5}
    return defaults | options


def low_precision(batch: Batch, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    """The formula in torch ops of `dtype`, rounding after each: what torch's own result makes in that precision."""
    o = full_options(batch, **options)
    group = batch.q.shape[1] // batch.k.shape[1]
    q, k, v = (x.to(dtype) for x in (batch.q, batch.k, batch.v))
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    for r, (n, m) in enumerate(zip(batch.qo_lens, batch.kv_lens, strict=True)):
        rows = slice(batch.qo_indptr[r], batch.qo_indptr[r + 1])
        keys = slice(batch.kv_indptr[r], batch.kv_indptr[r + 1])
        scores = torch.einsum("ihd,jhd->hij", q[rows], k[keys].repeat_interleave(group, 1)) * o["sm_scale"]
        if o["logits_soft_cap"]:
            scores = torch.tanh(scores / o["logits_soft_cap"]) * o["logits_soft_cap"]
        i, j = (torch.arange(length, device=q.device) for length in (n, m))
        i, j = i[:, None] + m - n, j[None, :]
        keep = (j <= i) | (not o["causal"])
        keep &= (j + o["window_left"] >= i) | (o["window_left"] < 0)
        weights = torch.softmax(scores.masked_fill(~keep, float("-inf")), -1).masked_fill(~keep, 0)
        out[rows] = torch.einsum("hij,jhd->ihd", weights, v[keys].repeat_interleave(group, 1))
    return out


def assert_matches(
    out: torch.Tensor, lse: torch.Tensor | None, batch: Batch, *, base: float | None = None, **options: Any
) -> None:
    """`out` and `lse` against the oracle, which computes where the batch is.

    fp32: 64 roundings of the largest value. 16 bits: twice the error of torch's own low-precision result plus one
    rounding. Zeros and infinities of empty rows are exact.
    """
    want, want_lse = oracle(batch, **options)
    got = out.detach().to(want.device).double()
    assert got.shape == want.shape
    assert not torch.isnan(got).any(), "NaN in out"
    empty = torch.isneginf(want_lse)
    assert (got[empty] == 0).all(), "an empty row is not zero"
    scale = float(want.abs().max()) if want.numel() else 0.0
    eps = torch.finfo(out.dtype).eps
    if out.dtype == torch.float32:
        budget = 64 * eps * max(scale, float(batch.v.abs().max()) if batch.v.numel() else 0.0)
    else:
        budget = 2 * _max_error(low_precision(batch, out.dtype, **options), want) + eps * scale
    assert _max_error(got, want) <= budget
    if lse is not None:
        if base is not None:
            want_lse = want_lse / math.log(base)
        got_lse = lse.to(want.device).double()
        assert lse.dtype == torch.float32
        assert torch.equal(torch.isneginf(got_lse), empty), "lse is -inf at the wrong rows"
        # A score is a sum of D products of 16-bit numbers, exact inputs; fp32 sums and a log make a few dozen roundings.
        bound = (
            64 * torch.finfo(torch.float32).eps * max(1.0, float(want_lse[~empty].abs().max()) if (~empty).any() else 0)
        )
        assert _max_error(got_lse[~empty], want_lse[~empty]) <= bound


def _max_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max()) if want.numel() else 0.0


def nan_outputs(batch: Batch, place: Place, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """`out=` and `lse=` full of NaN: an element that is not written shows."""
    out = torch.full((*batch.q.shape[:2], batch.v.shape[2]), float("nan"), dtype=dtype, device=place.device)
    return {"out": out, "lse": torch.full(batch.q.shape[:2], float("nan"), device=place.device)}


def run_ragged(
    batch: Batch, place: Place, dtype: torch.dtype = torch.float32, with_lse: bool = True, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    moved = move(batch, place, dtype)
    outputs = nan_outputs(batch, place, dtype)
    if not with_lse:
        del outputs["lse"]
    metadata = {"qo_indptr": int32(batch.qo_indptr, place.device), "kv_indptr": int32(batch.kv_indptr, place.device)}
    options = {"causal": True} | options
    api.attention(moved.q, moved.k, moved.v, **metadata, backend=place.backend, **outputs, **options)
    return outputs["out"], outputs.get("lse")


def run_paged(
    batch: Batch,
    place: Place,
    page_size: int = 16,
    kv_layout: str = "NHD",
    form: str = "indptr",
    dtype: torch.dtype = torch.float32,
    with_lse: bool = True,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    moved = move(batch, place, dtype)
    pages = to_pages(moved, page_size, kv_layout)
    outputs = nan_outputs(batch, place, dtype)
    if not with_lse:
        del outputs["lse"]
    api.paged_attention(
        moved.q, pages.k, pages.v, qo_indptr=int32(batch.qo_indptr, place.device), kv_layout=kv_layout, backend=place.backend,
        **pages.table(form, place.device), **outputs, **options,
    )  # fmt: skip
    return outputs["out"], outputs.get("lse")


def check_ragged(batch: Batch, place: Place, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Ragged attention against the oracle; torch has a path of its own without lse."""
    out, lse = run_ragged(batch, place, dtype, **options)
    assert_matches(out, lse, batch, **options)
    if place.backend == "cpu":
        out, _ = run_ragged(batch, place, dtype, with_lse=False, **options)
        options.pop("base", None)
        assert_matches(out, None, batch, **options)


def check_paged(
    batch: Batch,
    place: Place,
    page_size: int = 16,
    kv_layout: str = "NHD",
    form: str = "indptr",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    """`check_ragged` with the keys in pages."""
    out, lse = run_paged(batch, place, page_size, kv_layout, form, dtype, **options)
    assert_matches(out, lse, batch, **options)
    if place.backend == "cpu":
        out, _ = run_paged(batch, place, page_size, kv_layout, form, dtype, with_lse=False, **options)
        options.pop("base", None)
        assert_matches(out, None, batch, **options)

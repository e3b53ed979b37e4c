"""The ragged batch: which query rows and which keys each request has. One record for ragged, paged and dense forms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

Form = Literal["ragged", "paged", "block_table", "dense"]


@dataclass(frozen=True)
class Batch:
    """int32 tensors on one device, in one of four forms.

    ragged: kv_indptr [B + 1] counts tokens. paged: kv_indptr [B + 1] counts pages in kv_indices, last_page_len [B] in 1..page_size.
    block_table: block_table [B, max_pages], kv_lens [B]. dense: kv_lens [B] of at most table_width keys, tensors are [B, S, H, D].
    qo_indptr None: one query token per request.
    """

    form: Form
    qo_indptr: torch.Tensor | None
    kv_indptr: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None  # block_table, dense: keys per request; paged: last_page_len
    kv_indices: torch.Tensor | None = None  # page ids: flat, or the block table
    table_width: int = 0  # block_table: pages per row; dense: keys per row

    @property
    def size(self) -> int:
        if self.kv_indptr is not None:
            return self.kv_indptr.shape[0] - 1
        assert self.kv_lens is not None
        return self.kv_lens.shape[0]

    @property
    def device(self) -> torch.device:
        anchor = self.kv_indptr if self.kv_indptr is not None else self.kv_lens
        assert anchor is not None
        return anchor.device

    @property
    def table_stride(self) -> int:
        return self.kv_indices.stride(0) if self.form == "block_table" and self.kv_indices is not None else 0

    @property
    def num_indices(self) -> int:
        """Entries that may be read from kv_indices' first element on."""
        if self.kv_indices is None:
            return 0
        if self.form == "block_table":
            return max(self.size - 1, 0) * self.table_stride + self.table_width if self.size else 0
        return self.kv_indices.shape[0]


def _index_tensor(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> torch.Tensor:
    """int32 or int64 in, int32 out: the one place where index tensors are converted."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, want an int32 tensor")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: got dtype {tensor.dtype}, want int32 (or int64, which is converted)")
    if tensor.dim() != len(shape) or any(w is not None and w != g for w, g in zip(shape, tensor.shape, strict=False)):
        want = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want [{want}]")
    tensor = tensor.to(torch.int32)
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def make_batch(
    *,
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    last_page_len: torch.Tensor | None,
    block_table: torch.Tensor | None,
    kv_lens: torch.Tensor | None,
) -> Batch:
    """Sort the metadata of a public call into a `Batch`; raise unless it is one form with matching shapes and devices."""
    indptr: torch.Tensor | None
    indices: torch.Tensor | None
    lens: torch.Tensor | None
    if block_table is not None or kv_lens is not None:
        if block_table is None or kv_lens is None or any(t is not None for t in (kv_indptr, kv_indices, last_page_len)):
            raise ValueError("block_table, kv_lens: want both, and then no kv_indptr, kv_indices or last_page_len")
        form: Form = "block_table"
        indptr, indices = None, _index_tensor("block_table", block_table, (None, None))
        lens = _index_tensor("kv_lens", kv_lens, (indices.shape[0],))
    elif kv_indptr is None:
        raise ValueError("kv_indptr: got None, want an int32 tensor [batch + 1] (or block_table and kv_lens)")
    else:
        indptr = _index_tensor("kv_indptr", kv_indptr, (None,))
        if indptr.shape[0] == 0:
            raise ValueError("kv_indptr: got shape (0,), want [batch + 1]")
        if (kv_indices is None) != (last_page_len is None):
            raise ValueError("kv_indices, last_page_len: want both (paged keys) or neither (ragged keys)")
        form = "ragged" if kv_indices is None else "paged"
        indices = None if kv_indices is None else _index_tensor("kv_indices", kv_indices, (None,))
        lens = None if last_page_len is None else _index_tensor("last_page_len", last_page_len, (indptr.shape[0] - 1,))
    batch = indptr.shape[0] - 1 if indptr is not None else block_table.shape[0]  # type: ignore[union-attr]
    qo = None if qo_indptr is None else _index_tensor("qo_indptr", qo_indptr, (batch + 1,))
    devices = {
        name: t.device for name, t in (("qo_indptr", qo), ("kv_indptr", indptr), ("lengths", lens)) if t is not None
    }
    if len(set(devices.values())) > 1:
        raise ValueError(f"devices of the metadata: got {devices}, want one device")
    return Batch(
        form, qo, indptr, lens, indices, indices.shape[1] if form == "block_table" and indices is not None else 0
    )


def dense_batch(batch: int, qo_len: int, kv_len: int, device: torch.device) -> Batch:
    """`batch` requests of `qo_len` query tokens and `kv_len` keys each, in tensors [batch, length, heads, dim]."""
    qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * qo_len
    kv_lens = torch.full((batch,), kv_len, dtype=torch.int32, device=device)
    return Batch("dense", qo_indptr, None, kv_lens, None, kv_len)


def move(batch: Batch, device: torch.device | str) -> Batch:
    """The same batch with its tensors on `device`. To a GPU asynchronously; to the CPU with a sync, if they are not there yet."""
    to_cpu = torch.device(device).type == "cpu"

    def moved(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.to(device, non_blocking=not to_cpu)

    return replace(
        batch,
        qo_indptr=moved(batch.qo_indptr),
        kv_indptr=moved(batch.kv_indptr),
        kv_lens=moved(batch.kv_lens),
        kv_indices=moved(batch.kv_indices),
    )


def check_host_values(batch: Batch, page_size: int) -> None:
    """Raise ValueError if host metadata is impossible. Device metadata is checked by the planner's kernels instead."""
    for name, indptr in (("qo_indptr", batch.qo_indptr), ("kv_indptr", batch.kv_indptr)):
        if indptr is None:
            continue
        if int(indptr[0]) < 0:
            raise ValueError(f"{name}[0]: got {int(indptr[0])}, want 0 or more")
        falls = torch.nonzero(indptr[1:] < indptr[:-1])
        if falls.numel():
            i = int(falls[0])
            raise ValueError(
                f"{name}: got {int(indptr[i])} then {int(indptr[i + 1])} at index {i}, want a non-decreasing sequence"
            )
    lens = batch.kv_lens
    if batch.form == "paged":
        assert batch.kv_indptr is not None and lens is not None and batch.kv_indices is not None
        if batch.size and int(batch.kv_indptr[-1]) > batch.kv_indices.shape[0]:
            raise ValueError(
                f"kv_indptr[-1]: got {int(batch.kv_indptr[-1])}, want at most the {batch.kv_indices.shape[0]} kv_indices"
            )
        has_pages = batch.kv_indptr[1:] > batch.kv_indptr[:-1]
        wrong = torch.nonzero(has_pages & ((lens < 1) | (lens > page_size)))
        if wrong.numel():
            i = int(wrong[0])
            raise ValueError(f"last_page_len[{i}]: got {int(lens[i])}, want 1 to the page size {page_size}")
    elif batch.form == "block_table":
        assert lens is not None
        limit = batch.table_width * page_size
        wrong = torch.nonzero((lens < 0) | (lens > limit))
        if wrong.numel():
            i = int(wrong[0])
            raise ValueError(
                f"kv_lens[{i}]: got {int(lens[i])}, want 0 to {limit} ({batch.table_width} pages of {page_size})"
            )


def request_bounds(batch: Batch, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """int32 (q_start, qo_len, kv_start, kv_len), each [B], of host metadata that passed `check_host_values`.

    kv_start counts tokens (ragged), entries of kv_indices (paged), or entries of the flattened block table.
    """
    if batch.qo_indptr is None:
        q_start = torch.arange(batch.size, dtype=torch.int32)
        qo_len = torch.ones_like(q_start)
    else:
        q_start, qo_len = batch.qo_indptr[:-1], batch.qo_indptr[1:] - batch.qo_indptr[:-1]
    if batch.form == "dense":
        assert batch.kv_lens is not None
        request = torch.arange(batch.size, dtype=torch.int32)
        return request, qo_len, request, batch.kv_lens
    if batch.form == "block_table":
        assert batch.kv_lens is not None
        return q_start, qo_len, torch.arange(batch.size, dtype=torch.int32) * batch.table_stride, batch.kv_lens
    assert batch.kv_indptr is not None
    kv_start, entries = batch.kv_indptr[:-1], batch.kv_indptr[1:] - batch.kv_indptr[:-1]
    if batch.form == "ragged":
        return q_start, qo_len, kv_start, entries
    assert batch.kv_lens is not None
    return q_start, qo_len, kv_start, torch.where(entries > 0, (entries - 1) * page_size + batch.kv_lens, 0)

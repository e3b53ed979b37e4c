"""FlashInfer's paged cache: appending, and the index arithmetic around it."""

from __future__ import annotations

import torch

from evenshare.compat.flashinfer._arguments import PagedCache, check_int32, check_kv_layout, split_cache
from evenshare.device.checks import check_is_tensor
from evenshare.ops import append_paged_kv_cache as append
from evenshare.ops.rope import token_requests


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: PagedCache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write row i of append_key and append_value [nnz, Hkv, D] to position positions[i] of request batch_indices[i], in place.

    int32 metadata on the device of the cache; kv_last_page_len is not needed. A row whose place does not exist is skipped.
    """
    check_int32(
        batch_indices=batch_indices,
        positions=positions,
        kv_indices=kv_indices,
        kv_indptr=kv_indptr,
        kv_last_page_len=kv_last_page_len,
    )
    k_cache, v_cache = split_cache(paged_kv_cache, check_kv_layout(kv_layout))
    append(
        append_key, append_value, batch_indices, positions, k_cache, v_cache, kv_indptr=kv_indptr, kv_indices=kv_indices,
        kv_layout=kv_layout,
    )  # fmt: skip


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """`append_paged_kv_cache` of latents [nnz, 512] and rotary keys [nnz, 64] to caches [pages, page, 512], [pages, page, 64]."""
    check_int32(
        batch_indices=batch_indices,
        positions=positions,
        kv_indices=kv_indices,
        kv_indptr=kv_indptr,
        kv_last_page_len=kv_last_page_len,
    )
    tensors = {
        "append_ckv": (append_ckv, 2),
        "append_kpe": (append_kpe, 2),
        "ckv_cache": (ckv_cache, 3),
        "kpe_cache": (kpe_cache, 3),
    }
    for name, (tensor, dims) in tensors.items():
        check_is_tensor(**{name: tensor})
        if tensor.dim() != dims:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want {dims} dimensions")
    append(
        append_ckv.unsqueeze(1), append_kpe.unsqueeze(1), batch_indices, positions, ckv_cache.unsqueeze(2),
        kpe_cache.unsqueeze(2), kv_indptr=kv_indptr, kv_indices=kv_indices,
    )  # fmt: skip


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch_indices, positions), int32 [nnz]: whose each appended row is, and where, if seq_lens count the appended rows too.

    append_indptr: int32 [B + 1]; seq_lens: int32 [B]; neither is read by the host. Rows past append_indptr[-1] have (-1, -1),
    which `append_paged_kv_cache` skips. batch_indices, positions: int32 [>= nnz] to be written and returned.

    >>> get_batch_indices_positions(torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([5, 2], dtype=torch.int32), 3)
    (tensor([0, 1, 1], dtype=torch.int32), tensor([4, 0, 1], dtype=torch.int32))
    """
    check_int32(append_indptr=append_indptr, seq_lens=seq_lens, batch_indices=batch_indices, positions=positions)
    if append_indptr.shape[0] != seq_lens.shape[0] + 1:
        raise ValueError(
            f"append_indptr: got shape {tuple(append_indptr.shape)}, want [{seq_lens.shape[0] + 1}], one more than seq_lens"
        )
    for name, given in (("batch_indices", batch_indices), ("positions", positions)):
        if given is not None and given.shape[0] < nnz:
            raise ValueError(f"{name}: got shape {tuple(given.shape)}, want at least [{nnz}]")
    request, place = token_requests(append_indptr, nnz)
    if seq_lens.shape[0]:
        at = request.clamp(min=0)
        begin = seq_lens[at] - (append_indptr[at + 1] - append_indptr[at])
        place = torch.where(request < 0, -1, place + begin)
    made = []
    for given, value in ((batch_indices, request), (positions, place)):
        if given is not None:
            given[:nnz].copy_(value)
        made.append(value if given is None else given)
    return made[0], made[1]


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """int32 [B]: page_size * (pages - 1) + the last page's length; for a request without pages just that.

    >>> get_seq_lens(torch.tensor([0, 3, 3]), torch.tensor([2, 0]), 16)
    tensor([34,  0])
    """
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len

"""Append new keys and values to a paged KV cache."""

from __future__ import annotations

import torch
import triton

from evenshare.device.checks import check_is_tensor
from evenshare.device.target import select_target
from evenshare.ops.kernels import append as append_kernels

CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
BLOCK_ELEMENTS = 512  # 4 for each of 128 threads: 40 to 68 registers (2048 elements: 250, and spills)
INTERPRETER_BLOCK_ELEMENTS = 1 << 14  # the interpreter wants few programs
MAX_BLOCK_D = 256


def append_paged_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    backend: str | None = None,
) -> None:
    """Write row i of k and v to position positions[i] of request batch_indices[i], through the page table.

    k: [nnz, Hkv, D]; v: [nnz, Hkv, Dv]; any strides; float32, 16-bit or fp8, whose bits are copied. k_cache, v_cache: pages of k's
    dtype, NHD [num_pages, page_size, Hkv, D] or HND [num_pages, Hkv, page_size, D], any strides. batch_indices, positions: int32
    [nnz] (int64 is converted).
    The page table is kv_indptr [B + 1] and kv_indices, or block_table [B, max_pages]: int32 (int64 is converted).

    A row is skipped if its request, its position or its page does not exist (a negative position marks padding). The values
    of index tensors are checked where they are used, never read by the host. No sync; a CUDA graph can capture the call.
    Rows that share a place leave one of them there. Raises ValueError or TypeError naming the argument, before any write.

    >>> cache = torch.zeros(4, 16, 2, 8)
    >>> request, position = torch.tensor([0]), torch.tensor([17])
    >>> append_paged_kv_cache(torch.ones(1, 2, 8), torch.ones(1, 2, 8), request, position, cache, torch.zeros_like(cache),
    ...                       block_table=torch.tensor([[3, 1]]))
    >>> cache[1, 1].sum()
    tensor(16.)
    """
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: got {kv_layout!r}, want 'NHD' or 'HND'")
    _check_rows("k", k, "k_cache", k_cache, kv_layout)
    _check_rows("v", v, "v_cache", v_cache, kv_layout)
    if kv_layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    if v.dtype != k.dtype:
        raise TypeError(f"v: got dtype {v.dtype}, want {k.dtype}, as k")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v: got shape {tuple(v.shape)}, want [{k.shape[0]}, {k.shape[1]}, any], as k")
    if v_cache.shape[:2] != k_cache.shape[:2]:
        got, want = tuple(v_cache.shape[:2]), tuple(k_cache.shape[:2])
        raise ValueError(f"v_cache: got {got} pages and page size, want {want}, as k_cache")
    nnz = k.shape[0]
    batch_indices = _index("batch_indices", batch_indices, 1, k.device)
    positions = _index("positions", positions, 1, k.device)
    for name, index in (("batch_indices", batch_indices), ("positions", positions)):
        if index.shape[0] != nnz:
            raise ValueError(f"{name}: got shape {tuple(index.shape)}, want [{nnz}], a row of k each")
    if v.device != k.device:
        raise ValueError(f"v: got device {v.device}, want {k.device}, as k")
    if block_table is not None:
        if kv_indptr is not None or kv_indices is not None:
            raise ValueError("block_table: got kv_indptr or kv_indices as well, want one form of the page table")
        indptr, table = None, _index("block_table", block_table, 2, k.device)
    elif kv_indptr is None or kv_indices is None:
        raise ValueError("kv_indptr, kv_indices: want both, or block_table")
    else:
        indptr, table = _index("kv_indptr", kv_indptr, 1, k.device), _index("kv_indices", kv_indices, 1, k.device)
        if indptr.shape[0] == 0:
            raise ValueError("kv_indptr: got shape (0,), want [batch + 1]")
    if k.element_size() == 1:  # neither torch nor every GPU copies fp8 as such
        k, v, k_cache, v_cache = (tensor.view(torch.uint8) for tensor in (k, v, k_cache, v_cache))
    target = select_target(k.device, backend)
    if nnz == 0 or table.numel() == 0 or k_cache.shape[0] == 0:
        return
    if target.backend == "cpu":
        _append(k, v, batch_indices, positions, indptr, table, k_cache, v_cache)
    else:
        _launch(k, v, batch_indices, positions, indptr, table, k_cache, v_cache, target.interpreted)


def _append(
    k: torch.Tensor,
    v: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    indptr: torch.Tensor | None,
    table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """The torch backend."""
    num_pages, page_size = k_cache.shape[:2]
    request, position = batch_indices.long(), positions.long()
    entry, slot = position // page_size, position % page_size
    if indptr is None:
        width = table.shape[1]
        valid = (request >= 0) & (request < table.shape[0]) & (position >= 0) & (entry < width)
        page = table[request.where(valid, 0), entry.where(valid, 0)]
    else:
        valid = (request >= 0) & (request < indptr.shape[0] - 1) & (position >= 0)
        request = request.where(valid, 0)
        begin, end = indptr[request], indptr[(request + 1).clamp_(max=indptr.shape[0] - 1)]
        entry = entry + begin
        valid &= (begin >= 0) & (entry < end) & (entry < table.shape[0])
        page = table[entry.where(valid, 0)]
    valid &= (page >= 0) & (page < num_pages)
    if not bool(valid.all()):
        k, v, page, slot = k[valid], v[valid], page[valid], slot[valid]
    k_cache[page, slot] = k
    v_cache[page, slot] = v


def _launch(
    k: torch.Tensor,
    v: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    indptr: torch.Tensor | None,
    table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    interpreted: bool,
) -> None:
    nnz, num_heads, head_dim = k.shape
    block_d = min(max(triton.next_power_of_2(max(head_dim, v.shape[2])), 16), MAX_BLOCK_D)
    block_m = max((INTERPRETER_BLOCK_ELEMENTS if interpreted else BLOCK_ELEMENTS) // block_d, 1)
    if indptr is None:
        sizes = (table.shape[0], 0, table.shape[1])
        table_strides = (0, table.stride(0), table.stride(1))
    else:
        sizes = (indptr.shape[0] - 1, table.shape[0], 0)
        table_strides = (indptr.stride(0), 0, table.stride(0))
    with torch.cuda.device_of(k):
        append_kernels.append_paged_kv_cache[(triton.cdiv(nnz * num_heads, block_m),)](
            k, v, batch_indices, positions, table if indptr is None else indptr, table, k_cache, v_cache,
            nnz * num_heads, num_heads, *sizes, k_cache.shape[0], k_cache.shape[1],
            batch_indices.stride(0), positions.stride(0), *table_strides,
            *k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride(),
            HAS_INDPTR=indptr is not None, HEAD_DIM=head_dim, HEAD_DIM_V=v.shape[2], BLOCK_M=block_m, BLOCK_D=block_d,
        )  # fmt: skip


def _check_rows(name: str, rows: torch.Tensor, cache_name: str, cache: torch.Tensor, kv_layout: str) -> None:
    check_is_tensor(**{name: rows, cache_name: cache})
    if rows.dtype not in CACHE_DTYPES:
        raise TypeError(f"{name}: got dtype {rows.dtype}, want one of {', '.join(map(str, CACHE_DTYPES))}")
    if rows.dim() != 3:
        raise ValueError(f"{name}: got shape {tuple(rows.shape)}, want [nnz, num_kv_heads, head_dim]")
    if cache.dtype != rows.dtype:
        raise TypeError(f"{cache_name}: got dtype {cache.dtype}, want {rows.dtype}, as {name}")
    if cache.device != rows.device:
        raise ValueError(f"{cache_name}: got device {cache.device}, want {rows.device}, as {name}")
    head_axis = 2 if kv_layout == "NHD" else 1
    if cache.dim() != 4 or cache.shape[head_axis] != rows.shape[1] or cache.shape[3] != rows.shape[2]:
        middle = f"any, {rows.shape[1]}" if kv_layout == "NHD" else f"{rows.shape[1]}, any"
        want = f"[any, {middle}, {rows.shape[2]}] ({kv_layout})"
        raise ValueError(f"{cache_name}: got shape {tuple(cache.shape)}, want {want}, as {name}")


def _index(name: str, tensor: torch.Tensor, dims: int, device: torch.device) -> torch.Tensor:
    check_is_tensor(**{name: tensor})
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: got dtype {tensor.dtype}, want int32 (or int64, which is converted)")
    if tensor.dim() != dims:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want {dims} dimension{'s' * (dims > 1)}")
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, want {device}, as k")
    return tensor.to(torch.int32)

"""FlashInfer's block-sparse attention: a matrix of blocks, of one size (BSR) or of sizes that vary by head."""

from __future__ import annotations

from typing import Any

import torch

from evenshare.compat.flashinfer import _arguments as arguments
from evenshare.compat.flashinfer._arguments import DType, Scale
from evenshare.compat.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)
from evenshare.device.checks import check_is_tensor
from evenshare.ops.rope import token_requests


class BlockSparseAttentionWrapper:
    """Queries in blocks of R rows, each of which sees some blocks of C keys: a row block is a request, a key block a page."""

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, backend=backend)
        self.device = float_workspace_buffer.device

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any = None) -> None:
        """evenshare sizes its own workspace."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = "float16",
        non_blocking: bool = True,
        block_mask: Any = None,
    ) -> None:
        """Row block i of M / R sees the key blocks indices[indptr[i]:indptr[i + 1]] of N / C; int32, on the host or the device.

        mask: bool [nnz, R, C], what is seen of each block; packed_mask: its bits, by row block, as `segment_packbits` packs them.
        Raises ValueError, TypeError or NotImplementedError naming the argument. No sync.
        """
        arguments.check_int32(indptr=indptr, indices=indices)
        arguments.only_default(block_mask=block_mask)
        for name, size, block, block_name in (("M", M, R, "R"), ("N", N, C, "C")):
            if block < 1 or size % block:
                raise ValueError(f"{name}: got {size}, want a multiple of {block_name} = {block}")
        blocks = M // R
        if indptr.shape[0] != blocks + 1:
            raise ValueError(f"indptr: got shape {tuple(indptr.shape)}, want [{blocks + 1}], M / R + 1")
        qo_indptr = torch.arange(blocks + 1, dtype=torch.int32, device=indptr.device) * R
        custom_mask = None
        if mask is not None:
            check_is_tensor(mask=mask)
            if tuple(mask.shape) != (indices.shape[0], R, C):
                raise ValueError(f"mask: got shape {tuple(mask.shape)}, want [{indices.shape[0]}, {R}, {C}]")
            custom_mask = _by_row(mask.to(self.device, non_blocking=True), indptr.to(self.device, non_blocking=True))
        q_dtype = arguments.canonical_dtype("q_data_type", q_data_type)
        # By default float16 like q's: another q has an output of its own dtype.
        o_dtype = None if o_data_type == "float16" and q_dtype.itemsize > 1 else o_data_type
        self._shape, self._block = (M, N), C
        # One page list for all: of a row block's keys, the last page is full.
        self._wrapper._plan(
            qo_indptr=qo_indptr, kv_indptr=indptr, kv_indices=indices,
            last_page_len=torch.full((blocks,), C, dtype=torch.int32, device=indptr.device), num_rows=M,
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim, head_dim_vo=None, page_size=C,
            custom_mask=custom_mask, packed_custom_mask=packed_mask, causal=causal, pos_encoding_mode=pos_encoding_mode,
            sm_scale=sm_scale, window_left=-1, logits_soft_cap=logits_soft_cap, rope_scale=rope_scale, rope_theta=rope_theta,
            q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_dtype, fixed_split_size=None,
            disable_split_kv=False, variant=None,
        )  # fmt: skip

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: Scale = None,
        scale_k: Scale = None,
        scale_v: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """q [M, Hq, D], k, v [N, Hkv, D] -> out [M, Hq, D], or (out, base-2 lse [M, Hq])."""
        for name, tensor, size in (("q", q, self._shape[0]), ("k", k, self._shape[1]), ("v", v, self._shape[1])):
            check_is_tensor(**{name: tensor})
            if tensor.dim() != 3 or tensor.shape[0] != size:
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want [{size}, heads, head_dim]")
        pages = tuple(x.unflatten(0, (-1, self._block)) for x in (k, v))
        return self._wrapper.run(
            q, pages, q_scale=scale_q, k_scale=scale_k, v_scale=scale_v, out=out, lse=lse, return_lse=return_lse  # type: ignore[arg-type]
        )  # fmt: skip

    def run_return_lse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.run(q, k, v, *args, **{**kwargs, "return_lse": True})

    forward = run

    def end_forward(self) -> None:
        """Nothing to do."""


def _by_row(mask: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """[nnz, R, C] of blocks -> flat, each row block's mask row by row over all of its keys."""
    nnz, rows, columns = mask.shape
    if nnz == 0:
        return mask.flatten()
    block, place = token_requests(indptr, nnz)
    at = block.clamp(min=0).long()
    begin, count = indptr[at].long(), (indptr[at + 1] - indptr[at]).long()
    row = torch.arange(rows, device=mask.device)[None, :, None]
    column = torch.arange(columns, device=mask.device)
    where = (begin * rows * columns)[:, None, None] + row * (count * columns)[:, None, None]
    where = where + (place.long() * columns)[:, None, None] + column
    flat = torch.zeros(nnz * rows * columns, dtype=torch.bool, device=mask.device)
    flat[where.flatten()] = mask.flatten() != 0
    return flat


class VariableBlockSparseAttentionWrapper:
    """Block rows and columns of any sizes, other ones for each KV head. Hidden blocks are masked, not skipped."""

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper(float_workspace_buffer, backend=backend)
        self.device = float_workspace_buffer.device

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any = None) -> None:
        """evenshare sizes its own workspace."""

    def plan(
        self,
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
    ) -> None:
        """block_mask_map: bool [Hkv, MB, NB]; block_row_sz [Hkv, MB], block_col_sz [Hkv, NB]: integers, on any device. No sync."""
        check_is_tensor(block_mask_map=block_mask_map, block_row_sz=block_row_sz, block_col_sz=block_col_sz)
        if block_mask_map.dim() != 3 or block_mask_map.shape[0] != num_kv_heads:
            raise ValueError(
                f"block_mask_map: got shape {tuple(block_mask_map.shape)}, want [{num_kv_heads}, block rows, block columns]"
            )
        for name, sizes, axis in (("block_row_sz", block_row_sz, 1), ("block_col_sz", block_col_sz, 2)):
            want = (num_kv_heads, block_mask_map.shape[axis])
            if tuple(sizes.shape) != want:
                raise ValueError(f"{name}: got shape {tuple(sizes.shape)}, want {want}")
        self._sizes = block_row_sz.to(self.device), block_col_sz.to(self.device)
        self._map = block_mask_map.to(self.device) != 0
        self._options: dict[str, Any] = {
            "num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim_qk": head_dim, "causal": causal,
            "pos_encoding_mode": pos_encoding_mode, "logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale,
            "rope_scale": rope_scale, "rope_theta": rope_theta, "q_data_type": q_data_type, "kv_data_type": kv_data_type,
        }  # fmt: skip
        self._planned: tuple[int, int] | None = None

    begin_forward = plan

    def _plan(self, qo_len: int, kv_len: int) -> None:
        """Once the lengths are known."""
        from evenshare.attention.variants import Variant

        rows, columns = (_block_of(sizes, length) for sizes, length in zip(self._sizes, (qo_len, kv_len), strict=True))
        seen, shift = self._map, kv_len - qo_len
        group = self._options["num_qo_heads"] // self._options["num_kv_heads"]

        def block_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            head = h // group
            return seen[head, rows[head, q_idx - shift], columns[head, kv_idx]]

        lengths = (torch.arange(2, dtype=torch.int32, device=self.device) * n for n in (qo_len, kv_len))
        options = dict(self._options)
        mode = options["pos_encoding_mode"]
        score = arguments.alibi_score(options["num_qo_heads"], self.device) if mode == "ALIBI" else None
        options["pos_encoding_mode"] = "NONE" if mode == "ALIBI" else mode
        qo_indptr, kv_indptr = lengths
        self._wrapper._plan(
            qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=None, last_page_len=None, num_rows=qo_len, head_dim_vo=None,
            page_size=0, custom_mask=None, packed_custom_mask=None, window_left=-1, o_data_type=None, fixed_split_size=None,
            disable_split_kv=False, variant=Variant(score_mod=score, mask_mod=block_mask), **options,
        )  # fmt: skip
        self._planned = qo_len, kv_len

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """q [Hq, qo_len, D], k, v [Hkv, kv_len, D] -> out [Hq, qo_len, D], or (out, base-2 lse [Hq, qo_len])."""
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_is_tensor(**{name: tensor})
            if tensor.dim() != 3:
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want [heads, tokens, head_dim]")
        if self._planned != (q.shape[1], k.shape[1]):
            self._plan(q.shape[1], k.shape[1])
        turned = [None if t is None else t.transpose(0, 1) for t in (q, k, v, out, lse)]
        made = self._wrapper.run(*turned[:3], out=turned[3], lse=turned[4], return_lse=return_lse)  # type: ignore[arg-type]
        if return_lse:
            return made[0].transpose(0, 1), made[1].transpose(0, 1)
        return made.transpose(0, 1)

    forward = run

    def end_forward(self) -> None:
        """Nothing to do."""


def _block_of(sizes: torch.Tensor, length: int) -> torch.Tensor:
    """int32 [heads, length]: the block that each token lies in."""
    ends = sizes.long().cumsum(1)
    tokens = torch.arange(length, device=sizes.device).expand(sizes.shape[0], length).contiguous()
    found = torch.searchsorted(ends, tokens, right=True)
    return found.clamp(max=max(sizes.shape[1] - 1, 0)).to(torch.int32)

"""Which key blocks each block of query rows sees: FlexAttention's `BlockMask`, or lists in BSR form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from evenshare.device.checks import check_is_tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, eq=False)
class BlockSparsity:
    """Of row block i of a batch entry and head, the key blocks indices[begin : begin + num_blocks], int32.

    begin, num_full, num_blocks: int32 [B, H, row blocks]; B and H may be 1, for all. The first num_full blocks of a list are seen
    whole; mask_mod(b, h, q_idx, kv_idx) decides on the keys of the others, None: they are seen whole too. block_size: query rows
    and keys of a block. Positions count from 0.

    >>> BlockSparsity.from_bsr(torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1]), (64, 64)).num_blocks
    tensor([[[1, 2]]], dtype=torch.int32)
    """

    block_size: tuple[int, int]
    begin: torch.Tensor
    num_full: torch.Tensor
    num_blocks: torch.Tensor
    indices: torch.Tensor
    mask_mod: Callable[..., Any] | None = None

    @classmethod
    def from_bsr(
        cls,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        block_size: int | tuple[int, int],
        mask_mod: Callable[..., Any] | None = None,
    ) -> BlockSparsity:
        """Row block i sees the key blocks indices[indptr[i] : indptr[i + 1]], each at most once.

        indptr: integers [row blocks + 1], or [H, ...] or [B, H, ...] for lists of each head; indices: integers [nnz], with the same
        dimensions before it. mask_mod: what is seen of these blocks; None: all. H: query heads, or KV heads.
        Raises ValueError or TypeError naming the argument.
        """
        rows, columns = (block_size, block_size) if isinstance(block_size, int) else block_size
        for name, size in (("block_size[0]", rows), ("block_size[1]", columns)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: got {size!r}, want an int of 1 or more")
        check_is_tensor(indptr=indptr, indices=indices)
        for name, tensor in (("indptr", indptr), ("indices", indices)):
            if tensor.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name}: got dtype {tensor.dtype}, want int32 or int64")
        lead = indptr.shape[:-1]
        if not 1 <= indptr.dim() <= 3 or indptr.shape[-1] < 1:
            raise ValueError(f"indptr: got shape {tuple(indptr.shape)}, want [row blocks + 1], [H, ...] or [B, H, ...]")
        if indices.shape[:-1] != lead or indices.device != indptr.device:
            raise ValueError(
                f"indices: got shape {tuple(indices.shape)} on {indices.device}, "
                f"want [{', '.join(map(str, [*lead, 'nnz']))}] on {indptr.device}"
            )
        indptr = indptr.to(torch.int32).expand(*(1,) * (3 - indptr.dim()), *indptr.shape)
        width = indices.shape[-1]
        first = torch.arange(indptr.shape[0] * indptr.shape[1], dtype=torch.int32, device=indptr.device) * width
        count = indptr[..., 1:] - indptr[..., :-1]
        begin = indptr[..., :-1] + first.view(*indptr.shape[:2], 1)
        full = torch.zeros_like(count) if mask_mod is not None else count
        return cls((rows, columns), begin, full, count, indices.to(torch.int32).reshape(-1), mask_mod)

    @classmethod
    def from_block_mask(cls, block_mask: BlockMask) -> BlockSparsity:
        """The lists of torch.nn.attention.flex_attention.create_block_mask, full blocks first. No sync."""
        partial, num_partial = block_mask.kv_indices, block_mask.kv_num_blocks
        full, num_full = block_mask.full_kv_indices, block_mask.full_kv_num_blocks
        if full is None or num_full is None:
            indices, num_full = partial, torch.zeros_like(num_partial)
        else:
            width = partial.shape[-1] + full.shape[-1]
            place = torch.arange(width, device=full.device)
            later = (place - num_full.unsqueeze(-1)).clamp(0, partial.shape[-1] - 1)
            both = torch.nn.functional.pad(full, (0, partial.shape[-1])), partial.gather(-1, later.long())
            indices = torch.where(place < num_full.unsqueeze(-1), *both)
        lists = indices.shape[:-1]
        begin = torch.arange(lists.numel(), dtype=torch.int32, device=indices.device) * indices.shape[-1]
        rows, columns = block_mask.BLOCK_SIZE
        return cls(
            (rows, columns),
            begin.view(lists),
            num_full.to(torch.int32),
            (num_full + num_partial).to(torch.int32),
            indices.to(torch.int32).reshape(-1),
            block_mask.mask_mod,
        )

    @classmethod
    def of(cls, blocks: BlockMask | BlockSparsity) -> BlockSparsity:
        """Either kind. Raises TypeError for anything else."""
        if isinstance(blocks, BlockSparsity):
            return blocks
        if not hasattr(blocks, "kv_num_blocks"):
            raise TypeError(
                f"blocks: got {type(blocks).__name__}, want a BlockMask of torch.nn.attention.flex_attention or a BlockSparsity"
            )
        return cls.from_block_mask(blocks)

    @property
    def device(self) -> torch.device:
        return self.indices.device

    def check(self, batch: int, num_qo_heads: int, num_kv_heads: int, qo_len: int, kv_len: int) -> None:
        """Raise ValueError unless these lists are for such tensors; host lists are read, device lists are not."""
        lists_batch, heads, row_blocks = self.num_blocks.shape
        if lists_batch not in (1, batch):
            raise ValueError(f"blocks: got lists of {lists_batch} batch entries, want 1 or {batch}")
        if heads not in (1, num_kv_heads, num_qo_heads):
            raise ValueError(
                f"blocks: got lists of {heads} heads, want 1, {num_kv_heads} KV heads or {num_qo_heads} query heads"
            )
        if row_blocks * self.block_size[0] < qo_len:
            raise ValueError(
                f"blocks: got {row_blocks} row blocks of {self.block_size[0]}, want enough for {qo_len} query tokens"
            )
        if self.device.type == "cpu":
            self._check_values(-(-kv_len // self.block_size[1]))

    def _check_values(self, num_kv_blocks: int) -> None:
        count = self.num_blocks
        if count.numel() and int(count.min()) < 0:
            raise ValueError(
                f"blocks: got a list of {int(count.min())} blocks, want 0 or more (indptr must not decrease)"
            )
        ends = self.begin + count
        if count.numel() and (int(self.begin.min()) < 0 or int(ends.max()) > self.indices.numel()):
            raise ValueError(f"blocks: got a list past the end of the {self.indices.numel()} indices")
        order = torch.repeat_interleave(self.begin.flatten().long(), count.flatten().long())
        place = torch.arange(len(order)) - torch.repeat_interleave(
            count.flatten().long().cumsum(0) - count.flatten(), count.flatten().long()
        )
        listed = self.indices[order + place]
        if listed.numel() and not 0 <= int(listed.min()) <= int(listed.max()) < num_kv_blocks:
            wrong = int(listed.min()) if int(listed.min()) < 0 else int(listed.max())
            raise ValueError(f"blocks: got key block {wrong}, want 0 to {num_kv_blocks - 1}")

"""Ready-made masks: mask_mod functions (b, h, q_idx, kv_idx) -> bool, or makers of them.

They combine with `and_masks` and `or_masks` of torch.nn.attention.flex_attention, and run there too. Where a bound says the same,
an attention call's own `causal` and `window_left` are faster: key blocks outside them are never visited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from evenshare.device.checks import check_is_tensor

MaskMod = Callable[[Any, Any, Any, Any], Any]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Keys up to the row's own position, which is that of the last key for the last row."""
    return kv_idx <= q_idx


def sliding_window(window_left: int) -> MaskMod:
    """The row's own key and `window_left` keys before it (Longformer, arXiv 2004.05150, section 3.1)."""
    _check_count("window_left", window_left, 0)

    def sliding_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (q_idx - kv_idx <= window_left)

    return sliding_window


def dilated_window(window_left: int, dilation: int) -> MaskMod:
    """The row's own key and `window_left` keys before it, every `dilation`-th (Longformer, arXiv 2004.05150, section 3.1)."""
    _check_count("window_left", window_left, 0)
    _check_count("dilation", dilation, 1)

    def dilated_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance <= window_left * dilation) & (distance % dilation == 0)

    return dilated_window


def prefix_lm(prefix_lens: torch.Tensor) -> MaskMod:
    """Causal, but every row sees the first prefix_lens[b] keys of its request (T5, arXiv 1910.10683, section 3.2.1).

    prefix_lens: integers [B].
    """
    _check_integers("prefix_lens", prefix_lens, 1)

    def prefix_lm(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) | (kv_idx < prefix_lens[b])

    return prefix_lm


def documents(document_ids: torch.Tensor) -> MaskMod:
    """Rows see the keys of their own document. document_ids: integers [S], of every request, or [B, S], by position."""
    _check_integers("document_ids", document_ids, 1, 2)
    if document_ids.dim() == 1:

        def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return document_ids[q_idx] == document_ids[kv_idx]

    else:

        def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return document_ids[b, q_idx] == document_ids[b, kv_idx]

    return documents


def packed_mask(bits: torch.Tensor, indptr: torch.Tensor, qo_lens: torch.Tensor, kv_lens: torch.Tensor) -> MaskMod:
    """Any mask, a bit for each row and key of a request (FlashInfer's packed_custom_mask).

    bits: uint8; request b's begin at the byte indptr[b], row by row, the first in the lowest bit (`pack_masks`).
    indptr: integers [B + 1]. qo_lens, kv_lens: integers [B], rows and keys of the requests.
    """
    check_is_tensor(bits=bits)
    if bits.dtype != torch.uint8 or bits.dim() != 1:
        raise ValueError(f"bits: got {bits.dtype} of shape {tuple(bits.shape)}, want uint8 of one dimension")
    for name, tensor in (("indptr", indptr), ("qo_lens", qo_lens), ("kv_lens", kv_lens)):
        _check_integers(name, tensor, 1)

    def packed_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        row = q_idx - kv_lens[b] + qo_lens[b]
        bit = row * kv_lens[b] + kv_idx
        return (bits[indptr[b] + bit // 8] >> (bit % 8)) & 1 != 0

    return packed_mask


def pack_masks(masks: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Bool masks [qo_len, kv_len], one for each request -> (bits, indptr) of `packed_mask`.

    >>> bits, indptr = pack_masks([torch.tensor([[True, False, True]]), torch.ones(3, 3, dtype=torch.bool)])
    >>> bits.tolist(), indptr.tolist()
    ([5, 255, 1], [0, 1, 3])
    """
    packed, indptr = [], [0]
    for number, mask in enumerate(masks):
        if mask.dtype != torch.bool or mask.dim() != 2:
            raise ValueError(
                f"masks[{number}]: got {mask.dtype} of shape {tuple(mask.shape)}, want bool [qo_len, kv_len]"
            )
        flat = torch.nn.functional.pad(mask.flatten().int(), (0, -mask.numel() % 8)).view(-1, 8)
        packed.append((flat << torch.arange(8, device=mask.device)).sum(1).to(torch.uint8))
        indptr.append(indptr[-1] + packed[-1].shape[0])
    device = packed[0].device if packed else None
    bits = torch.cat(packed) if packed else torch.zeros(0, dtype=torch.uint8)
    return bits, torch.tensor(indptr, dtype=torch.int32, device=device)


def tree(parents: torch.Tensor, kv_lens: torch.Tensor) -> MaskMod:
    """Speculative decoding with a tree of draft tokens (SpecInfer, arXiv 2305.09781, section 4.2).

    The last T keys of a request are its tree; a token sees itself, its ancestors, and every key before the tree. Rows before it are
    causal.
    parents: integers [B, T], the parent of each token, an earlier token of the tree, or -1 for a root.
    kv_lens: integers [B], keys of the requests, those of the tree included.
    Ancestors are worked out here, in T steps: another tree wants another mask.
    """
    _check_integers("parents", parents, 2)
    _check_integers("kv_lens", kv_lens, 1)
    num_tokens = parents.shape[1]
    # sees[b, i, j]: j is i or an ancestor of it. A parent's row is finished before its children's.
    sees = torch.eye(num_tokens, dtype=torch.bool, device=parents.device).repeat(parents.shape[0], 1, 1)
    request = torch.arange(parents.shape[0], device=parents.device)
    for i in range(1, num_tokens):
        parent = parents[:, i].long()
        sees[:, i] |= sees[request, parent.clamp(min=0)] & (parent >= 0)[:, None]

    def tree(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        begin = kv_lens[b] - num_tokens
        row, key = torch.clamp(q_idx - begin, min=0), torch.clamp(kv_idx - begin, min=0)
        return torch.where(kv_idx < begin, kv_idx <= q_idx, (q_idx >= begin) & sees[b, row, key])

    return tree


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: got {value!r}, want an int of {least} or more")


def _check_integers(name: str, tensor: Any, *dims: int) -> None:
    check_is_tensor(**{name: tensor})
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() not in dims:
        want = " or ".join(map(str, dims))
        raise ValueError(
            f"{name}: got {tensor.dtype} of shape {tuple(tensor.shape)}, want int32 or int64 of {want} dimensions"
        )

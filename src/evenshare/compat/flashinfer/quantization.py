"""Masks in bits: `packbits` and `segment_packbits`, under FlashInfer's names."""

from __future__ import annotations

import torch

from evenshare.device.checks import check_is_tensor
from evenshare.ops.rope import token_requests


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Bool [n] -> uint8 [ceil(n / 8)]; "big": the first element is the highest bit; the last byte is padded with zeros.

    >>> packbits(torch.tensor([True, False, True]), bitorder="little")
    tensor([5], dtype=torch.uint8)
    """
    return segment_packbits(x, torch.tensor([0, x.numel()]), bitorder)[0]


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """Bool [n] and indptr [B + 1] -> (uint8 of each segment padded to whole bytes, their indptr like `indptr`).

    How many bytes there are depends on indptr's values: on a GPU this call waits for it.

    >>> segment_packbits(torch.tensor([True, False, True]), torch.tensor([0, 1, 3]), bitorder="little")
    (tensor([1, 2], dtype=torch.uint8), tensor([0, 1, 2]))
    """
    check_is_tensor(indptr=indptr)
    packed, byte_indptr = pack_segments(x, indptr, bitorder)
    return packed[: int(byte_indptr[-1])], byte_indptr.to(indptr.device)


def pack_segments(x: torch.Tensor, indptr: torch.Tensor, bitorder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`segment_packbits` without waiting: (bytes, and zeros after the last one; their indptr on x's device)."""
    check_is_tensor(x=x)
    if bitorder not in ("big", "little"):
        raise ValueError(f"bitorder: got {bitorder!r}, want 'big' or 'little'")
    if x.dim() != 1:
        raise ValueError(f"x: got shape {tuple(x.shape)}, want one dimension")
    indptr = indptr.to(x.device, non_blocking=True)
    segments = indptr.shape[0] - 1
    byte_indptr = torch.zeros_like(indptr)
    torch.cumsum((indptr.diff() + 7) // 8, 0, dtype=indptr.dtype, out=byte_indptr[1:])
    packed = torch.zeros(x.shape[0] // 8 + segments + 1, dtype=torch.uint8, device=x.device)
    segment, place = token_requests(indptr, x.shape[0])
    bit = place % 8 if bitorder == "little" else 7 - place % 8
    byte = torch.where(
        segment < 0, packed.shape[0] - 1, byte_indptr[segment.clamp(0, max(segments - 1, 0))] + place // 8
    )
    packed.index_add_(
        0, byte.long(), torch.where(segment < 0, 0, x.to(torch.uint8) << bit.to(torch.uint8)).to(torch.uint8)
    )
    return packed, byte_indptr

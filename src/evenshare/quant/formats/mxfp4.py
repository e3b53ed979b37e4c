"""MXFP4 (OCP Microscaling Formats 1.0): e2m1 codes, a power of two per 32 columns. Here: gpt-oss' way of storing experts.

    name_blocks  uint8 [..., n, k / 32, 16]    codes, low nibble first
    name_scales  uint8 [..., n, k / 32]        e8m0: 2^(byte - 127), 255 is NaN

Leading dimensions (experts) are read as rows, one expert after the other: `weight.narrow(e * n, (e + 1) * n)` is expert e.
compressed-tensors stores the same codes and scales under its own names (see compressed_tensors.py), and is how they are written.
"""

from __future__ import annotations

import torch

from evenshare.quant.formats.format import Config, Format, Tensors, check
from evenshare.quant.weight import QuantizedWeight

GROUP_SIZE = 32


def from_codes(codes: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """The weight of codes uint8 [n, k / 2], low nibble first, and e8m0 scales uint8 [n, k / 32]. bfloat16 holds all of e8m0."""
    check("codes", codes, torch.uint8, None, None)
    n, k = codes.shape[0], codes.shape[1] * 2
    if k % GROUP_SIZE:
        raise ValueError(f"codes: got k = {k}, want a multiple of {GROUP_SIZE}")
    check("scales", scales, torch.uint8, n, k // GROUP_SIZE)
    values = scales.contiguous().view(torch.float8_e8m0fnu).to(torch.bfloat16)
    return QuantizedWeight(codes.contiguous(), values, k, GROUP_SIZE, encoding="e2m1")


def e8m0(scales: torch.Tensor) -> torch.Tensor:
    """Scales as e8m0 bytes; those that are no power of two are rounded."""
    return scales.float().to(torch.float8_e8m0fnu).view(torch.uint8)


def refusal(weight: QuantizedWeight) -> str | None:
    if weight.encoding != "e2m1":
        return f"its codes are {weight.encoding}, not e2m1"
    if weight.permutation is not None:
        return "it has a permutation"
    if weight.group_size != GROUP_SIZE or weight.k % GROUP_SIZE:
        return f"its groups are {weight.group_size} of {weight.k} columns, not {GROUP_SIZE}"
    scales = weight.scales.float()
    if not scales.is_meta and not torch.equal(e8m0(scales).view(torch.float8_e8m0fnu).float(), scales):
        return "its scales are not all powers of two"
    return None


def _unpack(tensors: Tensors, config: Config) -> QuantizedWeight:
    blocks, scales = tensors["blocks"], tensors["scales"]
    if blocks.ndim < 3 or blocks.shape[-1] != GROUP_SIZE // 2 or blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"blocks, scales: got shapes {tuple(blocks.shape)} and {tuple(scales.shape)}, "
            "want [..., n, k / 32, 16] and [..., n, k / 32]"
        )
    groups = scales.shape[-1]
    return from_codes(blocks.reshape(-1, groups * GROUP_SIZE // 2), scales.reshape(-1, groups))


MXFP4 = Format(
    name="mxfp4",
    wants="quant_method mxfp4 (gpt-oss)",
    required=("blocks", "scales"),
    separator="_",
    matches=lambda config: config.get("quant_method") == "mxfp4",
    unpack=_unpack,
)

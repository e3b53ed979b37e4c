"""NVFP4: e2m1 codes, an e4m3 scale per 16 columns, and one float32 scale for the tensor. Here: ModelOpt's way of storing it.

    weight          uint8 [n, k / 2]              codes, low nibble first
    weight_scale    float8_e4m3fn [n, k / 16]
    weight_scale_2  float32, one element          w = e2m1 * (weight_scale * weight_scale_2)

compressed-tensors stores the same under its own names, with the inverse of the tensor's scale (see compressed_tensors.py), and is
how they are written.
"""

from __future__ import annotations

import torch

from evenshare.quant.formats.format import Config, Format, Tensors, check
from evenshare.quant.weight import QuantizedWeight

GROUP_SIZE = 16
E4M3 = torch.float8_e4m3fn
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
NUM_POSITIVE = 126  # the bytes 1 to 126 are e4m3's positive numbers, in order
ULPS = (0, 1, -1, 2, -2)


def from_codes(codes: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """The weight of codes uint8 [n, k / 2], low nibble first, and joined scales float32 [n, k / 16]."""
    check("codes", codes, torch.uint8, None, None)
    n, k = codes.shape[0], codes.shape[1] * 2
    if k % GROUP_SIZE:
        raise ValueError(f"codes: got k = {k}, want a multiple of {GROUP_SIZE}")
    check("scales", scales, torch.float32, n, k // GROUP_SIZE)
    return QuantizedWeight(codes.contiguous(), scales, k, GROUP_SIZE, encoding="e2m1")


def split_scales(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(e4m3 [n, groups], divisor float32 [1]) whose quotient in float32 is exactly `scales`; None if there are none.

    The largest scale is some e4m3 number over the divisor. So all 126 are tried, the largest first as is the custom, each with
    the few floats beside the quotient that give the same scale once rounded.
    """
    scales = scales.float()
    values = scales.unique()
    largest = values.abs().max() if values.numel() else scales.new_zeros(())
    if largest == 0:
        return scales.to(E4M3), scales.new_ones(1)
    if values.numel() > 2 * NUM_POSITIVE + 1:
        return None
    positive = torch.arange(NUM_POSITIVE, 0, -1, dtype=torch.uint8, device=scales.device).view(E4M3).float()
    ulps = torch.tensor(ULPS, dtype=torch.int32, device=scales.device)
    divisors = ((positive / largest).view(torch.int32)[:, None] + ulps).view(torch.float32).view(-1, 1)
    exact = ((values * divisors).to(E4M3).float() / divisors == values).all(1).nonzero()
    if not exact.numel():
        return None
    divisor = divisors[exact[0, 0]]
    return (scales * divisor).to(E4M3), divisor


def refusal(weight: QuantizedWeight) -> str | None:
    if weight.encoding != "e2m1":
        return f"its codes are {weight.encoding}, not e2m1"
    if weight.permutation is not None:
        return "it has a permutation"
    if weight.group_size != GROUP_SIZE or weight.k % GROUP_SIZE:
        return f"its groups are {weight.group_size} of {weight.k} columns, not {GROUP_SIZE}"
    if not weight.scales.is_meta and split_scales(weight.scales) is None:
        return "its scales are no e4m3 numbers over one float32 (do its rows come from several tensors?)"
    return None


def _unpack(tensors: Tensors, config: Config) -> QuantizedWeight:
    scales, tensor_scale = tensors["weight_scale"], tensors["weight_scale_2"]
    check("weight_scale", scales, E4M3, None, None)
    if tensor_scale.numel() != 1:
        raise ValueError(f"weight_scale_2: got shape {tuple(tensor_scale.shape)}, want one element")
    return from_codes(tensors["weight"], scales.float() * tensor_scale.float().view(1))


MODELOPT = Format(
    name="modelopt",
    wants="quant_method modelopt, quant_algo NVFP4",
    required=("weight_scale_2", "weight_scale", "weight"),
    matches=lambda config: config.get("quant_method") == "modelopt" and config.get("quant_algo") in ALGORITHMS,
    unpack=_unpack,
)

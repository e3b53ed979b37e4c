"""Quantisation to tables of 16 numbers: MXFP4, NVFP4 and NormalFloat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from evenshare.device.checks import check_is_tensor
from evenshare.quant.chunks import for_each_chunk
from evenshare.quant.encodings import CODEBOOKS
from evenshare.quant.rounding import pack_codes
from evenshare.quant.weight import QuantizedWeight

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
E8M0_RANGE = (-127, 127)


@dataclass(frozen=True)
class Table:
    """A 4-bit floating format. scales: "e8m0" (powers of two), "e4m3" (over one float32 of the whole tensor) or "absmax"."""

    encoding: str
    group_size: int
    scales: Literal["e8m0", "e4m3", "absmax"]


TABLES = {
    "mxfp4": Table("e2m1", 32, "e8m0"),  # OCP Microscaling Formats 1.0
    "nvfp4": Table("e2m1", 16, "e4m3"),
    "nf4": Table("nf4", 64, "absmax"),  # arXiv 2305.14314
}


def quantize_codebook(weight: torch.Tensor, table: str, *, refine: bool = False) -> QuantizedWeight:
    """Quantise `weight` [n, k] (any float dtype) to the nearest numbers of a table, times a scale per group.

    table: "mxfp4": e2m1, groups of 32, scales that are powers of two. "nvfp4": e2m1, groups of 16, scales that are e4m3 over one
        float32 of the tensor. "nf4": groups of 64, scaled by their largest magnitude.
    refine: try the neighbouring scales too (for nf4 a few smaller ones), and keep the one of least squared error, group by group.

    The scales of the result are float32 and hold what the format's own scales stand for.

    Raises TypeError or ValueError for a wrong dtype, shape, table or value that is not finite.
    """
    if table not in TABLES:
        raise ValueError(f"table: got {table!r}, want one of {', '.join(TABLES)}")
    check_is_tensor(weight=weight)
    if not weight.is_floating_point():
        raise TypeError(f"weight: got {weight.dtype}, want a floating-point tensor")
    if weight.ndim != 2 or weight.shape[1] == 0:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, want [n, k] with k at least 1")
    if not weight.is_meta and not torch.isfinite(weight).all():
        raise ValueError("weight: got values that are not finite, want finite ones")
    form = TABLES[table]
    values = torch.tensor(CODEBOOKS[form.encoding])
    divisor = _tensor_divisor(weight) if form.scales == "e4m3" else None
    n, k = weight.shape
    codes = weight.new_empty(n, (k + 1) // 2, dtype=torch.uint8)
    scales = weight.new_empty(n, -(-k // form.group_size), dtype=torch.float32)

    def work(rows: slice) -> None:
        # Zeros at the end of the last group change neither its largest magnitude nor its error: every table has a zero.
        chunk = torch.nn.functional.pad(weight[rows].detach().float(), (0, -k % form.group_size))
        groups = chunk.unflatten(1, (-1, form.group_size))
        found, scale = _best(groups, _candidates(groups, form, divisor, refine), values)
        codes[rows], scales[rows] = pack_codes(found.flatten(1)[:, :k], 4), scale[..., 0]

    for_each_chunk(work, weight)
    return QuantizedWeight(codes, scales, k, form.group_size, encoding=form.encoding)


def _tensor_divisor(weight: torch.Tensor) -> torch.Tensor:
    """NVFP4's float32 of a tensor: with it the largest magnitude is 6 times the largest e4m3 number."""
    if weight.numel() == 0:
        return weight.new_ones((), dtype=torch.float32)
    largest = torch.maximum(-weight.amin(), weight.amax()).float()
    return torch.where(largest == 0, 1.0, 6 * E4M3_MAX / largest)


def _candidates(groups: torch.Tensor, form: Table, divisor: torch.Tensor | None, refine: bool) -> list[torch.Tensor]:
    """Scales to try, float32 [m, num_groups, 1]; the first is the format's usual one."""
    largest = groups.abs().amax(-1, keepdim=True)
    if form.scales == "absmax":
        return [shrink * largest for shrink in ((1.0, 0.95, 0.9, 0.85, 0.8, 0.75) if refine else (1.0,))]
    if form.scales == "e8m0":
        # The exponent of the largest magnitude less that of the table's, which is 4 to 6: magnitudes in (6, 8) are clipped.
        exponent = torch.frexp(largest).exponent - 1 - 2
        return [torch.exp2((exponent + move).clamp(*E8M0_RANGE).float()) for move in ((0, 1, -1) if refine else (0,))]
    assert divisor is not None
    usual = _e4m3(largest / 6 * divisor)
    return [_e4m3(usual * ratio) / divisor for ratio in ((1.0, 0.88, 1.12, 1.25, 1.5) if refine else (1.0,))]


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()


def _best(
    groups: torch.Tensor, candidates: list[torch.Tensor], values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 like groups, scales) of least squared error; the first wins among equals. values: the table, on the CPU."""
    order = values.argsort(stable=True)
    order = order[torch.nn.functional.pad(values[order].diff() > 0, (1, 0), value=True)]  # one code for 0 and -0
    order, values = order.to(groups.device), values.to(groups.device)
    ordered = values[order]
    middles = (ordered[1:] + ordered[:-1]) / 2
    codes, best, least = None, candidates[0], None
    for scale in candidates:
        step = torch.where(scale == 0, 1.0, scale)
        found = order[torch.bucketize(groups / step, middles)]
        error = (values[found] * scale - groups).square_().sum(-1, keepdim=True)
        if codes is None or least is None:
            codes, least = found, error
            continue
        better = error < least
        codes = torch.where(better, found, codes)
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    assert codes is not None
    return codes.to(torch.uint8), best

"""The evenly spaced values that a group's codes stand for."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch


class Form(enum.Enum):
    """How the zero point of a group is held: implied (the middle code), an integer code, or an additive float."""

    SYMMETRIC = "symmetric"
    ZEROS = "zeros"
    OFFSETS = "offsets"


class Levels(NamedTuple):
    """float32 tensors that broadcast against values [m, num_groups, group_size]. `scale` is already rounded to the dtype that
    it will be stored in. `shift` is the code of zero (SYMMETRIC, ZEROS) or the value of code 0 (OFFSETS)."""

    scale: torch.Tensor
    shift: torch.Tensor


def nearest_codes(values: torch.Tensor, levels: Levels, bits: int, form: Form) -> torch.Tensor:
    """The codes 0 .. 2^bits - 1 whose levels are nearest to `values`, as float32."""
    scale, shift = levels
    step = torch.where(scale == 0, 1.0, scale)  # a group without extent: one code for all its values
    codes = torch.round((values - shift) / step) if form is Form.OFFSETS else torch.round(values / step) + shift
    return codes.clamp_(0, (1 << bits) - 1)


def restore(codes: torch.Tensor, levels: Levels, form: Form) -> torch.Tensor:
    """The values that float32 `codes` stand for."""
    scale, shift = levels
    return codes * scale + shift if form is Form.OFFSETS else (codes - shift) * scale

"""The canonical weight in the word order of the portable kernel (kernels/w4a16.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from evenshare.quant.kernels.dequantize import E2M1, FLOAT_OFFSETS, INTEGER_ZEROS, LANES, NF4, SYMMETRIC
from evenshare.quant.weight import QuantizedWeight

# Columns are padded so that no load of the weight needs a mask and every row of words is 16-byte aligned: the widest tile.
COLUMN_MULTIPLE = 128
FORMS = {"integer": SYMMETRIC, "e2m1": E2M1, "nf4": NF4}  # without zeros or offsets
ONE_GROUP = 1 << 30  # a group size that no k reaches: per-channel weights, whatever their k


@dataclass(frozen=True)
class TritonWeight:
    """Operands of the portable kernels. Padding is zero, scales included, so padded weights are zero. Experts are stacked."""

    words: torch.Tensor  # int32 [(num_experts,) num_steps * LANES, padded_n]
    scales: torch.Tensor  # [(num_experts,) padded_groups, padded_n], dtype of the canonical scales
    zeros: torch.Tensor  # like scales: uint8 zeros or float offsets; the scales again where the form has none
    permutation: torch.Tensor | None  # int32 [num_steps * columns of a step], padded with -1
    form: int
    group_size: int  # ONE_GROUP if there is only one
    padded_n: int

    @property
    def num_steps(self) -> int:
        return self.words.shape[-2] // LANES.value


def step_size(bits: int) -> int:
    """Columns of W in one k-step: one 32-bit word of every lane."""
    return 32 // bits * LANES.value


def pack(weight: QuantizedWeight, num_experts: int | None = None) -> TritonWeight:
    """The weight's packed form, from its cache or made now. num_experts: its rows are those of as many weights, packed one by one.

    Making it waits for the device, so that any stream may use it. Raises RuntimeError inside a CUDA graph's capture, which
    would make it at replays only: `prepare` first.
    """
    key = "triton" if num_experts is None else ("triton", num_experts)
    found = weight.packed.get(key)
    if found is None:
        if weight.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "weight: got one that is not packed inside a CUDA graph's capture, want prepare(weight, ...) before"
            )
        found = weight.packed[key] = _pack(weight) if num_experts is None else _pack_experts(weight, num_experts)
        if weight.device.type == "cuda":
            torch.cuda.current_stream(weight.device).synchronize()
    return found


def _pack_experts(weight: QuantizedWeight, num_experts: int) -> TritonWeight:
    n = weight.n // num_experts
    experts = [_pack(weight.narrow(i * n, (i + 1) * n)) for i in range(num_experts)]
    words, scales, zeros = (
        torch.stack([getattr(expert, name) for expert in experts]) for name in ("words", "scales", "zeros")
    )
    return replace(experts[0], words=words, scales=scales, zeros=zeros)


def _pack(weight: QuantizedWeight) -> TritonWeight:
    n, k = weight.n, weight.stored_k
    planes, step = 32 // weight.bits, step_size(weight.bits)
    padded_n = -(-max(n, 1) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    num_steps = -(-k // step)
    codes = torch.nn.functional.pad(weight.unpacked_codes(), (0, num_steps * step - k, 0, padded_n - n))
    codes = codes.t().contiguous().view(num_steps, planes, LANES.value, padded_n)
    words = torch.zeros(num_steps, LANES.value, padded_n, dtype=torch.int32, device=weight.device)
    for plane in range(planes):
        words |= codes[:, plane].to(torch.int32) << (plane * weight.bits)
    group_size = ONE_GROUP if weight.num_groups == 1 else weight.group_size
    padded_groups = max(1, -(-num_steps * step // group_size))

    def columns(per_group: torch.Tensor) -> torch.Tensor:
        padding = (0, padded_groups - weight.num_groups, 0, padded_n - n)
        return torch.nn.functional.pad(per_group, padding).t().contiguous()

    scales = columns(weight.scales)
    if weight.offsets is not None:
        zeros, form = columns(weight.offsets), FLOAT_OFFSETS
    elif weight.zeros is not None:
        zeros, form = columns(weight.zeros), INTEGER_ZEROS
    else:
        zeros, form = scales, FORMS[weight.encoding]
    permutation = weight.permutation
    if permutation is not None:
        permutation = torch.nn.functional.pad(permutation, (0, num_steps * step - k), value=-1)
    return TritonWeight(words.view(-1, padded_n), scales, zeros, permutation, form.value, group_size, padded_n)

"""Tensors as rows: what the elementwise operators and the norms share between the public call and the launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from evenshare.device.checks import check_is_tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class RowBlocks:
    """Rows and columns of a program's block."""

    rows: int
    columns: int
    num_warps: int


# Elements of a program: 16 for each thread, whose loads of 16 bytes are two or more. The interpreter wants few programs.
BLOCK_ELEMENTS, INTERPRETER_BLOCK_ELEMENTS = 2048, 1 << 14
ELEMENTS_PER_WARP = 1024  # 32 fp32 registers a thread for one tensor
MAX_WARPS = 8


def choose_blocks(width: int, max_columns: int, interpreted: bool) -> RowBlocks:
    """Blocks for rows of `width` elements, of at most `max_columns` columns at a time."""
    columns = min(max(triton.next_power_of_2(width), 16), max_columns)
    rows = max((INTERPRETER_BLOCK_ELEMENTS if interpreted else BLOCK_ELEMENTS) // columns, 1)
    warps = min(max(triton.next_power_of_2(rows * columns // ELEMENTS_PER_WARP), 4), MAX_WARPS)
    return RowBlocks(rows, columns, 4 if interpreted else warps)


def fold(tensor: torch.Tensor) -> torch.Tensor:
    """[..., d] as [outer, inner, d]: a view wherever strides allow."""
    if tensor.dim() == 3:
        return tensor
    if tensor.dim() < 3:
        return tensor[None, None] if tensor.dim() == 1 else tensor.unsqueeze(1)
    return tensor.flatten(0, -3)


def shares_memory(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether `fold` has returned a view, so that what is written to it arrives."""
    return view.data_ptr() == tensor.data_ptr()


def check_float(name: str, tensor: torch.Tensor) -> None:
    """Raise unless `tensor` is a float32, float16 or bfloat16 tensor of one dimension or more."""
    check_is_tensor(**{name: tensor})
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, want one of {', '.join(map(str, DTYPES))}")
    if tensor.dim() == 0:
        raise ValueError(f"{name}: got shape (), want one dimension or more")


def check_like(
    name: str,
    tensor: torch.Tensor,
    model_name: str,
    model: torch.Tensor,
    shape: torch.Size | tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> None:
    """Raise unless `tensor` has this shape, the model's device, and its dtype or one of `dtypes`."""
    check_is_tensor(**{name: tensor})
    wanted = (model.dtype,) if dtypes is None else dtypes
    if tensor.dtype not in wanted:
        as_model = f", as {model_name}" if dtypes is None else ""
        raise TypeError(f"{name}: got dtype {tensor.dtype}, want {' or '.join(map(str, wanted))}{as_model}")
    if tensor.shape != tuple(shape):
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want {tuple(shape)}")
    if tensor.device != model.device:
        raise ValueError(f"{name}: got device {tensor.device}, want {model.device}, as {model_name}")

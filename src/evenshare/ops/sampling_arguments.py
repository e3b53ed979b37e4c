"""What the sampling functions are given: rows, settings for all rows or for each, and where random numbers come from."""

from __future__ import annotations

import math

import torch

from evenshare.device.checks import check_is_tensor
from evenshare.ops.rows import check_float

Setting = float | torch.Tensor | None
INDEX_DTYPES = (torch.int32, torch.int64)


def check_rows(name: str, x: torch.Tensor) -> None:
    """Raise unless x is a floating-point [rows, vocab]."""
    check_float(name, x)
    if x.dim() != 2:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, want [rows, vocab]")


def check_indices(indices: torch.Tensor | None, name: str, x: torch.Tensor) -> None:
    """Raise unless indices are rows of x; their values are read on the CPU only."""
    if indices is None:
        return
    check_is_tensor(indices=indices)
    if indices.dtype not in INDEX_DTYPES:
        raise TypeError(f"indices: got dtype {indices.dtype}, want torch.int32 or torch.int64")
    if indices.dim() != 1:
        raise ValueError(f"indices: got shape {tuple(indices.shape)}, want [n]")
    if indices.device != x.device:
        raise ValueError(f"indices: got device {indices.device}, want {x.device}, as {name}")
    if x.device.type == "cpu" and indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < x.shape[0]:
        raise ValueError(f"indices: got {indices.tolist()}, want rows of {name}, 0 to {x.shape[0] - 1}")


def check_setting(name: str, setting: Setting, x: torch.Tensor, num_rows: int) -> Setting:
    """The setting, a tensor of rows being contiguous. Raises if it cannot be one, by its value if the host knows it."""
    if setting is None:
        return None
    if isinstance(setting, torch.Tensor):
        wanted = INDEX_DTYPES if name == "top_k" else (torch.float32,)
        if setting.dtype not in wanted:
            raise TypeError(f"{name}: got dtype {setting.dtype}, want {' or '.join(map(str, wanted))}")
        if setting.shape != (num_rows,):
            raise ValueError(
                f"{name}: got shape {tuple(setting.shape)}, want [{num_rows}], one for each row, or a number"
            )
        if setting.device != x.device:
            raise ValueError(f"{name}: got device {setting.device}, want {x.device}")
        return setting.contiguous()
    if isinstance(setting, bool) or not isinstance(setting, int | float):
        raise TypeError(f"{name}: got {type(setting).__name__}, want a number or a tensor")
    if name == "top_k":
        if setting != int(setting) or setting < 1:
            raise ValueError(f"top_k: got {setting}, want a whole number above 0")
    elif name == "temperature":
        if not 0 <= setting < math.inf:
            raise ValueError(f"temperature: got {setting}, want a finite number, 0 or above")
    elif not 0 <= setting <= 1:
        raise ValueError(f"{name}: got {setting}, want a number from 0 to 1")
    return setting


def as_rows(setting: Setting, device: torch.device, default: float) -> torch.Tensor:
    """[rows] or [1]."""
    if isinstance(setting, torch.Tensor):
        return setting
    return torch.tensor([default if setting is None else setting], device=device)


def random_state(
    seed: int | torch.Tensor | None,
    offset: int | torch.Tensor | None,
    generator: torch.Generator | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(seed, offset), each int64 [1] on the device. Without a seed, a draw from torch's generator, which graphs can replay."""
    if seed is None:
        if offset is not None:
            raise ValueError("offset: got one without a seed, want both or none")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator: got {type(generator).__name__}, want a torch.Generator or None")
        limits = torch.iinfo(torch.int64)
        return torch.randint(limits.min, limits.max, (2,), generator=generator, device=device).chunk(2)  # type: ignore[return-value]
    return _word("seed", seed, device), _word("offset", 0 if offset is None else offset, device)


def _word(name: str, value: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.dtype != torch.int64 or value.numel() != 1:
            raise ValueError(
                f"{name}: got {value.dtype} {tuple(value.shape)}, want an int, or torch.int64 of one element"
            )
        if value.device != device:
            raise ValueError(f"{name}: got device {value.device}, want {device}")
        return value.reshape(1)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__}, want an int or a tensor")
    wrapped = (value + 2**63) % 2**64 - 2**63  # any int counts by its low 64 bits
    return torch.full((1,), wrapped, dtype=torch.int64, device=device)

"""Triton launches on the current device; tensors may be on another one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING: AbstractContextManager[None] = nullcontext()


def device_guard(device: torch.device) -> AbstractContextManager[None]:
    """Make `device` current for a launch; costs nothing where it is current already."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)  # type: ignore[return-value]

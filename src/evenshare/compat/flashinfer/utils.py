"""What importers ask `flashinfer.utils` about the device."""

from __future__ import annotations

import torch


def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability (major, minor) of `device`."""
    if torch.device(device).type != "cuda":
        raise ValueError(f"device: got {device}, want a CUDA device")
    return torch.cuda.get_device_capability(device)


def is_sm90a_supported(device: torch.device) -> bool:
    """Whether this is a Hopper GPU."""
    return torch.device(device).type == "cuda" and get_compute_capability(device)[0] == 9


def is_fa3_backend_supported(*args: object, **kwargs: object) -> bool:
    """False: evenshare chooses its kernel itself, and takes the name of any backend."""
    return False


def is_fa3_prefill_head_dim_supported(*args: object, **kwargs: object) -> bool:
    """False, as `is_fa3_backend_supported`."""
    return False


def has_flashinfer_jit_cache() -> bool:
    """True: there is nothing to compile beforehand."""
    return True


def has_flashinfer_cubin() -> bool:
    """True: there is nothing to fetch."""
    return True


def determine_attention_backend(*args: object, **kwargs: object) -> str:
    """ "auto": evenshare chooses its kernel itself."""
    return "auto"

"""Which backend runs where, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

BACKENDS = ("cpu", "triton")
HOPPER = (9, 0)  # the compute capability of H100 and H200


@dataclass(frozen=True)
class Target:
    """A place to run: what a launch needs to know of the device."""

    backend: str  # "cpu": plain torch; "triton": portable kernels
    device: torch.device
    num_sms: int  # workers that run at once; 1 on the CPU
    capability: tuple[int, int]  # CUDA compute capability; (0, 0) on the CPU
    interpreted: bool  # Triton's interpreter runs the kernels


def interpreter_active() -> bool:
    """True if Triton was imported with TRITON_INTERPRET=1, so that its kernels run on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


# The interpreter runs programs one after the other; a few are enough to exercise splitting and merging.
INTERPRETER_WORKERS = 4


@cache
def _target(device: torch.device, backend: str) -> Target:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        return Target(backend, device, properties.multi_processor_count, capability, False)
    workers = INTERPRETER_WORKERS if backend == "triton" else 1
    return Target(backend, device, workers, (0, 0), backend == "triton")


def select_target(device: torch.device | str, backend: str | None = None) -> Target:
    """Choose the backend for tensors on `device`.

    backend: None chooses (CUDA: "triton"; CPU: "cpu"); "triton" on CPU tensors needs Triton's interpreter
    (set TRITON_INTERPRET=1 before the first import); "cpu" on CUDA tensors runs the torch reference there.

    Raises ValueError if the backend is unknown or cannot run on that device.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {device}, want a cpu or cuda device")
    if backend is None:
        backend = "triton" if device.type == "cuda" else "cpu"
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, want one of {', '.join(BACKENDS)} or None")
    if backend == "triton" and device.type == "cpu" and not interpreter_active():
        raise ValueError(
            "backend: got 'triton' for CPU tensors, which needs Triton's interpreter: "
            "set TRITON_INTERPRET=1 before importing triton, or want backend='cpu'"
        )
    return _target(device, backend)

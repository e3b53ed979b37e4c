"""Activations by name in plain torch, for the CPU backends and the tests; `device.epilogue` has them as device functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Activation = Callable[[torch.Tensor], torch.Tensor]


def _identity(y: torch.Tensor) -> torch.Tensor:
    return y


def _gelu_tanh(y: torch.Tensor) -> torch.Tensor:
    return F.gelu(y, approximate="tanh")


ACTIVATIONS: dict[str | None, Activation] = {
    None: _identity,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
}


def get_activation(name: str | None) -> Activation:
    """The torch function of `name`; ValueError for an unknown one."""
    if name not in ACTIVATIONS:
        names = ", ".join(str(known) for known in ACTIVATIONS)
        raise ValueError(f"activation: got {name!r}, want one of {names}")
    return ACTIVATIONS[name]

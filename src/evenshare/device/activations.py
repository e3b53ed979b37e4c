"""Activations by name in plain torch, for the CPU backends and the tests; `device.epilogue` has them as device functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Activation = Callable[[torch.Tensor], torch.Tensor]
GATED_SUFFIX = "_and_multiply"


def _identity(y: torch.Tensor) -> torch.Tensor:
    return y


def _gelu_tanh(y: torch.Tensor) -> torch.Tensor:
    return F.gelu(y, approximate="tanh")


def _gated(activation: Activation) -> Activation:
    def gated(y: torch.Tensor) -> torch.Tensor:
        gate, up = y.chunk(2, dim=-1)
        return activation(gate) * up

    return gated


ACTIVATIONS: dict[str | None, Activation] = {
    None: _identity,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
    # [..., 2 n] -> [..., n]: the activation of the first half, the gate, times the second.
    "silu_and_multiply": _gated(F.silu),
    "gelu_and_multiply": _gated(F.gelu),
    "gelu_tanh_and_multiply": _gated(_gelu_tanh),
}


def get_activation(name: str | None) -> Activation:
    """The torch function of `name`; ValueError for an unknown one."""
    if name not in ACTIVATIONS:
        names = ", ".join(str(known) for known in ACTIVATIONS)
        raise ValueError(f"activation: got {name!r}, want one of {names}")
    return ACTIVATIONS[name]


def is_gated(name: str | None) -> bool:
    """Whether `name` halves the number of columns."""
    return name is not None and name.endswith(GATED_SUFFIX)

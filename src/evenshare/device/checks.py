"""What every public function checks first."""

from __future__ import annotations

from typing import Any

import torch


def check_is_tensor(**arguments: Any) -> None:
    """Raise TypeError naming the first argument that is no tensor."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, want a tensor")

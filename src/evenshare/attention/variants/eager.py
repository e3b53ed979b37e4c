"""A variant's functions on the CPU backend: torch calls them, mapped over heads, query rows and keys as FlexAttention does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from evenshare.attention.variants.variant import Variant


@torch.no_grad()
def modified(variant: Variant, scores: torch.Tensor, request: int, first_q: int, first_kv: int) -> torch.Tensor:
    """Scores [Hq, rows, keys] after the variant's functions; hidden ones are -inf, or 0 without softmax.

    request: its number in the batch. first_q, first_kv: positions of the first row and of the first key.
    """
    device = scores.device
    b = torch.tensor(request, device=device)
    h, q_idx, kv_idx = (
        torch.arange(begin, begin + size, device=device)
        for begin, size in zip((0, first_q, first_kv), scores.shape, strict=True)
    )
    with _IndexByValues():
        if variant.score_mod is not None:
            changed = _mapped(variant.score_mod, with_score=True)(scores, b, h, q_idx, kv_idx)
            scores = changed.to(scores.dtype)
        if variant.mask_mod is not None:
            seen = _mapped(variant.mask_mod, with_score=False)(b, h, q_idx, kv_idx)
            scores = torch.where(seen.bool(), scores, float("-inf") if variant.softmax else 0.0)
    return scores


@torch.no_grad()
def transformed(function: Callable[..., Any], x: torch.Tensor, request: int, first: int) -> torch.Tensor:
    """x [tokens, heads, D] after a transform. request: its number in the batch. first: position of the first token."""
    if x.numel() == 0:
        return x
    b = torch.tensor(request, device=x.device)
    position, h, d = (torch.arange(size, device=x.device) for size in x.shape)

    def tensor_function(row: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(function(row, *place), device=x.device).expand(x.shape[-1:])

    mapped = torch.vmap(tensor_function, in_dims=(0, None, 0, None, None))
    mapped = torch.vmap(mapped, in_dims=(0, None, None, 0, None))
    with _IndexByValues():
        return mapped(x, b, h, position + first, d).to(x.dtype)


def _mapped(function: Callable[..., Any], with_score: bool) -> Callable[..., Any]:
    def tensor_function(*numbers: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(function(*numbers), device=numbers[0].device)

    mapped: Callable[..., Any] = tensor_function
    for dim in (2, 1, 0):
        along = [None, *(0 if i == dim else None for i in range(3))]
        mapped = torch.vmap(mapped, in_dims=tuple([0, *along] if with_score else along))
    return mapped


class _IndexByValues(TorchFunctionMode):
    """x[i] for a mapped number i, which torch would ask for its value."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.__getitem__:
            x, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, torch.Tensor) for i in indices):
                tensors = [i if isinstance(i, torch.Tensor) else torch.tensor(i, device=x.device) for i in indices]
                return torch.ops.aten.index(x, tensors)
        return function(*args, **(kwargs or {}))

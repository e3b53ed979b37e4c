"""A variant's functions on the CPU backend: torch calls them, mapped over heads, query rows and keys as FlexAttention does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from evenshare.attention.variants.variant import Variant


class Place(NamedTuple):
    """Where a block of scores lies: its request's number, its query heads, and the positions of its rows and keys, int64."""

    request: int
    heads: torch.Tensor
    rows: torch.Tensor
    keys: torch.Tensor


@torch.no_grad()
def modified(variant: Variant, scores: torch.Tensor, place: Place, num_unmasked: int = 0) -> torch.Tensor:
    """Scores [heads, rows, keys] after the variant's functions; hidden ones are -inf, or 0 without softmax.

    num_unmasked: of the keys, the first ones, which the mask does not hide.
    """
    positions = torch.tensor(place.request, device=scores.device), *place[1:]
    with _IndexByValues():
        if variant.score_mod is not None:
            changed = _mapped(variant.score_mod, with_score=True)(scores, *positions)
            scores = changed.to(scores.dtype)
        if variant.mask_mod is not None:
            seen = _mapped(variant.mask_mod, with_score=False)(*positions).bool()
            seen = seen | (torch.arange(seen.shape[-1], device=seen.device) < num_unmasked)
            scores = torch.where(seen, scores, float("-inf") if variant.softmax else 0.0)
    return scores


@torch.no_grad()
def transformed(
    function: Callable[..., Any], x: torch.Tensor, request: int, heads: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """x [tokens, heads, D] after a transform. request: its number in the batch; heads, positions: those of x, int64."""
    if x.numel() == 0:
        return x

    def tensor_function(row: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(function(row, *place), device=x.device).expand(x.shape[-1:])

    mapped = torch.vmap(tensor_function, in_dims=(0, None, 0, None, None))
    mapped = torch.vmap(mapped, in_dims=(0, None, None, 0, None))
    b, d = torch.tensor(request, device=x.device), torch.arange(x.shape[-1], device=x.device)
    with _IndexByValues():
        return mapped(x, b, heads, positions, d).to(x.dtype)


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

"""A KV cache that grows in place: a token's keys and values are written once and never copied for the next token."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

# Tokens by which storage grows at least. A step's attention reads the filled part only, so spare room costs memory alone.
GROWTH = 256


class InPlaceLayer(DynamicLayer):
    """One layer's keys and values in storage [B, capacity, Hkv, D]; `keys` and `values` are views of the filled part.

    transformers' DynamicLayer concatenates: at 1,000 tokens it copies every layer's whole cache for each new token.
    """

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.length = self.capacity = 0
        self.storage: tuple[torch.Tensor, ...] = ()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, Hkv, n, D] keys and values; returns those of all tokens so far, [B, Hkv, length, D], as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self.capacity:
            self._grow(key_states, value_states)
        keys, values = self.storage
        keys[:, :, start : self.length] = key_states
        values[:, :, start : self.length] = value_states
        self.keys, self.values = keys[:, :, : self.length], values[:, :, : self.length]
        return self.keys, self.values

    def _grow(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.capacity = max(2 * self.capacity, self.length + GROWTH)
        fresh = []
        for new, old in ((key_states, self.keys), (value_states, self.values)):
            batch, heads, _, dim = new.shape
            storage = new.new_empty(batch, self.capacity, heads, dim).transpose(1, 2)
            if old.numel():
                storage[:, :, : old.shape[2]] = old
            fresh.append(storage)
        self.storage = tuple(fresh)


class InPlaceCache(Cache):
    """transformers' `past_key_values` with `InPlaceLayer`s. For one growing sequence: no beam search, no cropping."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=InPlaceLayer)

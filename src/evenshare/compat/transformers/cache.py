"""A KV cache that grows in place: a token's keys and values are written once and never copied for the next token."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

# Tokens by which storage grows at least. A step's attention reads the filled part only, so spare room costs memory alone.
GROWTH = 256


class InPlaceCache(Cache):
    """transformers' `past_key_values` in one tensor [layers, 2, B, capacity, Hkv, D], for models whose layers are all alike.

    transformers' DynamicCache concatenates: at 1,000 tokens it copies every layer's whole cache for each new token. Here a
    step's views are cut for all layers at once, when its first layer asks. No beam search, no cropping.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self.num_layers = num_layers
        self.length = self.capacity = 0
        self._storage: torch.Tensor | None = None
        self._slots: list[tuple[torch.Tensor, ...]] = []
        self._filled: list[tuple[torch.Tensor, ...]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, Hkv, n, D] keys and values to a layer; returns those of all tokens so far, [B, Hkv, length, D], as views."""
        if layer_idx == 0:
            self._begin_step(key_states)
        keys, values = self._slots[layer_idx]
        keys.copy_(key_states)
        values.copy_(value_states)
        keys, values = self._filled[layer_idx]
        return keys, values

    def _begin_step(self, like: torch.Tensor) -> None:
        batch, heads, tokens, dim = like.shape
        start, self.length = self.length, self.length + tokens
        if self.length > self.capacity:
            self.capacity = max(2 * self.capacity, self.length + GROWTH)
            grown = like.new_empty(self.num_layers, 2, batch, self.capacity, heads, dim)
            if self._storage is not None:
                grown[:, :, :, :start] = self._storage[:, :, :, :start]
            self._storage = grown
        assert self._storage is not None
        by_head = self._storage[:, :, :, : self.length].transpose(3, 4)
        self._filled = [pair.unbind(0) for pair in by_head.unbind(0)]
        self._slots = [pair.unbind(0) for pair in by_head[..., start:, :].unbind(0)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the cache holds."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys that `query_length` new tokens will meet, number of the first)."""
        return self.length + query_length, 0

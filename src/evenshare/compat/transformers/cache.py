"""A KV cache that grows in place: a token's keys and values are written once and never copied for the next token."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

# Tokens by which storage grows at least. A step's attention reads the filled part only, so spare room costs memory alone.
GROWTH = 256


class InPlaceCache(Cache):
    """transformers' `past_key_values` in one tensor [layers, B, capacity, 2, Hkv, D], for models whose layers are all alike.

    transformers' DynamicCache concatenates: at 1,000 tokens it copies every layer's whole cache for each new token. Here a
    step's views are cut for all layers at once, when its first layer asks. No beam search, no cropping.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self.num_layers = num_layers
        self.length = self.capacity = 0
        self._storage: torch.Tensor | None = None
        # Of the step in progress, by layer: where its new tokens go [B, n, 2, Hkv, D], and all keys and values [B, Hkv, length, D].
        self.slots: tuple[torch.Tensor, ...] = ()
        self.keys: tuple[torch.Tensor, ...] = ()
        self.values: tuple[torch.Tensor, ...] = ()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, Hkv, n, D] keys and values to a layer; returns those of all tokens so far, [B, Hkv, length, D], as views."""
        if layer_idx == 0:
            batch, heads, tokens, dim = key_states.shape
            self.begin_step(batch, tokens, heads, dim, key_states)
        new_keys, new_values = self.slots[layer_idx].transpose(1, 3).unbind(2)
        new_keys.copy_(key_states)
        new_values.copy_(value_states)
        return self.keys[layer_idx], self.values[layer_idx]

    def begin_step(self, batch: int, tokens: int, kv_heads: int, head_dim: int, like: torch.Tensor) -> None:
        """Make room for `tokens` new tokens, of the dtype and device of `like`, and cut `slots`, `keys` and `values`."""
        start, self.length = self.length, self.length + tokens
        if self.length > self.capacity:
            self.capacity = max(2 * self.capacity, self.length + GROWTH)
            grown = like.new_empty(self.num_layers, batch, self.capacity, 2, kv_heads, head_dim)
            if self._storage is not None:
                grown[:, :, :start] = self._storage[:, :, :start]
            self._storage = grown
        assert self._storage is not None
        filled = self._storage[:, :, : self.length]
        self.slots = filled[:, :, start:].unbind(0)
        keys, values = filled.transpose(2, 4).unbind(3)
        self.keys, self.values = keys.unbind(0), values.unbind(0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the cache holds."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys that `query_length` new tokens will meet, number of the first)."""
        return self.length + query_length, 0

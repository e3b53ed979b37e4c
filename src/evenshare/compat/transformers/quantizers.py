"""Quantised layers in transformers models."""

from __future__ import annotations

from evenshare.quant import QuantEmbedding, QuantLinear, replace_linears

__all__ = ["QuantEmbedding", "QuantLinear", "replace_linears"]

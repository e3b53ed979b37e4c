"""evenshare inside Hugging Face transformers: `enable()`, then `attn_implementation="evenshare"`."""

from __future__ import annotations

from evenshare._lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        "QuantEmbedding": "quantizers",
        "QuantLinear": "quantizers",
        "disable": "registration",
        "enable": "registration",
        "replace_linears": "quantizers",
    },
)

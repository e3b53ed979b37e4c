"""`enable()`: make evenshare known to transformers."""

from __future__ import annotations


def enable(*, attention: bool = True, quantizers: bool = True) -> None:
    """Register evenshare with transformers for this process; calling it again changes nothing.

    attention: the attention implementations `evenshare` (choose it by `attn_implementation="evenshare"` or
        `model.set_attn_implementation("evenshare")`) and `paged|evenshare` (for continuous batching).
    quantizers: what loads 4-bit checkpoints into `QuantLinear`. GGUF files need no registration, so nothing is taken over yet.

    Raises ImportError if transformers is not installed.
    """
    if attention:
        from evenshare.compat.transformers import attention as attention_module

        attention_module.register()
    if quantizers:
        from evenshare.compat.transformers import quantizers as _  # noqa: F401  (fails here, not at the first layer)

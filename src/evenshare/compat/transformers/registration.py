"""`enable()`: make evenshare known to transformers."""

from __future__ import annotations


def enable(*, attention: bool = True, quantizers: bool = True) -> None:
    """Register evenshare with transformers for this process; calling it again changes nothing.

    attention: the attention implementations `evenshare` (choose it by `attn_implementation="evenshare"` or
        `model.set_attn_implementation("evenshare")`) and `paged|evenshare` (for continuous batching).
    quantizers: `from_pretrained` loads GPTQ, AWQ, compressed-tensors, HQQ and ModelOpt checkpoints of 4 and 8 bits into
        `QuantLinear`, without the packages that made them. What evenshare cannot read stays with transformers' own loaders.

    Raises ImportError if transformers is not installed.
    """
    if attention:
        from evenshare.compat.transformers import attention as attention_module

        attention_module.register()
    if quantizers:
        from evenshare.compat.transformers.quantizers import take_over

        take_over()


def disable() -> None:
    """Give transformers' quantised checkpoints back to its own loaders. Models that were loaded stay as they are, and the names
    of evenshare's attention stay known: they take nothing from anybody."""
    from evenshare.compat.transformers.quantizers import release

    release()

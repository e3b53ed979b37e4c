"""Attention as its user writes it: `Variant`, and ready-made score and mask functions for it."""

from evenshare._lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        "Variant": "variant",
        "VariantError": "symbolic",
        **dict.fromkeys(
            ("alibi", "alibi_slopes", "relative_bias", "sigmoid_attention", "soft_cap", "tanh_approx"), "scores"
        ),
        **dict.fromkeys(("cos_approx", "sin_approx"), "scores"),
        **dict.fromkeys(("causal", "sliding_window", "dilated_window", "prefix_lm", "documents", "tree"), "masks"),
        **dict.fromkeys(("pack_masks", "packed_mask"), "masks"),
        **dict.fromkeys(("in_turn", "rms_norm", "rope", "rope_with_cos_sin_cache"), "transforms"),
    },
)

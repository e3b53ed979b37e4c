"""What inference needs around attention and linear layers."""

from evenshare._lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        "RopeScaling": "rope",
        "activate_and_multiply": "activation",
        "add_rms_norm": "norm",
        "append_paged_kv_cache": "append",
        "apply_rope": "rope",
        "apply_rope_with_cos_sin_cache": "rope",
        "layer_norm": "norm",
        "mask_logits": "sampling",
        "renormalize_probs": "sampling",
        "rms_norm": "norm",
        "sample_from_logits": "sampling",
        "sample_from_probs": "sampling",
        "softmax": "sampling",
        "speculative_sample": "sampling_speculative",
    },
)

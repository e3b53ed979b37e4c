"""FlashInfer's sampling."""

from evenshare.compat.flashinfer._missing import missing

NAMES = (
    "softmax",
    "sampling_from_logits",
    "sampling_from_probs",
    "top_p_sampling_from_probs",
    "top_k_sampling_from_probs",
    "min_p_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_k_renorm_probs",
    "top_k_mask_logits",
    "chain_speculative_sampling",
)

__getattr__ = missing(__name__, NAMES, "evenshare has no sampling yet")

"""FlashInfer's latent attention."""

from evenshare.compat.flashinfer._missing import missing

NAMES = (
    "BatchMLAPagedAttentionWrapper",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
)

__getattr__ = missing(__name__, NAMES, "head dims end at 256")

"""FlashInfer's names, argument order, defaults and conventions over evenshare.

    import sys
    import evenshare.compat.flashinfer
    sys.modules["flashinfer"] = evenshare.compat.flashinfer

in a program's first lines lets everything that imports `flashinfer`, or a submodule of it, run on evenshare: docs/flashinfer.md.
"""

from evenshare._lazy import attach
from evenshare.compat.flashinfer._alias import install

__version__ = "0.6.18+evenshare"  # the interface's version

_NAMES = {
    "activation": ("gelu_and_mul", "gelu_tanh_and_mul", "silu_and_mul"),
    "attention": ("BatchAttention", "BatchAttentionWithAttentionSinkWrapper"),
    "cascade": (
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
        "merge_state",
        "merge_state_in_place",
        "merge_states",
    ),
    "comm": (),
    "decode": (
        "BatchDecodeWithPagedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "fast_decode_plan",
        "single_decode_with_kv_cache",
    ),
    "fp4_quantization": (
        "fp4_quantize",
        "nvfp4_quantize",
        "mxfp4_quantize",
        "nvfp4_block_scale_interleave",
        "SfLayout",
    ),
    "fused_moe": (),
    "gemm": ("SegmentGEMMWrapper", "bmm_bf16", "bmm_fp8", "mm_bf16", "mm_fp4"),
    "jit": (),
    "mla": ("BatchMLAPagedAttentionWrapper",),
    "norm": (
        "fused_add_rmsnorm",
        "fused_add_rmsnorm_quant",
        "gemma_fused_add_rmsnorm",
        "gemma_rmsnorm",
        "layernorm",
        "rmsnorm",
        "rmsnorm_quant",
    ),
    "page": ("append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens"),
    "pod": ("BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"),
    "prefill": (
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "single_prefill_with_kv_cache",
        "single_prefill_with_kv_cache_return_lse",
    ),
    "quantization": ("packbits", "segment_packbits"),
    "rope": (
        "apply_llama31_rope",
        "apply_llama31_rope_inplace",
        "apply_llama31_rope_pos_ids",
        "apply_llama31_rope_pos_ids_inplace",
        "apply_rope",
        "apply_rope_inplace",
        "apply_rope_pos_ids",
        "apply_rope_pos_ids_inplace",
        "apply_rope_with_cos_sin_cache",
        "apply_rope_with_cos_sin_cache_inplace",
    ),
    "sampling": (
        "chain_speculative_sampling",
        "min_p_sampling_from_probs",
        "sampling_from_logits",
        "sampling_from_probs",
        "softmax",
        "top_k_mask_logits",
        "top_k_renorm_prob",
        "top_k_renorm_probs",
        "top_k_sampling_from_probs",
        "top_k_top_p_sampling_from_logits",
        "top_k_top_p_sampling_from_probs",
        "top_p_renorm_prob",
        "top_p_renorm_probs",
        "top_p_sampling_from_probs",
    ),
    "sparse": ("BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"),
    "testing": (),
    "triton": (),
    "utils": ("has_flashinfer_cubin", "has_flashinfer_jit_cache"),
}

__getattr__, __all__ = attach(__name__, {name: module for module, names in _NAMES.items() for name in (module, *names)})
install(__name__)

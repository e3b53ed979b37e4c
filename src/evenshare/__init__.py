"""evenshare: balanced attention, Stream-K GEMM and W4A16 kernels for LLM inference."""

from evenshare._lazy import attach

__version__ = "0.1.0"

__getattr__, __all__ = attach(
    __name__,
    {
        "AttentionPlan": "attention",
        "BlockSparsity": "attention.sparse",
        "CascadeLevel": "attention",
        "Profile": "report.profile",
        "QuantizedWeight": "quant",
        "Variant": "attention.variants",
        "VariantError": "attention.variants",
        "attention": "attention",
        "block_sparse_attention": "attention.sparse",
        "cascade_attention": "attention",
        "detect_shared_prefixes": "attention",
        "append_paged_kv_cache": "ops",
        "matmul": "gemm",
        "merge_state": "attention",
        "merge_states": "attention",
        "mla_attention": "attention",
        "paged_attention": "attention",
        "plan_attention": "attention",
        "plan_block_sparse_attention": "attention.sparse",
        "plan_cascade": "attention",
        "plan_mla": "attention",
        "profile": "report.profile",
        "quantize": "quant",
        "scaled_matmul": "gemm",
        "w4a16_matmul": "quant",
    },
)

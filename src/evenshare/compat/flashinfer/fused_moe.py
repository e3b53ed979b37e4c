"""FlashInfer's mixtures of experts."""

from evenshare.compat.flashinfer._missing import missing

NAMES = (
    "RoutingMethodType",
    "ActivationType",
    "cutlass_fused_moe",
    "GatedActType",
    "WeightLayout",
    "fused_topk_deepseek",
)

__getattr__ = missing(__name__, NAMES, "evenshare.quant has grouped_w4a16_matmul", ("trtllm_",))

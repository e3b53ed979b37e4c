"""FlashInfer's communication."""

from evenshare.compat.flashinfer._missing import missing

NAMES = (
    "AllReduceStrategyType",
    "AllReduceFusionPattern",
    "AllReduceFusionOp",
)

__getattr__ = missing(
    __name__, NAMES, "evenshare runs on one GPU", ("trtllm_", "vllm_", "create_", "Mnnvl", "MoeAlltoAll")
)

"""FlashInfer's prefill and decode in one launch."""

from evenshare.compat.flashinfer._missing import missing

NAMES = (
    "PODWithPagedKVCacheWrapper",
    "BatchPODWithPagedKVCacheWrapper",
)

__getattr__ = missing(__name__, NAMES, "BatchAttention runs both kinds of requests in one launch")

"""FlashInfer's names for kernels in Triton."""

from evenshare._lazy import attach

__getattr__, __all__ = attach(__name__, {"cascade": "cascade"})

"""What inference needs around attention and linear layers."""

from evenshare._lazy import attach

__getattr__, __all__ = attach(__name__, {"append_paged_kv_cache": "append"})

"""Readers and writers of the ways in which 4- and 8-bit weights lie on disk."""

from evenshare._lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        "Checkpoint": "checkpoint",
        "CheckpointError": "checkpoint",
        "FORMATS": "registry",
        "Format": "format",
        "gguf_blocks": "gguf_write",
        "open_checkpoint": "checkpoint",
        "write_checkpoint": "write",
    },
)

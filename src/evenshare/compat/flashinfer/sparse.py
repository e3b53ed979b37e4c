"""FlashInfer's block-sparse attention."""

from evenshare.compat.flashinfer._missing import missing

NAMES = (
    "BlockSparseAttentionWrapper",
    "VariableBlockSparseAttentionWrapper",
)

__getattr__ = missing(__name__, NAMES, "a mask_mod of evenshare.Variant says which keys a row sees")

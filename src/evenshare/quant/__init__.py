"""Products with 4- and 8-bit weights: the canonical weight, readers of file formats, and the matmul that dequantises as it goes."""

from evenshare._lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        "ExpertWeights": "experts",
        "QuantEmbedding": "linear",
        "QuantLinear": "linear",
        "QuantizedWeight": "weight",
        "concatenate": "weight",
        "grouped_w4a16_matmul": "grouped",
        "load_weights": "storage",
        "open_checkpoint": "formats.checkpoint",
        "prepare": "functions",
        "quantize": "rounding",
        "quantize_codebook": "codebook",
        "quantize_model": "linear",
        "replace_linears": "linear",
        "save_weights": "storage",
        "w4a16_matmul": "functions",
        "w8a16_matmul": "functions",
        "write_checkpoint": "formats.write",
    },
)

"""FlashInfer's 4-bit floats."""

from evenshare.compat.flashinfer._missing import missing

NAMES = (
    "fp4_quantize",
    "nvfp4_quantize",
    "nvfp4_batched_quantize",
    "nvfp4_block_scale_interleave",
    "block_scale_interleave",
    "e2m1_and_ufp8sf_scale_to_float",
    "mxfp4_quantize",
    "mxfp4_dequantize",
    "mxfp4_dequantize_host",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
    "SfLayout",
    "scaled_fp4_grouped_quantize",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
)

__getattr__ = missing(__name__, NAMES, "evenshare.quant has 4-bit weights (QuantizedWeight, quantize_codebook)")

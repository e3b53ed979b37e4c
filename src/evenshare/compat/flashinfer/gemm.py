"""FlashInfer's products."""

from evenshare.compat.flashinfer._missing import missing

NAMES = (
    "SegmentGEMMWrapper",
    "bmm_fp8",
    "mm_fp4",
    "mm_fp8",
    "bmm_bf16",
    "mm_bf16",
    "gemm_fp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise",
    "grouped_mm_bf16",
    "group_gemm_mxfp4_nt_groupwise",
    "tgv_gemm_sm100",
    "prepare_bf16_fp4_weights",
    "mm_bf16_fp4",
)

__getattr__ = missing(__name__, NAMES, "evenshare.matmul and evenshare.w4a16_matmul are the products here")

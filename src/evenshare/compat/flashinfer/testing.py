"""FlashInfer's helpers for benchmarks."""

from evenshare.compat.flashinfer._missing import missing

NAMES = (
    "bench_gpu_time",
    "bench_gpu_time_with_cudagraph",
    "bench_gpu_time_with_cuda_event",
    "bench_gpu_time_with_cupti",
    "attention_flops",
    "attention_tflops_per_sec",
    "attention_tb_per_sec",
    "set_seed",
)

__getattr__ = missing(__name__, NAMES, "benchmarks/ of evenshare measures")

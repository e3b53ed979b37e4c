"""What the card can do at most, measured in the same run as the figures that are held against it."""

from __future__ import annotations

import torch

from benchmarks.timing import time_events

READ_BYTES = 4 << 30  # many times any L2
# (words a block, warps, programs per SM): which of them reads fastest depends on the card. Large blocks keep more loads in flight.
READ_CONFIGS = ((4096, 4, 4), (8192, 4, 4), (8192, 8, 4), (16384, 8, 2), (16384, 8, 4), (32768, 16, 2), (4096, 4, 16))
MATMUL_SIZE = 8192


def measure_ceilings(device: torch.device) -> dict[str, float]:
    """Copy and read bandwidth in TB/s (10^12 bytes, a copy counts both ways) and bf16 matmul in TFLOP/s."""
    with torch.cuda.device(device):
        words = torch.randint(-(2**31), 2**31 - 1, (READ_BYTES // 4,), dtype=torch.int32, device=device)
        read = _read_tb_s(words)
        copy = _copy_tb_s(words)
        del words
        return {"read_tb_s": read, "copy_tb_s": copy, "matmul_bf16_tflop_s": _matmul_tflop_s(device)}


def read_words(words: torch.Tensor, sums: torch.Tensor, block: int, num_warps: int) -> None:
    """sums [P] int32: each of P programs reads every P-th block of `words` int32, whose number is a multiple of `block`."""
    from benchmarks.kernels.read import read_all

    read_all[(sums.numel(),)](words, sums, words.numel() // block, BLOCK=block, num_warps=num_warps)


def _read_tb_s(words: torch.Tensor) -> float:
    num_sms = torch.cuda.get_device_properties(words.device).multi_processor_count
    expected = int(words.sum(dtype=torch.int64)) % 2**32
    best_us = float("inf")
    for block, num_warps, programs_per_sm in READ_CONFIGS:
        sums = torch.zeros(num_sms * programs_per_sm, dtype=torch.int32, device=words.device)
        best_us = min(best_us, time_events(lambda: read_words(words, sums, block, num_warps)).median)  # noqa: B023
        if int(sums.sum(dtype=torch.int64)) % 2**32 != expected:
            raise RuntimeError(f"read ceiling: the kernel with blocks of {block} words did not read every word")
    return words.nbytes / best_us * 1e-6


def _copy_tb_s(words: torch.Tensor) -> float:
    half = words.numel() // 2
    return 2 * half * 4 / time_events(lambda: words[:half].copy_(words[half:])).median * 1e-6


def _matmul_tflop_s(device: torch.device) -> float:
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * MATMUL_SIZE**3 / time_events(lambda: torch.mm(a, b, out=out)).median * 1e-6

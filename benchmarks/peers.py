"""The others, where installed: each function returns a call that does the same work, or None if that peer cannot."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

Call = Callable[[], torch.Tensor]
# Name -> the package that it needs beside torch.
PEERS = {
    "cublas": None,
    "sdpa-cudnn": None,
    "sdpa-flash": None,
    "flex": None,
    "flashinfer": "flashinfer",
    "torch-int4": None,
    "torch-grouped": None,
    "torch-loop": None,
    "humming": "humming",
    "gemlite": "gemlite",
}

TORCH_INT4_ROWS = 64  # with 128, torch 2.11 stops with an illegal memory access, and the process with it


def select_peers(names: Iterable[str] | None) -> tuple[list[str], list[str]]:
    """(peers that can run, those that are not installed), of `names` or of all. Raises ValueError for an unknown name."""
    wanted = list(PEERS if names is None else names)
    unknown = [name for name in wanted if name not in PEERS]
    if unknown:
        raise ValueError(f"peers: got {', '.join(unknown)}, want some of {', '.join(PEERS)}")
    absent = [name for name in wanted if (package := PEERS[name]) and importlib.util.find_spec(package) is None]
    return [name for name in wanted if name not in absent], absent


def matmul(name: str, a: torch.Tensor, b: torch.Tensor) -> Call | None:
    """out [m, n] = a [m, k] b [k, n]."""
    if name != "cublas":
        return None
    out = a.new_empty(a.shape[0], b.shape[1])
    return lambda: torch.mm(a, b, out=out)


def scaled_matmul(
    name: str, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> Call | None:
    """out [m, n] in bf16 of fp8 a [m, k] and b [k, n], k contiguous in both; sums as fast as cuBLAS can, whatever bits it keeps."""
    if name != "cublas":
        return None
    fast = scale_a.dim() == 0 or scale_a.shape[1] == 1  # with scales of blocks torch has no choice
    return lambda: torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)


def attention(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> Call | None:
    """Dense attention: q [B, Sq, Hq, D]; k, v [B, Skv, Hkv, D]; out [B, Sq, Hq, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    if name == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = None
        if causal:
            lag = k.shape[2] - q.shape[2]  # bottom-right
            mask = create_block_mask(
                lambda b, h, i, j: i + lag >= j, None, None, q.shape[2], k.shape[2], device=str(q.device)
            )
        flex = torch.compile(flex_attention, dynamic=False)
        return lambda: flex(q, k, v, block_mask=mask, enable_gqa=gqa).transpose(1, 2)
    if name not in ("sdpa-cudnn", "sdpa-flash") or (causal and q.shape[2] != k.shape[2]):
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = SDPBackend.CUDNN_ATTENTION if name == "sdpa-cudnn" else SDPBackend.FLASH_ATTENTION

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)
        return y.transpose(1, 2)

    return run


def paged_decode(
    name: str,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    last_page_len: torch.Tensor,
) -> Call | None:
    """One query token a request over NHD pages; metadata on the host."""
    if name != "flashinfer":
        return None
    import flashinfer

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    # Its tensor-core kernel is the faster one where several query heads share a KV head.
    shared = q.shape[1] // k_cache.shape[2] > 1
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=shared)
    wrapper.plan(
        kv_indptr,
        kv_indices.to(q.device),
        last_page_len,
        q.shape[1],
        k_cache.shape[2],
        q.shape[2],
        k_cache.shape[1],
        q_data_type=q.dtype,
        kv_data_type=k_cache.dtype,
    )
    return lambda: wrapper.run(q, (k_cache, v_cache))


def paged_mla(
    name: str,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv: torch.Tensor,
    kpe: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    sm_scale: float,
) -> Call | None:
    """Causal latent attention over pages [num_pages, page_size, 512 and 64]; metadata on the host."""
    if name != "flashinfer":
        return None
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(256 << 20, dtype=torch.uint8, device=q_nope.device))
    metadata = (t.to(q_nope.device) for t in (qo_indptr, kv_indptr, kv_indices, kv_lens))
    heads, dims = q_nope.shape[1], (q_nope.shape[2], q_pe.shape[2])
    wrapper.plan(*metadata, heads, *dims, ckv.shape[1], True, sm_scale, q_nope.dtype, ckv.dtype)
    return lambda: wrapper.run(q_nope, q_pe, ckv, kpe)


def w4a16(
    name: str, x: torch.Tensor, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, group_size: int
) -> Call | None:
    """y [m, n] = x [m, k] Wᵀ. weight: W [n, k] in the dtype of x; codes uint8 [n, k], scales [n, k / group_size]: W in symmetric
    4-bit form, (code - 8) * scale."""
    n, k = weight.shape
    if name == "cublas":  # what the 4-bit product replaces
        return matmul("cublas", x, weight.T)
    if name == "torch-int4":
        if x.shape[0] > TORCH_INT4_ROWS:
            return None
        packed = torch.ops.aten._convert_weight_to_int4pack(pack_high_first(codes), 8)
        scales_and_zeros = torch.stack((scales, torch.zeros_like(scales)), -1).to(x.dtype).transpose(0, 1).contiguous()
        return lambda: torch.ops.aten._weight_int4pack_mm(x, packed, group_size, scales_and_zeros)
    if name == "gemlite":
        from gemlite.core import DType, GemLiteLinear

        kind = DType.BF16 if x.dtype == torch.bfloat16 else DType.FP16
        layer: Any = GemLiteLinear(4, group_size, in_features=k, out_features=n, input_dtype=kind, output_dtype=kind)
        layer.pack(codes, scales.to(x.dtype), torch.full_like(scales, 8, dtype=x.dtype), None)
        return lambda: layer(x)
    if name == "humming":
        from humming.layer import HummingLayer

        layer = HummingLayer(
            shape_n=n, shape_k=k, weight_config={"dtype": "int4", "group_size": group_size}, torch_dtype=x.dtype
        ).to(x.device)
        layer.load_from_unquantized(weight)
        layer.transform()
        layer.prepare_default_kernel_configs()
        return lambda: layer(x)
    return None


def grouped(name: str, x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, bounds: list[int]) -> Call | None:
    """y [m, n]: the rows from bounds[e] to bounds[e + 1] are those of x times weights[e]ᵀ. weights: [num_experts, n, k]. offsets:
    `bounds`, from 0 to m, in int32 on the device."""
    if name == "torch-grouped":
        ends = offsets[1:].contiguous()
        return lambda: torch._grouped_mm(x, weights.mT, offs=ends)
    if name == "torch-loop":
        out = x.new_empty(x.shape[0], weights.shape[1])
        parts = [
            (x[begin:end], weight.T, out[begin:end])
            for weight, begin, end in zip(weights, bounds, bounds[1:], strict=False)
            if begin < end
        ]

        def run() -> torch.Tensor:
            for rows, weight, into in parts:
                torch.mm(rows, weight, out=into)
            return out

        return run
    return None


def pack_high_first(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k / 2]: of two neighbours along k the first lies in the high nibble, as torch's int4 kernel for CUDA has it."""
    return codes[:, ::2] << 4 | codes[:, 1::2]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of `want`; infinite if `got` holds a NaN."""
    error = ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300)).item()
    return math.inf if math.isnan(error) else error

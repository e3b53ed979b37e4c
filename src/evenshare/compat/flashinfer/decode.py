"""FlashInfer's decode: one request, or a batch of a query token (or a few) each over a paged cache."""

from __future__ import annotations

from typing import Any

import torch

from evenshare.attention.variants import Variant
from evenshare.compat.flashinfer import _arguments as arguments
from evenshare.compat.flashinfer._arguments import DType, PagedCache, Scale
from evenshare.compat.flashinfer._wrapper import Wrapper
from evenshare.compat.flashinfer.page import get_seq_lens
from evenshare.compat.flashinfer.prefill import single_prefill_with_kv_cache
from evenshare.device.checks import check_is_tensor

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "get_seq_lens",
    "single_decode_with_kv_cache",
]

# The options that plan() once took by position, after page_size.
POSITIONAL = ("pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type")


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    *,
    variant: Variant | None = None,
) -> Any:
    """Attention of one query token: q [Hq, D]; k, v [kv_len, Hkv, D] (NHD) or [Hkv, kv_len, D] (HND).

    Returns out [Hq, Dv], or (out, base-2 lse float32 [Hq]). Raises as `single_prefill_with_kv_cache`.
    """
    check_is_tensor(q=q)
    if q.dim() != 2:
        raise ValueError(f"q: got shape {tuple(q.shape)}, want [num_qo_heads, head_dim]")
    result = single_prefill_with_kv_cache(
        q.unsqueeze(0), k, v, q_scale, k_scale, v_scale, kv_layout=kv_layout, pos_encoding_mode=pos_encoding_mode,
        sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap, rope_scale=rope_scale,
        rope_theta=rope_theta, return_lse=return_lse, variant=variant,
    )  # fmt: skip
    return (result[0][0], result[1][0]) if return_lse else result[0]


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """Attention of a batch of one query token each (or `q_len_per_req`) over a paged cache."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        """The workspace says on which device to run and is not used: evenshare sizes its own."""
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        self._use_tensor_cores = use_tensor_cores
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, None, None, backend, jit_args)

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional: Any,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        variant: Variant | None = None,
    ) -> None:
        """Take a batch: int32 metadata on the host or on the device, whose values are then never read by the host. No sync.

        indptr [B + 1], indices, last_page_len [B] of 1..page_size. q_len_per_req: query tokens of each request, causal among
        themselves. Raises ValueError, TypeError or NotImplementedError naming the argument.
        """
        if deprecated_positional:
            if len(deprecated_positional) > len(POSITIONAL):
                raise TypeError(
                    f"plan: got {7 + len(deprecated_positional)} arguments by position, want what follows kv_data_type by name"
                )
            defaults = (pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type)
            chosen = (*deprecated_positional, *defaults[len(deprecated_positional) :])
            pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type = chosen
        arguments.check_int32(indptr=indptr, indices=indices, last_page_len=last_page_len)
        if window_right not in (0, -1):
            arguments.refuse("window_right", window_right, "0")
        if not isinstance(q_len_per_req, int) or q_len_per_req < 1:
            raise ValueError(f"q_len_per_req: got {q_len_per_req!r}, want 1 or more")
        batch = indptr.shape[0] - 1
        self._check_batch("indptr", batch)
        if data_type is not None:
            q_data_type, kv_data_type = data_type, kv_data_type or data_type
        qo_indptr = None
        if q_len_per_req > 1:
            qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=indptr.device) * q_len_per_req
        names = ("kv_indptr", "kv_indices", "last_page_len")
        buffers = "_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf"
        metadata = self._keep(
            (None, *(getattr(self, name) for name in buffers)),
            qo_indptr,
            indptr,
            indices,
            last_page_len,
            batch * q_len_per_req,
            page_size,
        )
        assert metadata[1] is not None
        self._plan(
            qo_indptr=metadata[0], kv_indptr=metadata[1], kv_indices=metadata[2], last_page_len=metadata[3],
            num_rows=batch * q_len_per_req, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim,
            head_dim_vo=None, page_size=page_size, custom_mask=None, packed_custom_mask=None, causal=q_len_per_req > 1,
            pos_encoding_mode=pos_encoding_mode, sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
            rope_scale=rope_scale, rope_theta=rope_theta, q_data_type=q_data_type or "float16", kv_data_type=kv_data_type,
            o_data_type=o_data_type, fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv, variant=variant,
        )  # fmt: skip
        self._q_len_per_req = q_len_per_req
        if not self._use_cuda_graph:
            for buffer, name in zip(buffers, names, strict=True):
                setattr(self, buffer, self._engine.metadata[name])

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """q [B, Hq, D] and a cache [pages, 2, ...] or (k, v) -> out [B, Hq, Dv], or (out, base-2 lse float32 [B, Hq]).

        q_scale, k_scale, v_scale: numbers or tensors; with 16-bit keys they multiply scores and output. sinks: [Hq].
        """
        arguments.check_no_jit(None, args)
        arguments.only_default(
            kv_cache_sf=kv_cache_sf, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor
        )
        if q_len_per_req is not None and q_len_per_req != self._q_len_per_req:
            raise ValueError(f"q_len_per_req: got {q_len_per_req}, want {self._q_len_per_req}, as in plan()")
        k, v = arguments.split_cache(paged_kv_cache, self._kv_layout)
        return self._engine.run(
            q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=return_lse,
            window_left=window_left, sinks=sinks,
        )  # fmt: skip

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: PagedCache, *args: Any, **kwargs: Any) -> Any:
        return self.run(q, paged_kv_cache, *args, return_lse=True, **kwargs)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        pos_encoding_mode: str = "NONE",
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """The older form, whose options come with the call instead of the plan."""
        causal = self._q_len_per_req > 1
        self._override(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **{**kwargs, "return_lse": True})


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The decode wrapper in CUDA graph mode."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    *args: Any,
    global_override_indptr_cpu: torch.Tensor | None = None,
    **kwargs: Any,
) -> None:
    """`self.plan(...)`, which is fast. global_override_indptr_cpu: indptr on the host; nothing here needs it."""
    self.plan(*args, **kwargs)

"""FlashInfer's POD: prefill and decode requests of one step (arXiv 2410.18038). Here they are two launches."""

from __future__ import annotations

from typing import Any

import torch

from evenshare.compat.flashinfer import _arguments as arguments
from evenshare.compat.flashinfer._arguments import DType, PagedCache, Scale
from evenshare.compat.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from evenshare.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache


class PODWithPagedKVCacheWrapper:
    """One prefill request over dense keys beside a decode batch over pages."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        jit_args: Any = None,
        *,
        backend: str = "auto",
    ) -> None:
        self._backend = backend
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, False, paged_kv_indptr_buffer, paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer, backend, jit_args,
        )  # fmt: skip

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any = None) -> None:
        """evenshare sizes its own workspace."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Take the decode requests' batch, as `BatchDecodeWithPagedKVCacheWrapper.plan`."""
        self._decode.plan(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            pos_encoding_mode=pos_encoding_mode, window_left=window_left, q_data_type=q_data_type, kv_data_type=kv_data_type,
            data_type=data_type, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip

    begin_forward = plan

    def run(
        self,
        q_p: torch.Tensor,
        k_p: torch.Tensor,
        v_p: torch.Tensor,
        q_d: torch.Tensor,
        paged_kv_cache_d: PagedCache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: torch.Tensor | None = None,
        packed_custom_mask_d: torch.Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: Any,
    ) -> tuple[Any, Any]:
        """(out of q_p [n, Hq, D], out of q_d [B, Hq, D]), each with its base-2 lse if asked.

        The decode options are those of plan(); what is given here in their place has to agree. Scales are the decode batch's.
        """
        arguments.check_no_jit(None, args)
        arguments.only_default(custom_mask_d=custom_mask_d, packed_custom_mask_d=packed_custom_mask_d)
        decode = self._decode
        planned = {"pos_encoding_mode_d": decode._pos_encoding_mode, "sm_scale_d": decode._sm_scale}
        given = {"pos_encoding_mode_d": pos_encoding_mode_d, "sm_scale_d": sm_scale_d}
        for name, default in (("pos_encoding_mode_d", "NONE"), ("sm_scale_d", None)):
            if given[name] != default and given[name] != planned[name]:
                raise ValueError(f"{name}: got {given[name]!r} in run(), want {planned[name]!r}, that of plan()")
        prefill = single_prefill_with_kv_cache(
            q_p, k_p, v_p, custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p, causal=causal_p,
            kv_layout=kv_layout_p, pos_encoding_mode=pos_encoding_mode_p, sm_scale=sm_scale_p, window_left=window_left_p,
            rope_scale=rope_scale_p, rope_theta=rope_theta_p, return_lse=return_lse_p, backend=self._backend,
        )  # fmt: skip
        window = window_left_d if window_left_d >= 0 else None
        decoded = decode.run(
            q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse_d, window_left=window
        )  # fmt: skip
        return prefill, decoded

    forward = run

    def end_forward(self) -> None:
        """Nothing to do."""


class BatchPODWithPagedKVCacheWrapper:
    """A prefill batch and a decode batch, both over pages."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        self._parts = tuple(
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, backend=backend) for _ in range(2)
        )

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any = None) -> None:
        """evenshare sizes its own workspace."""

    def plan(
        self,
        qo_indptr_p: torch.Tensor,
        kv_indptr_p: torch.Tensor,
        kv_indices_p: torch.Tensor,
        last_page_len_p: torch.Tensor,
        qo_indptr_d: torch.Tensor,
        kv_indptr_d: torch.Tensor,
        kv_indices_d: torch.Tensor,
        last_page_len_d: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Take both batches, each as `BatchPrefillWithPagedKVCacheWrapper.plan`; masks of the prefill come with run()."""
        if data_type is not None:
            q_data_type, kv_data_type = data_type, kv_data_type or data_type
        self._sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        self._options: dict[str, Any] = {
            "pos_encoding_mode": pos_encoding_mode, "window_left": window_left, "q_data_type": q_data_type,
            "kv_data_type": kv_data_type, "sm_scale": sm_scale, "rope_scale": rope_scale, "rope_theta": rope_theta,
        }  # fmt: skip
        self._prefill_batch = qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p
        self._causal = False
        prefill, decode = self._parts
        prefill.plan(*self._prefill_batch, *self._sizes, **self._options)
        decode.plan(qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d, *self._sizes, **self._options)

    begin_forward = plan

    def run(
        self,
        q_p: torch.Tensor,
        paged_kv_cache_p: PagedCache,
        q_d: torch.Tensor,
        paged_kv_cache_d: PagedCache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> tuple[Any, Any]:
        """(out of q_p, out of q_d), each with its base-2 lse if asked. The scales are those of both caches."""
        prefill, decode = self._parts
        masked = custom_mask_p is not None or packed_custom_mask_p is not None
        if masked or causal_p != self._causal:
            prefill.plan(
                *self._prefill_batch, *self._sizes, custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p,
                causal=causal_p, **self._options,
            )  # fmt: skip
            self._causal = causal_p
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "return_lse": return_lse}
        outputs = prefill.run(q_p, paged_kv_cache_p, **scales), decode.run(q_d, paged_kv_cache_d, **scales)
        if masked:  # the next run without a mask plans anew
            prefill.plan(*self._prefill_batch, *self._sizes, causal=causal_p, **self._options)
        return outputs

    forward = run

    def end_forward(self) -> None:
        """Nothing to do."""

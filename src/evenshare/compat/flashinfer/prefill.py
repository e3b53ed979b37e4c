"""FlashInfer's prefill: one request, or a batch over pages or ragged keys, with masks of any kind."""

from __future__ import annotations

import threading
from functools import lru_cache, partial
from typing import Any

import torch

from evenshare.attention.variants import Variant
from evenshare.compat.flashinfer import _arguments as arguments
from evenshare.compat.flashinfer._arguments import DType, PagedCache, Scale
from evenshare.compat.flashinfer._wrapper import Wrapper
from evenshare.device.checks import check_is_tensor


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: Scale = None,
    scale_k: Scale = None,
    scale_v: Scale = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    *,
    variant: Variant | None = None,
) -> Any:
    """Attention of one request: q [qo_len, Hq, D]; k, v [kv_len, Hkv, D] (NHD) or [Hkv, kv_len, D] (HND).

    custom_mask: bool [qo_len, kv_len], or packed_custom_mask, its bits (`packbits`, little); either takes the place of `causal`.
    scale_q, scale_k, scale_v: of q, k and v, numbers or tensors; k_scale and v_scale are other names of two of them.
    Returns out [qo_len, Hq, Dv], or (out, lse) with a base-2 lse, float32 [qo_len, Hq]. Raises ValueError, TypeError or
    NotImplementedError naming the argument.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(**{name: tensor})
        if tensor.dim() != 3:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want three dimensions")
    arguments.only_default(kv_cache_sf=kv_cache_sf)
    if arguments.check_kv_layout(kv_layout) == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    if custom_mask is not None:
        check_is_tensor(custom_mask=custom_mask)
        if custom_mask.numel() != q.shape[0] * k.shape[0]:
            raise ValueError(f"custom_mask: got shape {tuple(custom_mask.shape)}, want [{q.shape[0]}, {k.shape[0]}]")
        custom_mask = custom_mask.reshape(-1)
    # On the device at once: a CUDA graph can capture that.
    qo_indptr, kv_indptr = (torch.arange(2, dtype=torch.int32, device=q.device) * t.shape[0] for t in (q, k))
    wrapper = _single_wrapper(q.device, backend)
    wrapper._plan(
        qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=None, last_page_len=None, num_rows=q.shape[0],
        num_qo_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim_qk=q.shape[2], head_dim_vo=v.shape[2], page_size=0,
        custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, causal=causal, pos_encoding_mode=pos_encoding_mode,
        sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap, rope_scale=rope_scale,
        rope_theta=rope_theta, q_data_type=q.dtype, kv_data_type=k.dtype, o_data_type=o_dtype, fixed_split_size=None,
        disable_split_kv=False, variant=variant,
    )  # fmt: skip
    return wrapper.run(
        q,
        k,
        v,
        q_scale=scale_q,
        k_scale=arguments.times(scale_k, k_scale),
        v_scale=arguments.times(scale_v, v_scale),
        return_lse=return_lse,
    )


def _single_wrapper(device: torch.device, backend: str) -> BatchPrefillWithRaggedKVCacheWrapper:
    """One for each stream, whose launches alone may share its plans, and for each thread; a graph under capture gets its own."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    make = _single_wrappers.__wrapped__ if stream and torch.cuda.is_current_stream_capturing() else _single_wrappers
    return make(device, backend, stream, threading.get_ident())


@lru_cache(maxsize=8)
def _single_wrappers(
    device: torch.device, backend: str, stream: int, thread: int
) -> BatchPrefillWithRaggedKVCacheWrapper:
    return BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, dtype=torch.uint8, device=device), backend=backend)


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Attention of a ragged batch of queries over a paged cache."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        """The workspace says on which device to run and is not used: evenshare sizes its own."""
        self._qo_indptr_buf, self._paged_kv_indptr_buf = qo_indptr_buf, paged_kv_indptr_buf
        self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = paged_kv_indices_buf, paged_kv_last_page_len_buf
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, buffers, custom_mask_buf, mask_indptr_buf, backend, jit_args
        )  # fmt: skip

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        *,
        variant: Variant | None = None,
    ) -> None:
        """Take a batch: int32 metadata on the host or on the device, whose values are then never read by the host. No sync.

        qo_indptr [B + 1], paged_kv_indptr [B + 1], paged_kv_indices, paged_kv_last_page_len [B] of 1..page_size.
        fixed_split_size, disable_split_kv: a request's bits then do not depend on the batch's rest; a split's size is evenshare's.
        Raises ValueError, TypeError or NotImplementedError naming the argument.
        """
        arguments.check_int32(
            qo_indptr=qo_indptr,
            paged_kv_indptr=paged_kv_indptr,
            paged_kv_indices=paged_kv_indices,
            paged_kv_last_page_len=paged_kv_last_page_len,
        )
        arguments.only_default(
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
        )
        self._check_batch("qo_indptr", qo_indptr.shape[0] - 1)
        num_rows = int(qo_indptr[-1]) if qo_indptr.device.type == "cpu" else None
        buffers = "_qo_indptr_buf", "_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf"
        metadata = self._keep(
            tuple(getattr(self, name) for name in buffers),
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_rows,
            page_size,
        )
        assert metadata[1] is not None
        self._plan(
            qo_indptr=metadata[0], kv_indptr=metadata[1], kv_indices=metadata[2], last_page_len=metadata[3],
            num_rows=num_rows,
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo,
            page_size=page_size, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, causal=causal,
            pos_encoding_mode=pos_encoding_mode, sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
            rope_scale=rope_scale, rope_theta=rope_theta, q_data_type=q_data_type, kv_data_type=kv_data_type,
            o_data_type=o_data_type, fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv, variant=variant,
        )  # fmt: skip
        if not self._use_cuda_graph:
            for name in buffers:
                setattr(self, name, self._engine.metadata[_ENGINE_NAMES[name]])

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
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """q [nnz, Hq, D] and a cache [pages, 2, ...] or (k, v) -> out [nnz, Hq, Dv], or (out, base-2 lse float32 [nnz, Hq]).

        q_scale, k_scale, v_scale: numbers or tensors; with 16-bit keys they multiply scores and output. sinks: [Hq].
        """
        arguments.check_no_jit(None, args)
        arguments.only_default(
            kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            uses_spcompress=uses_spcompress,
        )
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
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        self._override(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **{**kwargs, "return_lse": True})


_ENGINE_NAMES = {
    "_qo_indptr_buf": "qo_indptr",
    "_paged_kv_indptr_buf": "kv_indptr",
    "_kv_indptr_buf": "kv_indptr",
    "_paged_kv_indices_buf": "kv_indices",
    "_paged_kv_last_page_len_buf": "last_page_len",
}


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Attention of a ragged batch of queries over ragged keys."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        """The workspace says on which device to run and is not used: evenshare sizes its own."""
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr_buf, kv_indptr_buf
        buffers = {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf}
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, buffers, custom_mask_buf, mask_indptr_buf, backend, jit_args
        )  # fmt: skip

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        *,
        variant: Variant | None = None,
    ) -> None:
        """As `BatchPrefillWithPagedKVCacheWrapper.plan`, with kv_indptr int32 [B + 1] counting keys."""
        arguments.check_int32(qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        arguments.only_default(
            prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr, max_item_len_ptr=max_item_len_ptr,
            v_indptr=v_indptr, o_indptr=o_indptr,
        )  # fmt: skip
        self._check_batch("qo_indptr", qo_indptr.shape[0] - 1)
        num_rows = int(qo_indptr[-1]) if qo_indptr.device.type == "cpu" else None
        buffers = self._qo_indptr_buf, self._kv_indptr_buf, None, None
        metadata = self._keep(buffers, qo_indptr, kv_indptr, None, None, num_rows, 0)
        assert metadata[1] is not None
        self._plan(
            qo_indptr=metadata[0], kv_indptr=metadata[1], kv_indices=None, last_page_len=None,
            num_rows=num_rows, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo, page_size=0, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, causal=causal,
            pos_encoding_mode=pos_encoding_mode, sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
            rope_scale=rope_scale, rope_theta=rope_theta, q_data_type=q_data_type, kv_data_type=kv_data_type,
            o_data_type=o_data_type, fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv, variant=variant,
        )  # fmt: skip
        if not self._use_cuda_graph:
            self._qo_indptr_buf, self._kv_indptr_buf = (
                self._engine.metadata["qo_indptr"],
                self._engine.metadata["kv_indptr"],
            )

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        o_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """q [nnz, Hq, D], k [total_kv, Hkv, D], v [total_kv, Hkv, Dv] -> out [nnz, Hq, Dv], or (out, base-2 lse [nnz, Hq])."""
        arguments.check_no_jit(None, args)
        arguments.only_default(kv_cache_sf=kv_cache_sf)
        if not arguments.is_one(o_scale):
            arguments.refuse("o_scale", o_scale, "None")
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        return self._engine.run(
            q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=return_lse
        )

    def run_return_lse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.run(q, k, v, *args, return_lse=True, **kwargs)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """The older form, whose options come with the call instead of the plan."""
        self._override(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, k, v, return_lse=return_lse)

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **{**kwargs, "return_lse": True})

"""FlashInfer's cascade: merging attention states, and attention over several levels of a cache that requests share."""

from __future__ import annotations

from typing import Any

import torch

from evenshare import attention as engine
from evenshare.compat.flashinfer import _arguments as arguments
from evenshare.compat.flashinfer._arguments import DType, PagedCache
from evenshare.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache
from evenshare.device.checks import check_is_tensor


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(v [n, H, D], s float32 [n, H]) of two sets of keys together; s_a, s_b: base-2 lse. Nothing and nothing is (0, -inf)."""
    check_is_tensor(s_a=s_a, s_b=s_b)
    return engine.merge_state(v_a, s_a.float(), v_b, s_b.float(), 2.0)


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """`merge_state` into v and s; with a mask, bool [n], only the rows where it is True."""
    check_is_tensor(s=s, s_other=s_other)
    if mask is None and s.dtype == torch.float32:
        engine.merge_state(v, s, v_other, s_other.float(), 2.0, out=v, lse_out=s)
        return
    merged_v, merged_s = merge_state(v, s, v_other, s_other)
    if mask is not None:
        check_is_tensor(mask=mask)
        if tuple(mask.shape) != (v.shape[0],):
            raise ValueError(f"mask: got shape {tuple(mask.shape)}, want [{v.shape[0]}], a row of v each")
        chosen = mask != 0
        merged_v = torch.where(chosen[:, None, None], merged_v, v)
        merged_s = torch.where(chosen[:, None], merged_s, s.float())
    v.copy_(merged_v)
    s.copy_(merged_s)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """v [n, L, H, D] and s [n, L, H], L states of each row -> (v [n, H, D], s float32 [n, H])."""
    check_is_tensor(s=s)
    return engine.merge_states(v, s.float(), 2.0)


class MultiLevelCascadeAttentionWrapper:
    """Attention over levels of a cache: what many requests share is read once for all of them."""

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[torch.Tensor] | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        if num_levels < 1:
            raise ValueError(f"num_levels: got {num_levels}, want 1 or more")
        arrays = {
            "qo_indptr_buf": qo_indptr_buf_arr,
            "paged_kv_indptr_buf": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf_arr,
        }
        for name, array in arrays.items():
            if array is not None and len(array) != num_levels:
                raise ValueError(f"{name}_arr: got {len(array)} buffers, want {num_levels}, one for each level")
        self._kv_layout = kv_layout
        self._wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer, kv_layout, use_cuda_graph, backend=backend,
                **{name: None if array is None else array[level] for name, array in arrays.items()},
            )
            for level in range(num_levels)
        ]  # fmt: skip

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Any = None) -> None:
        """evenshare sizes its own workspace."""

    def plan(
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Each level's batch, from the most shared keys to the requests' own; `causal` is for the last level. No sync.

        A level does not know how many keys come before or after it, so a window and positions are wanted only with one level.
        """
        levels = len(self._wrappers)
        arrays = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        for name, array in arrays.items():
            if len(array) != levels:
                raise ValueError(f"{name}: got {len(array)} tensors, want {levels}, one for each level")
        if levels > 1:
            if window_left is not None and window_left >= 0:
                arguments.refuse("window_left", window_left, "-1 with several levels")
            if pos_encoding_mode != "NONE":
                arguments.refuse("pos_encoding_mode", pos_encoding_mode, "'NONE' with several levels")
        for level, (wrapper, *metadata) in enumerate(zip(self._wrappers, *arrays.values(), strict=True)):
            wrapper.plan(
                *metadata, num_qo_heads, num_kv_heads, head_dim, page_size, causal=causal and level == levels - 1,
                pos_encoding_mode=pos_encoding_mode, sm_scale=sm_scale, window_left=window_left,
                logits_soft_cap=logits_soft_cap, rope_scale=rope_scale, rope_theta=rope_theta, q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )  # fmt: skip

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: PagedCache) -> torch.Tensor:
        """q [nnz, Hq, D] and the cache of all levels -> out [nnz, Hq, D]."""
        first, *others = self._wrappers
        if not others:
            return first.run(q, paged_kv_cache)
        out, lse = first.run(q, paged_kv_cache, return_lse=True)
        for wrapper in others:
            merge_state_in_place(out, lse, *wrapper.run(q, paged_kv_cache, return_lse=True))
        return out

    forward = run

    def end_forward(self) -> None:
        """Nothing to do."""


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """Ragged queries over keys that all requests share, dense, and their own in pages. Deprecated: `MultiLevelCascade...`."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        self._kv_layout = kv_layout
        self._unique = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, backend=backend)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any = None) -> None:
        """evenshare sizes its own workspace."""

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Take a batch, as the paged prefill wrapper's plan(); what is computed is q's dtype."""
        self._batch = (
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size
        )  # fmt: skip
        self._options: tuple[Any, ...] | None = None

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: PagedCache,
        causal: bool = False,
        allow_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """q [nnz, Hq, D]; k_shared, v_shared [n, Hkv, D] (NHD) or [Hkv, n, D] (HND); `causal` is among the requests' own keys."""
        k, _ = arguments.split_cache(unique_kv_cache, self._kv_layout)
        options = (causal, sm_scale, q.dtype, k.dtype)
        if options != self._options:
            self._unique.plan(*self._batch, causal=causal, sm_scale=sm_scale, q_data_type=q.dtype, kv_data_type=k.dtype)
            self._options = options
        out, lse = self._unique.run(q, unique_kv_cache, return_lse=True)
        shared = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._kv_layout, sm_scale=sm_scale, return_lse=True, backend=self._unique._backend
        )  # fmt: skip
        merge_state_in_place(out, lse, *shared)
        return out

    def end_forward(self) -> None:
        """Nothing to do."""


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """One query token for each request, likewise. Deprecated: `MultiLevelCascadeAttentionWrapper`."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        self._wrapper = BatchPrefillWithSharedPrefixPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, backend=backend
        )

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any = None) -> None:
        """evenshare sizes its own workspace."""

    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: DType = "float16",
    ) -> None:
        """Take a batch, as the decode wrapper's plan(); what is computed is q's dtype."""
        arguments.check_int32(unique_kv_indptr=unique_kv_indptr)
        qo_indptr = torch.arange(unique_kv_indptr.shape[0], dtype=torch.int32, device=unique_kv_indptr.device)
        self._wrapper.begin_forward(
            qo_indptr, unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim,
            page_size,
        )  # fmt: skip

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: PagedCache,
        allow_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """q [B, Hq, D]; k_shared, v_shared [n, Hkv, D] (NHD) or [Hkv, n, D] (HND)."""
        return self._wrapper.forward(q, k_shared, v_shared, unique_kv_cache, sm_scale=sm_scale)

    def end_forward(self) -> None:
        """Nothing to do."""

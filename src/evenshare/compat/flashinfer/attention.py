"""FlashInfer's persistent attention, which is nearest to what evenshare does everywhere: one launch for any mixture of requests."""

from __future__ import annotations

from typing import Any

import torch

from evenshare.attention.variants import Variant
from evenshare.compat.flashinfer import _arguments as arguments
from evenshare.compat.flashinfer._arguments import DType, PagedCache, Scale
from evenshare.compat.flashinfer._wrapper import Wrapper
from evenshare.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper


class BatchAttention(Wrapper):
    """Attention of a batch of prefill and decode requests over a paged cache."""

    def __init__(
        self, kv_layout: str = "NHD", device: str | torch.device = "cuda", *, backend: str | None = None
    ) -> None:
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        workspace = torch.empty(0, dtype=torch.uint8, device=device)
        super().__init__(workspace, kv_layout, False, {}, None, None, backend or "auto", None)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType = torch.bfloat16,
        use_profiler: bool = False,
        *,
        variant: Variant | None = None,
    ) -> None:
        """Take a batch: int32 qo_indptr [B + 1], kv_indptr [B + 1], kv_indices, kv_len_arr [B], on the host or the device. No sync.

        use_profiler: evenshare.profile records what the workers of an evenshare plan do.
        """
        arguments.check_int32(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)
        if use_profiler:
            arguments.refuse("use_profiler", use_profiler, "False and evenshare.profile")
        # Lengths as pages and the rest on the last one: 1..page_size, of a request without keys whatever its pages say.
        pages = (kv_len_arr + page_size - 1) // page_size
        last_page_len = torch.where(kv_len_arr > 0, kv_len_arr - (pages - 1) * page_size, 0)
        num_rows = int(qo_indptr[-1]) if qo_indptr.device.type == "cpu" else None
        self._plan(
            qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, last_page_len=last_page_len, num_rows=num_rows,
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo,
            page_size=page_size, custom_mask=None, packed_custom_mask=None, causal=causal, pos_encoding_mode="NONE",
            sm_scale=sm_scale, window_left=-1, logits_soft_cap=logits_soft_cap, rope_scale=None, rope_theta=None,
            q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=None, fixed_split_size=None,
            disable_split_kv=False, variant=variant,
        )  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        kv_cache: PagedCache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [nnz, Hq, Dv], base-2 lse float32 [nnz, Hq]), always both. logits_soft_cap: 0 takes that of plan()."""
        arguments.only_default(profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        k, v = arguments.split_cache(kv_cache, self._kv_layout)
        return self._engine.run(
            q,
            k,
            v,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
            return_lse=True,
            logits_soft_cap=logits_soft_cap,
        )


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """The paged prefill wrapper, whose run() takes the sinks [Hq] after the cache."""

    def __init__(self, float_workspace_buffer: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        for name in ("pos_encoding_mode", "use_fp16_qk_reduction", "q_data_type", "kv_data_type", "o_data_type", "head_dim_qk",
                     "head_dim_vo", "window_left"):  # fmt: skip
            kwargs.pop(name, None)  # what FlashInfer compiles for; plan() says it again
        super().__init__(float_workspace_buffer, *args, **kwargs)

    def run(self, q: torch.Tensor, paged_kv_cache: PagedCache, *args: Any, **kwargs: Any) -> Any:
        """As the base's; args: the sinks, and then sm_scale, which has to be that of plan()."""
        if args:
            kwargs.setdefault("sinks", args[0])
            engine_scale = self._engine.options.sm_scale if self._engine.options is not None else None
            if len(args) > 1 and args[1] is not None and args[1] != engine_scale:
                raise ValueError(f"sm_scale: got {args[1]} in run(), want {engine_scale}, that of plan()")
        return super().run(q, paged_kv_cache, **kwargs)

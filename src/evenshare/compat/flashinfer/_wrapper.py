"""The base of the wrappers: options, masks, CUDA graph buffers, and what serving engines read from a planned wrapper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from evenshare.attention import variants
from evenshare.attention.variants import Variant
from evenshare.compat.flashinfer import _arguments as arguments
from evenshare.compat.flashinfer._arguments import DType
from evenshare.compat.flashinfer._engine import Engine, Options, checked_on_host, split_policy
from evenshare.compat.flashinfer.quantization import pack_segments
from evenshare.device.checks import check_is_tensor


class Wrapper:
    """What all wrappers share: options, masks, and what serving engines read from a planned wrapper."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        buffers: dict[str, torch.Tensor | None],
        custom_mask_buf: torch.Tensor | None,
        mask_indptr_buf: torch.Tensor | None,
        backend: str,
        jit_args: Any,
    ) -> None:
        check_is_tensor(float_workspace_buffer=float_workspace_buffer)
        arguments.check_no_jit(jit_args)
        self._kv_layout = arguments.check_kv_layout(kv_layout)
        self.device = float_workspace_buffer.device
        self._float_workspace_buffer = float_workspace_buffer
        self._use_cuda_graph = use_cuda_graph
        self._backend = backend
        self._fixed_batch_size = 0
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf
        self._graph_lengths: tuple[torch.Tensor, torch.Tensor] | None = None
        self._graph_mask: Any = None
        self._graph_variant: Variant | None = None
        self._causal, self._window_left, self._logits_soft_cap = False, -1, 0.0
        self._sm_scale: float | None = None
        if use_cuda_graph:
            for name, buffer in buffers.items():
                if buffer is None:
                    raise ValueError(f"{name}: got None, want a buffer when use_cuda_graph is True")
                arguments.check_int32(**{name: buffer})
            self._fixed_batch_size = next(iter(buffers.values())).shape[0] - 1  # type: ignore[union-attr]
        self._engine = Engine(
            self.device,
            kv_layout,
            self._fixed_batch_size if use_cuda_graph else None,
            arguments.engine_backend(backend),
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any = None) -> None:
        """evenshare sizes its own workspace: the buffer only says on which device the wrapper runs."""
        self._float_workspace_buffer = float_workspace_buffer

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """(float_bytes, int_bytes) that the caller has to provide: next to nothing."""
        return 16, 16

    def _override(
        self,
        causal: bool,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> None:
        """The options of forward(), which take the place of those of plan()."""
        options = self._engine.options
        if options is None:
            raise RuntimeError("forward: got no plan, want begin_forward() first")
        arguments.check_pos_encoding_mode(pos_encoding_mode)
        made = options.variant
        if pos_encoding_mode == "ALIBI" and made is None:
            made = arguments.make_variant(None, pos_encoding_mode, options.num_qo_heads, self.device)
        rope = (rope_scale or 1.0, rope_theta or 1e4) if pos_encoding_mode == "ROPE_LLAMA" else None
        if (rope is None) != (options.rope is None):
            raise ValueError(
                f"pos_encoding_mode: got {pos_encoding_mode!r}, want that of begin_forward(): ROPE_LLAMA or not"
            )
        masked = made is not None and made.mask_mod is not None
        self._engine.options = replace(
            options, causal=causal and not masked, window_left=arguments.window_of(window_left),
            logits_soft_cap=logits_soft_cap or 0.0, sm_scale=arguments.resolve_sm_scale(sm_scale, options.head_dim),
            variant=made, rope=rope,
        )  # fmt: skip
        self._causal, self._window_left, self._logits_soft_cap = causal, window_left, logits_soft_cap or 0.0
        self._sm_scale = sm_scale

    def end_forward(self) -> None:
        """Nothing to do."""

    def _check_batch(self, name: str, batch_size: int) -> None:
        if self._use_cuda_graph and batch_size != self._fixed_batch_size:
            raise ValueError(
                f"{name}: got {batch_size} requests, want {self._fixed_batch_size}, those of the buffers in CUDA graph mode"
            )

    def _keep(
        self,
        buffers: tuple[torch.Tensor | None, ...],
        qo_indptr: torch.Tensor | None,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor | None,
        last_page_len: torch.Tensor | None,
        num_rows: int | None,
        page_size: int,
    ) -> tuple[torch.Tensor | None, ...]:
        """(qo_indptr, kv_indptr, kv_indices, last_page_len): in CUDA graph mode the buffers with these values, else as they are."""
        given: tuple[torch.Tensor | None, ...] = (qo_indptr, kv_indptr, kv_indices, last_page_len)
        if not self._use_cuda_graph:
            return given
        # Nothing is written before everything has been checked.
        self._engine.check_rows(num_rows)
        given = qo_indptr, *checked_on_host(qo_indptr, kv_indptr, kv_indices, last_page_len, page_size)
        for buffer, values in zip(buffers, given, strict=True):
            if buffer is not None and values is not None and values.shape[0] > buffer.shape[0]:
                raise ValueError(f"plan: got {values.shape[0]} values for a buffer of {buffer.shape[0]}, want no more")
        kept = []
        for buffer, values in zip(buffers, given, strict=True):
            if buffer is None or values is None:
                kept.append(None if values is None else values.to(self.device, non_blocking=True))
                continue
            if values.data_ptr() != buffer.data_ptr():
                buffer[: values.shape[0]].copy_(values, non_blocking=True)
            kept.append(buffer)
        return tuple(kept)

    def _plan(
        self,
        *,
        qo_indptr: torch.Tensor | None,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor | None,
        last_page_len: torch.Tensor | None,
        num_rows: int | None,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None,
        page_size: int,
        custom_mask: torch.Tensor | None,
        packed_custom_mask: torch.Tensor | None,
        causal: bool,
        pos_encoding_mode: str,
        sm_scale: float | None,
        window_left: int,
        logits_soft_cap: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
        q_data_type: DType,
        kv_data_type: DType | None,
        o_data_type: DType | None,
        fixed_split_size: int | None,
        disable_split_kv: bool,
        variant: Variant | None,
    ) -> None:
        """Take a batch. num_rows: its query rows, where the host knows them."""
        arguments.check_pos_encoding_mode(pos_encoding_mode)
        q_dtype = arguments.canonical_dtype("q_data_type", q_data_type)
        kv_dtype = q_dtype if kv_data_type is None else arguments.canonical_dtype("kv_data_type", kv_data_type)
        o_dtype = torch.bfloat16 if q_dtype.itemsize == 1 else q_dtype
        if o_data_type is not None:
            o_dtype = arguments.canonical_dtype("o_data_type", o_data_type)
        mask_mod = None
        if custom_mask is not None or packed_custom_mask is not None:
            assert qo_indptr is not None
            mask_mod = self._mask(custom_mask, packed_custom_mask, qo_indptr, kv_indptr, last_page_len, page_size)
            causal = False
        if mask_mod is not None and self._graph_variant is not None:
            made: Variant | None = self._graph_variant
        else:
            made = arguments.make_variant(variant, pos_encoding_mode, num_qo_heads, self.device, mask_mod)
            if self._graph_mask is not None:
                self._graph_variant = made
        options = Options(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            head_dim_v=head_dim_qk if head_dim_vo is None else head_dim_vo,
            page_size=page_size,
            causal=causal,
            window_left=arguments.window_of(window_left),
            logits_soft_cap=logits_soft_cap or 0.0,
            sm_scale=arguments.resolve_sm_scale(sm_scale, head_dim_qk),
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            o_dtype=o_dtype,
            variant=made,
            policy=split_policy(fixed_split_size, disable_split_kv),
            rope=(rope_scale or 1.0, rope_theta or 1e4) if pos_encoding_mode == "ROPE_LLAMA" else None,
        )
        self._engine.plan(
            options,
            num_rows,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            last_page_len=last_page_len,
        )
        self._batch_size = kv_indptr.shape[0] - 1
        self._num_qo_heads, self._num_kv_heads, self._page_size = num_qo_heads, num_kv_heads, page_size
        self._causal, self._window_left, self._logits_soft_cap = causal, window_left, logits_soft_cap or 0.0
        self._sm_scale, self._rope_scale, self._rope_theta = sm_scale, rope_scale, rope_theta
        self._pos_encoding_mode = pos_encoding_mode
        self._cached_q_data_type, self._cached_kv_data_type, self._cached_o_data_type = q_dtype, kv_dtype, o_dtype
        self._plan_info: list[int] = []

    def _mask(
        self,
        custom_mask: torch.Tensor | None,
        packed_custom_mask: torch.Tensor | None,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        last_page_len: torch.Tensor | None,
        page_size: int,
    ) -> Any:
        """The mask_mod of a custom mask: in CUDA graph mode always the same one, over buffers."""
        entries = kv_indptr.diff()
        kv_lens = entries
        if last_page_len is not None:
            kv_lens = torch.where(entries > 0, (entries - 1) * page_size + last_page_len, 0)
        qo_lens = qo_indptr.diff()
        indptr = torch.zeros(qo_indptr.shape[0], dtype=torch.int64, device=qo_indptr.device)
        torch.cumsum(qo_lens.long() * kv_lens.to(qo_lens.device), 0, out=indptr[1:])
        if packed_custom_mask is not None:
            check_is_tensor(packed_custom_mask=packed_custom_mask)
            bits = packed_custom_mask.to(self.device, non_blocking=True).flatten()
            byte_indptr = torch.zeros_like(indptr)
            torch.cumsum((indptr.diff() + 7) // 8, 0, out=byte_indptr[1:])
        else:
            assert custom_mask is not None
            check_is_tensor(custom_mask=custom_mask)
            if indptr.device.type == "cpu" and custom_mask.numel() != int(indptr[-1]):
                raise ValueError(
                    f"custom_mask: got {custom_mask.numel()} elements, want {int(indptr[-1])}, the sum of qo_len * kv_len"
                )
            mask = custom_mask.to(self.device, non_blocking=True).flatten() != 0
            bits, byte_indptr = pack_segments(mask, indptr, "little")
        byte_indptr, qo_lens, kv_lens = (t.to(self.device, non_blocking=True) for t in (byte_indptr, qo_lens, kv_lens))
        if not self._use_cuda_graph:
            return variants.packed_mask(bits, byte_indptr, qo_lens, kv_lens)
        if self._custom_mask_buf is None or self._mask_indptr_buf is None:
            raise ValueError(
                "custom_mask: got one in CUDA graph mode without custom_mask_buf and mask_indptr_buf, want both buffers"
            )
        if self._graph_lengths is None:
            self._graph_lengths = torch.empty_like(qo_lens), torch.empty_like(kv_lens)
            self._graph_mask = variants.packed_mask(self._custom_mask_buf, self._mask_indptr_buf, *self._graph_lengths)
        size = min(bits.shape[0], self._custom_mask_buf.shape[0])
        if custom_mask is None and size < bits.shape[0]:
            raise ValueError(
                f"packed_custom_mask: got {bits.shape[0]} bytes, want at most the {size} of custom_mask_buf"
            )
        self._custom_mask_buf[:size].copy_(bits[:size])
        self._mask_indptr_buf[: byte_indptr.shape[0]].copy_(byte_indptr)
        for kept, new in zip(self._graph_lengths, (qo_lens, kv_lens), strict=True):
            kept.copy_(new)
        return self._graph_mask

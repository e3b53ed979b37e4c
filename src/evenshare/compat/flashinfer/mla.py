"""FlashInfer's latent attention over `evenshare.plan_mla`."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch

from evenshare.attention import MLAPlan, plan_mla
from evenshare.attention.tiles import next_power_of_2
from evenshare.compat.flashinfer import _arguments as arguments
from evenshare.compat.flashinfer._arguments import DType
from evenshare.compat.flashinfer._engine import MAX_PLANS, checked_on_host
from evenshare.compat.flashinfer._missing import missing
from evenshare.device.checks import check_is_tensor

NAMES = ("trtllm_batch_decode_with_kv_cache_mla", "xqa_batch_decode_with_kv_cache_mla")
Metadata = dict[str, torch.Tensor]

__getattr__ = missing(__name__, NAMES, "BatchMLAPagedAttentionWrapper takes its place")


class BatchMLAPagedAttentionWrapper:
    """Latent attention of a batch of requests with any number of query tokens over a paged cache of latents."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        """The workspace says on which device to run and is not used. The other tensors: buffers of CUDA graph mode."""
        check_is_tensor(float_workspace_buffer=float_workspace_buffer)
        self.device = float_workspace_buffer.device
        self._use_cuda_graph = use_cuda_graph
        self._backend = arguments.engine_backend(backend)
        self._qo_indptr_buf, self._kv_indptr_buf, self._kv_indices_buf = qo_indptr, kv_indptr, kv_indices
        self._kv_len_arr_buf = kv_len_arr
        self._plans: OrderedDict[Any, MLAPlan] = OrderedDict()
        self._plan: MLAPlan | None = None  # of the batch
        self._options: dict[str, Any] | None = None
        self._buffers: Metadata = {}
        self._max_rows: int | None = None  # in CUDA graph mode, of every plan after the first
        if use_cuda_graph:
            buffers = {
                "qo_indptr": qo_indptr,
                "kv_indptr": kv_indptr,
                "kv_indices": kv_indices,
                "kv_len_arr": kv_len_arr,
            }
            for name, buffer in buffers.items():
                if buffer is None:
                    raise ValueError(f"{name}: got None, want a buffer when use_cuda_graph is True")
                arguments.check_int32(**{name: buffer})
                self._buffers[name] = buffer
            # evenshare counts the keys of the last page.
            self._buffers["last_page_len"] = torch.zeros_like(self._buffers.pop("kv_len_arr"))

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: DType,
        kv_data_type: DType,
        use_profiler: bool = False,
    ) -> None:
        """Take a batch: int32 qo_indptr [B + 1], kv_indptr [B + 1], kv_indices, kv_len_arr [B], on the host or the device. No sync.

        kv_len_arr: keys of each request, on as many pages as kv_indptr gives it. Raises ValueError, TypeError or
        NotImplementedError naming the argument.
        """
        arguments.check_int32(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)
        if use_profiler:
            arguments.refuse("use_profiler", use_profiler, "False")
        dtype = arguments.canonical_dtype("q_data_type", q_data_type)
        kv_dtype = arguments.canonical_dtype("kv_data_type", kv_data_type)
        if kv_dtype != dtype:
            arguments.refuse("kv_data_type", kv_dtype, f"{dtype}, that of q")
        if kv_indptr.shape != (kv_len_arr.shape[0] + 1,):
            raise ValueError(f"kv_indptr: got shape {tuple(kv_indptr.shape)}, want [{kv_len_arr.shape[0] + 1}]")
        num_rows = int(qo_indptr[-1]) if qo_indptr.device.type == "cpu" else None
        self._options = {
            "num_heads": num_heads,
            "page_size": page_size,
            "sm_scale": sm_scale,
            "head_dim_ckv": head_dim_ckv,
            "head_dim_kpe": head_dim_kpe,
            "causal": causal,
            "dtype": dtype,
        }
        self._metadata = self._take(qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size, num_rows)
        # A captured graph runs what is planned now, not at the next run().
        rows = self._max_rows if num_rows is None else num_rows
        self._plan = None if rows is None else self._planned(rows)

    def _take(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        page_size: int,
        num_rows: int | None,
    ) -> Metadata:
        """The batch's metadata for `plan_mla`; in CUDA graph mode the buffers, with these values."""
        entries = kv_indptr.diff().to(kv_len_arr.device, non_blocking=True)
        last_page_len = torch.where(entries > 0, kv_len_arr - (entries - 1) * page_size, 0)
        pages, indices, last = checked_on_host(qo_indptr, kv_indptr, kv_indices, last_page_len, page_size)
        assert indices is not None
        assert last is not None
        given = {"qo_indptr": qo_indptr, "kv_indptr": pages, "kv_indices": indices, "last_page_len": last}
        if not self._use_cuda_graph:
            moved = {name: t.to(self.device, non_blocking=True) for name, t in given.items()}
            if num_rows is None:  # until the first run() plans them, values must not change under us
                moved |= {name: t.clone() for name, t in moved.items() if name != "kv_indices"}
            return moved
        for name, t in given.items():
            buffer = self._buffers[name]
            exact = name != "kv_indices"
            if t.shape[0] > buffer.shape[0] or (exact and t.shape[0] != buffer.shape[0]):
                bound = "" if exact else "at most "
                raise ValueError(
                    f"{name}: got {t.shape[0]} values, want {bound}the {buffer.shape[0]} of the buffer in CUDA graph mode"
                )
        for name, t in given.items():
            if t.data_ptr() != self._buffers[name].data_ptr():
                self._buffers[name][: t.shape[0]].copy_(t, non_blocking=True)
        return self._buffers

    def _planned(self, num_rows: int) -> MLAPlan:
        """The plan of the batch; plans are kept by options and rounded capacity."""
        assert self._options is not None
        batch, max_rows = self._metadata["last_page_len"].shape[0], next_power_of_2(num_rows)
        if self._use_cuda_graph:
            self._max_rows = self._max_rows or max_rows
            if num_rows > self._max_rows:
                raise ValueError(
                    f"qo_indptr: got {num_rows} query rows, want at most {self._max_rows}, by the first plan in CUDA graph mode"
                )
            max_rows = self._max_rows
        capacity = {"max_batch": next_power_of_2(batch), "max_q_rows": max_rows}
        key = (*self._options.items(), *capacity.values())
        plan = self._plans.get(key)
        if plan is None:
            plan = plan_mla(
                **self._options, **self._metadata, **capacity, base=2.0, device=self.device, backend=self._backend
            )
            if len(self._plans) >= MAX_PLANS and not self._use_cuda_graph:  # a captured graph may use any of them
                self._plans.popitem(last=False)
        else:
            plan.update(**self._metadata)
        self._plans[key] = plan
        self._plans.move_to_end(key)
        return plan

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: Any = None,
        ckv_scale_arr: Any = None,
        kpe_scale: Any = None,
    ) -> Any:
        """out [nnz, H, C], or (out, lse float32 [nnz, H]) if `return_lse`: to base 2, or natural if `return_lse_base_on_e`.

        q_nope [nnz, H, C], q_pe [nnz, H, R], ckv_cache [pages, page_size, C], kpe_cache [pages, page_size, R].
        """
        if self._options is None:
            raise RuntimeError("run: got no plan, want plan() first")
        arguments.only_default(
            profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table, ckv_scale_arr=ckv_scale_arr
        )
        for name, scale in (("o_scale", o_scale), ("ckv_scale", ckv_scale), ("kpe_scale", kpe_scale)):
            if not arguments.is_one(scale):
                arguments.refuse(name, scale, "None or 1")
        check_is_tensor(q_nope=q_nope)
        if self._plan is None:  # the plan's metadata is on the device: q says how many rows there are at most
            self._plan = self._planned(q_nope.shape[0])
        result = self._plan.run(
            q_nope, q_pe, ckv_cache, kpe_cache, out=out, lse=lse if return_lse else None, return_lse=return_lse
        )
        if return_lse and return_lse_base_on_e:
            result[1].mul_(math.log(2.0))
        return result

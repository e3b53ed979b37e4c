"""evenshare as an attention backend of SGLang (interface of 0.5.23): `--attention-backend evenshare --disable-cuda-graph`."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

import evenshare


def register() -> None:
    """The entry point `sglang.srt.plugins`."""
    add_attention_backend_choices(["evenshare"])
    register_attention_backend("evenshare")(EvenshareBackend)


class EvenshareBackend(AttentionBackend):
    """Eager steps. In a graph the lists would be buffers of fixed size, and `plan.update()` belongs in
    `init_forward_metadata_in_graph`."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.pool = runner.token_to_kv_pool

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """A page is one key, and a request's row of `req_to_token` its page table."""
        if forward_batch.forward_mode.is_idle():
            return
        longest = int(forward_batch.seq_lens_cpu.max())
        self.lists = {
            "block_table": self.req_to_token[forward_batch.req_pool_indices, :longest],
            "kv_lens": forward_batch.seq_lens,
        }
        if not forward_batch.forward_mode.is_decode():
            lens = forward_batch.extend_seq_lens
            self.lists["qo_indptr"] = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
        self.plans: dict[Any, evenshare.AttentionPlan] = {}  # by kind of layer

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Whole prompts, chunks and decodes alike: causal over all keys of a request, those before the chunk too."""
        if layer.is_cross_attention:
            raise NotImplementedError("layer: got cross attention, want causal attention")
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        k_cache, v_cache = (buffer.unsqueeze(1) for buffer in self.pool.get_kv_buffer(layer.layer_id))
        options = {
            "num_qo_heads": layer.tp_q_head_num,
            "num_kv_heads": layer.tp_k_head_num,
            "head_dim": layer.qk_head_dim,
            "head_dim_v": layer.v_head_dim,
            "sm_scale": layer.scaling,
            "logits_soft_cap": layer.logit_cap or None,
            "window_left": layer.sliding_window_size,
            "dtype": q.dtype,
        }
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        plan = self.plans.get(tuple(options.values()))
        if plan is None:
            plan = evenshare.plan_attention(**self.lists, **options, page_size=1, max_q_rows=len(rows))
            self.plans[tuple(options.values())] = plan
        return plan.run(rows, k_cache, v_cache).flatten(1)

    forward_decode = forward_extend

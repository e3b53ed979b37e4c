"""evenshare as an attention backend of vLLM (interface of 0.33): `vllm serve MODEL --attention-backend EVENSHARE`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import register_backend

import evenshare


def register() -> None:
    """The entry point `vllm.general_plugins`."""
    register_backend("EVENSHARE", f"{__name__}.EvenshareBackend")


@dataclass
class Step:
    """What all layers of a step share."""

    num_tokens: int
    slots: torch.Tensor
    lists: dict[str, torch.Tensor]
    causal: bool
    plans: dict[Any, evenshare.AttentionPlan] = field(default_factory=dict)  # by kind of layer


class EvenshareBuilder(AttentionMetadataBuilder[Step]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        batch = common_attn_metadata
        lists = {
            "qo_indptr": batch.query_start_loc[: batch.num_reqs + 1],
            "block_table": batch.block_table_tensor[: batch.num_reqs],
            "kv_lens": batch.seq_lens[: batch.num_reqs],
        }
        return Step(batch.num_actual_tokens, batch.slot_mapping[: batch.num_actual_tokens].int(), lists, batch.causal)


class EvenshareImpl(AttentionImpl[Step]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        if alibi_slopes is not None or attn_type != AttentionType.DECODER:
            raise NotImplementedError("alibi_slopes, attn_type: got one of them, want a decoder without slopes")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale, self.kv_cache_dtype = head_size, scale, kv_cache_dtype
        self.shares_cache = kv_sharing_target_layer_name is not None
        self.kind = {
            "num_qo_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": head_size,
            "sm_scale": scale,
            "window_left": -1 if sliding_window is None else sliding_window - 1,  # vLLM's has the row's own key in it
            "logits_soft_cap": logits_soft_cap or None,
        }

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Step,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # vLLM measures its memory
            return output.zero_()
        step, n = attn_metadata, attn_metadata.num_tokens
        k_cache, v_cache = kv_cache.split(self.head_size, dim=-1)  # each [blocks, heads, block, head size]: HND
        if not self.shares_cache:
            # Slots number the keys of all blocks in turn: to append to them, the cache is one request.
            whole = torch.arange(len(kv_cache), dtype=torch.int32, device=kv_cache.device)[None]
            first = torch.zeros_like(step.slots)
            evenshare.append_paged_kv_cache(
                key[:n], value[:n], first, step.slots, k_cache, v_cache, block_table=whole, kv_layout="HND"
            )
        options = {**self.kind, "causal": step.causal, "page_size": kv_cache.shape[2], "dtype": query.dtype}
        plan = step.plans.get(tuple(options.values()))
        if plan is None:
            plan = evenshare.plan_attention(**step.lists, **options, kv_layout="HND", max_q_rows=n)
            step.plans[tuple(options.values())] = plan
        heads = output.view(-1, self.num_heads, self.head_size)
        plan.run(query[:n].view(-1, self.num_heads, self.head_size), k_cache, v_cache, out=heads[:n])
        return output


class EvenshareBackend(AttentionBackend):
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012 as vLLM declares it

    @staticmethod
    def get_name() -> str:
        return "EVENSHARE"

    @staticmethod
    def get_impl_cls() -> type[EvenshareImpl]:
        return EvenshareImpl

    @staticmethod
    def get_builder_cls() -> type[EvenshareBuilder]:
        return EvenshareBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= 256

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

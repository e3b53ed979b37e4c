"""The parts of vLLM 0.33 and SGLang 0.5.23 that the backends in docs/engines build on: names, signatures, what is abstract."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, TypeVar

import pytest

T = TypeVar("T")


class AttentionType:
    DECODER = "decoder"
    ENCODER = "encoder"


class AttentionBackend(ABC):
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type: ...

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False


class AttentionMetadataBuilder(ABC, Generic[T]):
    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.device = device

    @abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> T: ...


class AttentionImpl(ABC, Generic[T]):
    @abstractmethod
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
    ) -> None: ...

    @abstractmethod
    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: T,
        output: Any,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any: ...


class SGLangBackend:
    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None: ...

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None: ...

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any: ...

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any: ...


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand in for both packages; returns what gets registered."""
    registered: dict[str, Any] = {"choices": []}

    def register_attention_backend(name: str) -> Callable[[Any], Any]:
        return lambda factory: registered.__setitem__(name, factory)

    modules: dict[str, dict[str, Any]] = {
        "vllm.v1.attention.backend": {
            "AttentionBackend": AttentionBackend,
            "AttentionImpl": AttentionImpl,
            "AttentionMetadataBuilder": AttentionMetadataBuilder,
            "AttentionType": AttentionType,
            "CommonAttentionMetadata": object,
        },
        "vllm.v1.attention.backends.registry": {"register_backend": registered.__setitem__},
        "sglang.srt.arg_groups.choices": {"add_attention_backend_choices": registered["choices"].extend},
        "sglang.srt.layers.attention.attention_registry": {"register_attention_backend": register_attention_backend},
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": SGLangBackend},
    }
    for name, content in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            package = ".".join(parts[:depth])
            if package not in sys.modules:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        vars(sys.modules[name]).update(content)
    return registered

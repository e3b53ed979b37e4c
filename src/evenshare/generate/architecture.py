"""What a GGUF file's metadata says of the model: transformers' configuration, and the names of its weights."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evenshare.generate.errors import ModelFileError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# GGUF name of a block's tensor -> transformers' module. All supported architectures share them.
BLOCK_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Architecture:
    """A `general.architecture` and the transformers classes that compute it."""

    module: str
    config_class: str
    model_class: str
    interleaved_rope: bool  # converters write the rows of attn_q and attn_k in pairs (2i, 2i + 1) for this one


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaConfig", "LlamaForCausalLM", interleaved_rope=True),
    "qwen2": Architecture("qwen2", "Qwen2Config", "Qwen2ForCausalLM", interleaved_rope=False),
    "qwen3": Architecture("qwen3", "Qwen3Config", "Qwen3ForCausalLM", interleaved_rope=False),
}


def find_architecture(metadata: Mapping[str, Any]) -> Architecture:
    """Raises ModelFileError if the file's architecture is not supported."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelFileError(f"general.architecture: got {name!r}, want one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def head_counts(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """(query heads, KV heads). Raises ModelFileError if the file does not say."""
    prefix = metadata["general.architecture"]
    heads = metadata.get(f"{prefix}.attention.head_count")
    if not isinstance(heads, int):
        raise ModelFileError(f"{prefix}.attention.head_count: got {heads!r}, want a number")
    return heads, metadata.get(f"{prefix}.attention.head_count_kv", heads)


def model_class(architecture: Architecture) -> type[PreTrainedModel]:
    """transformers' class; imports that model's module only, which is most of the time of importing transformers."""
    module = importlib.import_module(f"transformers.models.{architecture.module}.modeling_{architecture.module}")
    return getattr(module, architecture.model_class)


def make_config(
    architecture: Architecture, metadata: Mapping[str, Any], *, tied: bool, attention_bias: bool
) -> PreTrainedConfig:
    """transformers' configuration of the model in the file.

    tied: the output head is the token embedding. attention_bias: the file has biases for q, k and v.

    Raises ModelFileError if a wanted key is missing or describes something that is not supported.
    """
    prefix = metadata["general.architecture"]

    def want(key: str) -> Any:
        value = metadata.get(f"{prefix}.{key}")
        if value is None:
            raise ModelFileError(f"{prefix}.{key}: not in the file's metadata, want a number")
        return value

    if metadata.get(f"{prefix}.expert_count"):
        raise ModelFileError(
            f"{prefix}.expert_count: got {metadata[f'{prefix}.expert_count']}, want a model without experts"
        )
    heads, kv_heads = head_counts(metadata)
    head_dim = metadata.get(f"{prefix}.attention.key_length", want("embedding_length") // heads)
    if (rotated := metadata.get(f"{prefix}.rope.dimension_count", head_dim)) != head_dim:
        raise ModelFileError(f"{prefix}.rope.dimension_count: got {rotated}, want the head dimension {head_dim}")
    module = importlib.import_module(f"transformers.models.{architecture.module}.configuration_{architecture.module}")
    options: dict[str, Any] = {"attention_bias": True} if attention_bias and architecture.module == "llama" else {}
    return getattr(module, architecture.config_class)(
        vocab_size=metadata.get(f"{prefix}.vocab_size") or len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=want("embedding_length"),
        intermediate_size=want("feed_forward_length"),
        num_hidden_layers=want("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=want("context_length"),
        rms_norm_eps=want("attention.layer_norm_rms_epsilon"),
        rope_parameters=_rope_parameters(prefix, metadata),
        tie_word_embeddings=tied,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
        **options,
    )


def _rope_parameters(prefix: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    theta = float(metadata.get(f"{prefix}.rope.freq_base", 10000.0))
    scaling = metadata.get(f"{prefix}.rope.scaling.type", "none")
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(metadata[f"{prefix}.rope.scaling.factor"])}
    raise ModelFileError(f"{prefix}.rope.scaling.type: got {scaling!r}, want 'none' or 'linear'")

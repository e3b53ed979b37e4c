"""Small GGUF models written by the gguf package, and the same weights in transformers' own classes as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 96, 160, 3, 6, 2, 16, 512
# Small beside what the layers add to it: otherwise a tied model repeats its last token, and a wrong layer would not show.
EMBEDDING_SCALE = 0.1
END = "<|end|>"
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<|end|>{% endfor %}[assistant] "
LINEARS = {
    "attn_q": ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
    "attn_k": ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": ("mlp.gate_proj", FFN, HIDDEN),
    "ffn_up": ("mlp.up_proj", FFN, HIDDEN),
    "ffn_down": ("mlp.down_proj", HIDDEN, FFN),
}


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE: the bytes in GPT-2's spelling, a few words, one special token."""
    spelled = {b: chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
    spare = iter(range(256, 512))
    tokens = [spelled.get(b) or chr(next(spare)) for b in range(256)]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
    return [*tokens, *(merge.replace(" ", "") for merge in merges), END], merges


def write_model(path: Path, architecture: str = "llama", *, tied: bool = True, seed: int = 0) -> PreTrainedModel:
    """Write a random 4-bit model (Q4_1 linears, Q8_0 embedding) and return it dequantised, as transformers computes it (sdpa)."""
    rng = np.random.default_rng(seed)
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_chat_template(TEMPLATE)

    state: dict[str, torch.Tensor] = {}

    def add(name: str, target: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, scale: float) -> None:
        values = (scale * rng.standard_normal(shape)).astype(np.float32)
        if len(shape) == 1:
            values = 1 + values
        raw = quantize(values, kind)
        exact = dequantize(raw, kind).astype(np.float32)
        if architecture == "llama" and target.endswith(("q_proj.weight", "k_proj.weight")):
            exact = np.concatenate([_half_split(head) for head in np.split(exact, shape[0] // HEAD_DIM)])
        writer.add_tensor(name, raw, raw_dtype=kind)
        state[target] = torch.from_numpy(np.ascontiguousarray(exact))

    f32, q8_0, q4_1 = (gguf.GGMLQuantizationType[name] for name in ("F32", "Q8_0", "Q4_1"))
    add("token_embd.weight", "model.embed_tokens.weight", (len(tokens), HIDDEN), q8_0, EMBEDDING_SCALE)
    add("output_norm.weight", "model.norm.weight", (HIDDEN,), f32, 0.1)
    if not tied:
        add("output.weight", "lm_head.weight", (len(tokens), HIDDEN), q8_0, EMBEDDING_SCALE)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        add(f"blk.{i}.attn_norm.weight", f"{layer}.input_layernorm.weight", (HIDDEN,), f32, 0.1)
        add(f"blk.{i}.ffn_norm.weight", f"{layer}.post_attention_layernorm.weight", (HIDDEN,), f32, 0.1)
        for name, (target, n, k) in LINEARS.items():
            add(f"blk.{i}.{name}.weight", f"{layer}.{target}.weight", (n, k), q4_1, 1.5 * k**-0.5)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                bias = (0.1 * rng.standard_normal(n)).astype(np.float32)
                writer.add_tensor(f"blk.{i}.{name}.bias", bias)
                state[f"{layer}.{target}.bias"] = torch.from_numpy(bias)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _oracle(architecture, state, len(tokens), tied)


def _half_split(head: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A head's rows from interleaved pairs (what a llama file holds) to halves (what transformers computes with)."""
    return np.concatenate((head[0::2], head[1::2]))


def _oracle(architecture: str, state: dict[str, torch.Tensor], vocab_size: int, tied: bool) -> PreTrainedModel:
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[architecture]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = model_class(config)
    if tied:
        state = {**state, "lm_head.weight": state["model.embed_tokens.weight"]}
    model.load_state_dict(state)
    model.set_attn_implementation("sdpa")
    return model.eval()


def greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """transformers' own greedy generation."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()

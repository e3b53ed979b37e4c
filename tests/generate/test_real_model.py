"""The main job on the real model: greedy tokens of SmolLM2-135M-Instruct equal those of transformers on dequantised weights."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from evenshare.generate import FetchError, batch_tokens, encode_prompt, fetch_model, load_model, stream_tokens
from tests.generate.gguf_models import LINEARS, greedy

pytestmark = pytest.mark.slow

PROMPTS = (
    "Hi",
    "What is the capital of France?",
    "Write a short poem about the sea and the wind.",
    "Explain in three sentences how a bicycle stays upright, and what its rider does without noticing.",
    "Here is a list of numbers: 17, 4, 23, 8, 42, 15, 16. Sort them, then say which of them are prime, and give the "
    "reason for each. After that, tell a story in which every one of these numbers appears once, in ascending order.",
)
NEW_TOKENS = 64


def oracle(path: str) -> LlamaForCausalLM:
    """The file's weights dequantised to float32 by the gguf package, in transformers' own model with its sdpa attention."""
    targets = {name: target for name, (target, _, _) in LINEARS.items()}
    targets |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name == "token_embd.weight":
            state["model.embed_tokens.weight"] = state["lm_head.weight"] = torch.from_numpy(weight)
        elif tensor.name == "output_norm.weight":
            state["model.norm.weight"] = torch.from_numpy(weight)
        else:
            _, layer, name, _ = tensor.name.split(".")
            if name in ("attn_q", "attn_k"):  # interleaved pairs to halves, head by head
                weight = weight.reshape(-1, 32, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
            state[f"model.layers.{layer}.{targets[name]}.weight"] = torch.from_numpy(np.ascontiguousarray(weight))
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    model.set_attn_implementation("sdpa")
    return model.eval()


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_greedy_tokens_are_those_of_transformers(place: str) -> None:
    try:
        path = fetch_model()
    except FetchError as error:
        pytest.skip(f"the model is not in the cache and cannot be fetched: {error}")
    loaded = load_model(path, place, torch.float32)
    loaded.model.generation_config.eos_token_id = None  # 64 tokens of each, past the answer's end
    prompts = [encode_prompt(loaded.tokenizer, prompt) for prompt in PROMPTS]
    single = [list(stream_tokens(loaded, prompt, max_new_tokens=NEW_TOKENS)) for prompt in prompts]
    batched = batch_tokens(loaded, prompts, max_new_tokens=NEW_TOKENS)
    del loaded
    reference = oracle(str(path))
    want = [greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]
    assert all(len(tokens) == NEW_TOKENS for tokens in want)
    assert single == want
    assert batched == want

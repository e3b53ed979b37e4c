"""`evenshare` and `paged|evenshare` in transformers give what sdpa gives: padding, windows, chunked prefill, shared prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    StaticCache,
)

from evenshare.compat.transformers import enable
from evenshare.compat.transformers.attention import attention_forward, padding_mask

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _enable() -> None:
    enable()
    enable()  # again changes nothing


@pytest.fixture(scope="module", params=["llama", "mistral-window"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    if request.param == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=20)).eval()


def run_as(model: PreTrainedModel, name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    model.set_attn_implementation(name)
    with torch.inference_mode():
        return model(*args, **kwargs).logits


def test_whole_sequence(model: PreTrainedModel) -> None:
    ids = torch.randint(0, 96, (2, 50))
    torch.testing.assert_close(run_as(model, "evenshare", ids), run_as(model, "sdpa", ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(model: PreTrainedModel, side: str) -> None:
    ids, mask = torch.randint(0, 96, (3, 40)), torch.ones(3, 40, dtype=torch.int64)
    for row, length in ((0, 7), (2, 33)):
        mask[row, slice(0, 40 - length) if side == "left" else slice(length, 40)] = 0
    ours, theirs = (run_as(model, name, ids, attention_mask=mask)[mask.bool()] for name in ("evenshare", "sdpa"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_padded_generate(model: PreTrainedModel) -> None:
    ids, mask = torch.randint(0, 96, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    out = {}
    for name in ("evenshare", "sdpa"):
        model.set_attn_implementation(name)
        out[name] = model.generate(ids, **options)
    assert torch.equal(out["evenshare"], out["sdpa"])


def test_tokens_one_by_one(model: PreTrainedModel) -> None:
    ids = torch.randint(0, 96, (1, 45))
    cache = DynamicCache(config=model.config)
    steps = [run_as(model, "evenshare", ids[:, i : i + 1], past_key_values=cache) for i in range(45)]
    torch.testing.assert_close(torch.cat(steps, 1), run_as(model, "sdpa", ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("max_batch_tokens", [256, 24])
def test_continuous_batching(model: PreTrainedModel, max_batch_tokens: int) -> None:
    """24 tokens a step cut the longest prompt into chunks, beside requests that decode; two prompts share their first pages."""
    shared = torch.randint(0, 96, (32,)).tolist()
    prompts = [[*shared, 1, 2, 3], [5], [*shared, 4], torch.randint(0, 96, (70,)).tolist()]
    config = GenerationConfig(max_new_tokens=30, do_sample=False, pad_token_id=0)
    found = {}
    for name in ("paged|evenshare", "paged|sdpa"):
        model.set_attn_implementation(name)
        batching = ContinuousBatchingConfig(block_size=8, num_blocks=128, max_batch_tokens=max_batch_tokens)
        answers = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
        found[name] = [answer.generated_tokens for answer in answers.values()]
    assert len(found["paged|evenshare"]) == 4
    assert found["paged|evenshare"] == found["paged|sdpa"]


def layer(**attributes: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in {"is_causal": True, "layer_idx": 0, **attributes}.items():
        setattr(module, name, value)
    return module


def test_one_token_is_the_general_path() -> None:
    """A decode step on a CPU skips the planner; a window wider than the keys sends the same step through it."""
    query, key, value = torch.randn(1, 6, 1, 16), torch.randn(1, 2, 33, 16), torch.randn(1, 2, 33, 16)
    short = attention_forward(layer(), query, key, value, None, scaling=0.3)[0]
    planned = attention_forward(layer(), query, key, value, None, scaling=0.3, sliding_window=100)[0]
    torch.testing.assert_close(short, planned, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dropout": 0.1}, NotImplementedError, "dropout: got 0.1"),
        ({"s_aux": torch.zeros(6)}, NotImplementedError, "attention sinks"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, ValueError, "attention_mask: got 4 dimensions"),
    ],
)
def test_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    options = {"attention_mask": None, "scaling": 1.0} | change
    with pytest.raises(error, match=message):
        attention_forward(
            layer(), torch.randn(1, 6, 3, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16), **options
        )


def test_fixed_cache_is_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    cache = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(ValueError, match="cache of fixed length"):
        run_as(model, "evenshare", torch.randint(0, 96, (1, 5)), past_key_values=cache)


def test_paged_without_a_paged_cache_is_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    with pytest.raises(ValueError, match=r"got 'paged\|evenshare' outside continuous batching"):
        run_as(model, "paged|evenshare", torch.randint(0, 96, (1, 5)))


def test_mask_of_ones_is_no_mask() -> None:
    assert padding_mask(2, 3, 3, 0, 0, attention_mask=torch.ones(2, 3, dtype=torch.bool)) is None
    assert padding_mask(2, 3, 3) is None

"""Quantised modules and fused layers against the modules that they replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from evenshare.compat.transformers import QuantEmbedding, QuantLinear, enable, replace_linears
from evenshare.compat.transformers.cache import GROWTH, InPlaceCache
from evenshare.compat.transformers.layers import fuse_layers, rms_norm
from evenshare.quant import quantize

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip


def quantised(model_class: Any, config: Any, **mixed: int) -> tuple[nn.Module, nn.Module]:
    """(the model with QuantLinears, the same with dequantised weights in nn.Linear)."""
    torch.manual_seed(0)
    model, plain = model_class(config).eval(), model_class(config).eval()
    plain.load_state_dict(model.state_dict())
    weights = {}
    for name, module in model.model.layers.named_modules():
        if isinstance(module, nn.Linear):
            group_size = mixed.get(name.rsplit(".", 1)[1], 32)
            weights[f"model.layers.{name}"] = quantize(module.weight.detach(), group_size, symmetric=False)
            plain.model.layers.get_submodule(name).weight.data = weights[f"model.layers.{name}"].dequantize()
    replace_linears(model, weights)
    enable()
    model.set_attn_implementation("evenshare")
    return model, plain


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fused_layers(family: str, attention_bias: bool) -> None:
    classes = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}
    model_class, config_class = classes[family]
    model, plain = quantised(model_class, config_class(**SHAPE, attention_bias=attention_bias))
    ids = torch.randint(0, 96, (1, 20))
    with torch.inference_mode():
        want = plain(ids).logits
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-4)
        assert fuse_layers(model)
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-4)
        cache = InPlaceCache(2)
        steps = [model(part, past_key_values=cache).logits for part in ids.split((7, 1, 1, 11), 1)]
    torch.testing.assert_close(torch.cat(steps, 1), want, rtol=1e-4, atol=1e-4)


def test_layers_that_cannot_be_joined_stay() -> None:
    model, plain = quantised(LlamaForCausalLM, LlamaConfig(**SHAPE), v_proj=64)
    layers = list(model.model.layers)
    assert not fuse_layers(model)
    assert list(model.model.layers) == layers
    ids = torch.randint(0, 96, (1, 9))
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)


def test_token_loop_matches_layers_in_bfloat16() -> None:
    """One token, the loop against the same layers one by one: they round at different places, three times a layer."""
    model, _ = quantised(LlamaForCausalLM, LlamaConfig(**SHAPE))
    model.bfloat16()
    assert fuse_layers(model)
    ids, found = torch.randint(0, 96, (1, 30)), []
    for loop in (True, False):
        stack, cache = model.model.layers[0], InPlaceCache(2)
        stack._loop_known = not loop
        with torch.inference_mode():
            steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(30)]
        assert (stack._loop is not None) is loop
        stack._loop = None
        found.append(torch.cat(steps, 1).float())
    error = (found[0] - found[1]).square().mean().sqrt() / found[1].square().mean().sqrt()
    assert error < 4 * torch.finfo(torch.bfloat16).eps


def test_rms_norm() -> None:
    x, weight = 3 * torch.randn(5, 48), torch.randn(48)
    want = (x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight).float()
    torch.testing.assert_close(rms_norm(x, torch.cat((weight, weight)), 1e-5), want, rtol=1e-5, atol=1e-6)


def test_cache_grows_in_place() -> None:
    cache = InPlaceCache(2)
    parts = [torch.randn(2, 3, n, 8) for n in (5, 1, GROWTH, 1, 3 * GROWTH)]
    for i, part in enumerate(parts):
        for layer in range(2):
            keys, values = cache.update(part + layer, -part, layer)
        assert torch.equal(keys, torch.cat(parts[: i + 1], 2) + 1)
        assert torch.equal(values, -torch.cat(parts[: i + 1], 2))
    assert cache.get_seq_length() == sum(part.shape[2] for part in parts)


def test_modules_move_without_changing_codes() -> None:
    weight = quantize(torch.randn(32, 64), 32)
    for module in (QuantLinear(weight), QuantEmbedding(weight, torch.bfloat16)):
        module.half().to("meta")
        assert module.quantized.device.type == "meta"
        assert module.quantized.codes.dtype == torch.uint8


def test_embedding() -> None:
    weight, ids = quantize(torch.randn(40, 64), 32, bits=8), torch.tensor([[3, 39], [0, 3]])
    assert torch.equal(QuantEmbedding(weight, torch.float32)(ids), weight.dequantize()[ids])


def test_replace_linears_names_what_is_wrong() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
    with pytest.raises(KeyError, match="no module of that name"):
        replace_linears(model, {"7": quantize(torch.randn(32, 64), 32)})
    for name, weight in (("1", quantize(torch.randn(32, 64), 32)), ("0", quantize(torch.randn(64, 64), 32))):
        with pytest.raises(ValueError, match=f"weights\\['{name}'\\]: got shape"):
            replace_linears(model, {name: weight})

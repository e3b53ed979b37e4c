"""Quantised checkpoints through transformers' from_pretrained and save_pretrained, on the CPU in float32."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, GPTQConfig
from transformers.quantizers import auto

from evenshare.compat.transformers import disable, enable
from evenshare.quant import QuantLinear, quantize, quantize_codebook
from tests.compat.checkpoints import GROUP_SIZE, Quantise, act_order, write_toy
from tests.generate.gguf_models import greedy

plain = partial(quantize, group_size=GROUP_SIZE)
CHECKPOINTS: dict[str, tuple[str, Quantise]] = {
    "gptq": ("gptq", plain),
    "gptq asymmetric": ("gptq", partial(plain, symmetric=False)),
    "gptq act-order": ("gptq", partial(act_order, symmetric=False)),
    "gptq v2": ("gptq_v2", partial(plain, symmetric=False)),
    "gptq v2 act-order": ("gptq_v2", act_order),
    "gptq 8 bits": ("gptq", partial(plain, bits=8)),
    "awq": ("awq", partial(plain, symmetric=False)),
    "compressed-tensors": ("compressed-tensors", plain),
    "compressed-tensors asymmetric": ("compressed-tensors", partial(plain, symmetric=False, refine=True)),
    "compressed-tensors act-order": ("compressed-tensors", partial(act_order, symmetric=False)),
    "compressed-tensors per channel": ("compressed-tensors", partial(quantize, group_size=-1)),
    "compressed-tensors nvfp4": ("compressed-tensors", partial(quantize_codebook, table="nvfp4")),
    "compressed-tensors mxfp4": ("compressed-tensors", partial(quantize_codebook, table="mxfp4")),
    "hqq": ("hqq", partial(plain, symmetric=False)),
}


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    enable()
    yield
    disable()


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_tokens_are_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    want = write_toy(tmp_path, *CHECKPOINTS[name])
    model = load(tmp_path)
    assert sum(isinstance(module, QuantLinear) for module in model.modules()) == 14
    assert type(model.lm_head) is nn.Linear
    ids = torch.randint(0, 96, (2, 17))
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, want(ids).logits, rtol=1e-4, atol=1e-4)
    prompt = ids[0].tolist()
    tokens = greedy(want, prompt, 24)
    assert greedy(model, prompt, 24) == tokens
    assert len(set(tokens)) > 8  # a model that repeats itself would prove little


@pytest.mark.parametrize("name", ["gptq act-order", "awq", "compressed-tensors asymmetric", "hqq"])
def test_saved_models_load_again(name: str, tmp_path: Path) -> None:
    write_toy(tmp_path / "first", *CHECKPOINTS[name])
    model = load(tmp_path / "first")
    model.save_pretrained(tmp_path / "second")
    first, second = (load_file(tmp_path / folder / "model.safetensors") for folder in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("first", "second")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    ids = torch.randint(0, 96, (1, 9))
    assert torch.equal(load(tmp_path / "second")(ids).logits, model(ids).logits)


def test_biases_and_evenshare_attention(tmp_path: Path) -> None:
    want = write_toy(tmp_path, "gptq", plain, attention_bias=True)
    model = load(tmp_path, attn_implementation="evenshare")
    assert model.model.layers[0].self_attn.q_proj.bias is not None
    ids = torch.randint(0, 96, (1, 17))
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, want(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_body_alone(tmp_path: Path) -> None:
    """AutoModel: names in the files begin with "model.", names in the model do not."""
    want = write_toy(tmp_path, "compressed-tensors", plain)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert isinstance(model.layers[1].mlp.up_proj, QuantLinear)
    ids = torch.randint(0, 96, (1, 9))
    with torch.inference_mode():
        got, expected = model(ids).last_hidden_state, want.model(ids).last_hidden_state
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_dtypes_of_the_files_are_kept(tmp_path: Path) -> None:
    write_toy(tmp_path, "gptq", plain)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    assert (layer.codes.dtype, layer.scales.dtype, model.lm_head.weight.dtype) == (
        torch.uint8, torch.float16, torch.bfloat16,
    )  # fmt: skip


def test_dequantize(tmp_path: Path) -> None:
    want = write_toy(tmp_path, "gptq", act_order)
    model = load(tmp_path)
    model.dequantize()
    assert not any(isinstance(module, QuantLinear) for module in model.modules())
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, want.model.layers[0].mlp.up_proj.weight)


@pytest.mark.skipif(importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors")
@pytest.mark.parametrize("name", ["compressed-tensors", "compressed-tensors asymmetric"])
def test_the_original_loader_reads_the_same_model(name: str, tmp_path: Path) -> None:
    write_toy(tmp_path, *CHECKPOINTS[name])
    ids = torch.randint(0, 96, (1, 9))
    with torch.inference_mode():
        got = load(tmp_path)(ids).logits
        disable()
        original = load(tmp_path)
        assert not any(isinstance(module, QuantLinear) for module in original.modules())
        # It multiplies in the dtype of the scales, float16.
        torch.testing.assert_close(got, original(ids).logits.float(), rtol=2e-2, atol=2e-2 * float(got.abs().max()))


def test_disable_gives_back_what_enable_took() -> None:
    enable()  # a second time
    disable()
    originals = dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    assert originals["gptq"] is GPTQConfig
    assert "modelopt" not in originals
    assert "evenshare" not in auto.AUTO_QUANTIZER_MAPPING
    disable()
    assert originals == auto.AUTO_QUANTIZATION_CONFIG_MAPPING


def test_what_is_not_read_stays_with_transformers() -> None:
    marlin = auto.AutoQuantizationConfig.from_dict({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"})
    assert type(marlin) is GPTQConfig
    with pytest.raises(ValueError, match=r"quantization_config: got .*FP8.*want one of: quant_method gptq"):
        auto.AutoQuantizationConfig.from_dict({"quant_method": "modelopt", "quant_algo": "FP8"})


def change(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    write_toy(tmp_path / "whole", "gptq", plain)
    layer = "model.layers.1.mlp.up_proj"
    edits = {
        r"layer '.*1.mlp.up_proj': got \['g_idx', 'qweight', 'qzeros'\], want \['scales'\] as well": lambda t: t.pop(
            f"{layer}.scales"
        ),
        r"layer '.*1.mlp.up_proj': qzeros: got shape \(2, 3\)": lambda t: t.update(
            {f"{layer}.qzeros": t[f"{layer}.qzeros"][:, :3].contiguous()}
        ),
        r"got a quantised layer 'model.norm', but the model has LlamaRMSNorm": lambda t: t.update(
            {f"model.norm.{part}": t[f"{layer}.{part}"].clone() for part in ("qweight", "qzeros", "scales")}
        ),
    }
    for i, (message, edit) in enumerate(edits.items()):
        folder = tmp_path / str(i)
        shutil.copytree(tmp_path / "whole", folder)
        change(folder, edit)
        with pytest.raises(ValueError, match=message):
            load(folder)

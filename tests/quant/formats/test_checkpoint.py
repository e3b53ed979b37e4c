"""Folders and files: written in every format, opened, read again; what other tools load; errors that say what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from evenshare.quant import QuantizedWeight, quantize
from evenshare.quant.formats import CheckpointError, open_checkpoint, write_checkpoint
from tests.quant.formats.helpers import make_weight, permuted

CONFIG = {"model_type": "llama", "hidden_size": 64}


def make_nvfp4(n: int, k: int) -> QuantizedWeight:
    weight = make_weight(n, k, 16, encoding="e2m1")
    scales = torch.rand(n, k // 16).to(torch.float8_e4m3fn).float() / 3
    return QuantizedWeight(weight.codes, scales, k, 16, encoding="e2m1")


MODELS: dict[str, Callable[[], dict[str, QuantizedWeight]]] = {
    "gptq": lambda: {
        "model.layers.0.q_proj": make_weight(16, 64, 32, zero_form="zeros"),
        "model.layers.0.k_proj": permuted(make_weight(8, 64, 32, zero_form="zeros"), torch.randperm(64) // 32),
    },
    "gptq_v2": lambda: {"model.layers.0.q_proj": make_weight(16, 64, 32), "lm_head": make_weight(8, 64, 32)},
    "awq": lambda: {"model.layers.0.q_proj": make_weight(16, 64, 32), "lm_head": make_weight(8, 64, 32)},
    "compressed-tensors": lambda: {
        "model.layers.0.q_proj": make_weight(10, 64, 32, zero_form="zeros"),
        "model.layers.0.k_proj": make_weight(6, 64, -1, bits=8, dtype=torch.bfloat16),
        "model.layers.0.o_proj": make_nvfp4(4, 64),
    },
    "hqq": lambda: {"model.layers.0.q_proj": make_weight(16, 64, 32, zero_form="zeros")},
    "bitsandbytes": lambda: {"model.layers.0.q_proj": make_weight(16, 64, 64, encoding="nf4", dtype=torch.float32)},
}
OTHERS = {
    "model.embed_tokens.weight": torch.randn(32, 64),
    "model.norm.weight": torch.randn(64),
    "model.layers.0.q_proj.bias": torch.randn(16),
}


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 4096])
@pytest.mark.parametrize("form", list(MODELS))
def test_written_and_opened(tmp_path: Path, form: str, max_shard_bytes: int) -> None:
    weights = MODELS[form]()
    folder = tmp_path / "model"
    write_checkpoint(folder, weights, OTHERS, CONFIG, form, max_shard_bytes=max_shard_bytes)
    assert (folder / "model.safetensors.index.json").exists() == (max_shard_bytes == 4096)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == form
    assert checkpoint.config["hidden_size"] == 64
    assert sorted(checkpoint.layers()) == sorted(weights)
    assert sorted(checkpoint.plain()) == sorted(OTHERS)
    assert sorted(checkpoint.names()) == sorted([*weights, *OTHERS])
    for name, weight in weights.items():
        found = checkpoint.weight(name)
        assert isinstance(found, QuantizedWeight)
        assert torch.equal(found.dequantize(), weight.dequantize())
    for name, tensor in OTHERS.items():
        assert torch.equal(checkpoint.weight(name), tensor)  # type: ignore[arg-type]
    assert checkpoint.config["quantization_config"]["quant_method"] == form.removesuffix("_v2")


def test_shards_hold_no_more_than_asked(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(100) for i in range(7)}
    write_checkpoint(tmp_path, {"layer": make_weight(16, 64, 32)}, tensors, {}, max_shard_bytes=1000)
    files = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert [file.name for file in files] == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    held = {name: file.name for file in files for name in load_file(file)}
    assert index["weight_map"] == held
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert max(sizes) <= 1000
    assert index["metadata"]["total_size"] == sum(sizes)


def test_parts_of_one_tensor_are_written_as_their_own(tmp_path: Path) -> None:
    whole = make_weight(32, 64, 32)
    table = torch.randn(4, 64)
    write_checkpoint(
        tmp_path, {"a": whole.narrow(0, 16), "b": whole.narrow(16, 32)}, {"in.weight": table, "out.weight": table}, {}
    )
    checkpoint = open_checkpoint(tmp_path)
    second = checkpoint.weight("b")
    assert isinstance(second, QuantizedWeight)
    assert torch.equal(second.dequantize(), whole.dequantize()[16:])
    assert torch.equal(checkpoint.tensor("in.weight"), checkpoint.tensor("out.weight"))


@pytest.mark.parametrize(
    ("form", "key"),
    [
        ("compressed-tensors", "ignore"),
        ("awq", "modules_to_not_convert"),
        ("hqq", "skip_modules"),
        ("bitsandbytes", "llm_int8_skip_modules"),
    ],
)
def test_layers_that_stay_are_named(tmp_path: Path, form: str, key: str) -> None:
    name = "model.layers.0.q_proj"
    write_checkpoint(tmp_path, {name: MODELS[form]()[name]}, OTHERS, CONFIG, form, kept=["lm_head"])
    assert open_checkpoint(tmp_path).config["quantization_config"][key] == ["model.embed_tokens", "lm_head"]


def test_nothing_is_written_if_a_weight_does_not_fit(tmp_path: Path) -> None:
    weights = {"good": make_weight(8, 64, 32), "bad": make_weight(12, 64, 32)}
    with pytest.raises(ValueError, match=r"weights\['bad'\]: awq cannot hold it, because its 12 rows are no multiple"):
        write_checkpoint(tmp_path / "model", weights, {}, {}, "awq")
    with pytest.raises(ValueError, match="weights: got group size \\[16, 32\\], want one for all layers"):
        write_checkpoint(tmp_path / "model", {"a": make_weight(8, 64, 32), "b": make_weight(8, 64, 16)}, {}, {}, "awq")
    with pytest.raises(
        ValueError, match="format: got 'mxfp4', want one of gptq, gptq_v2, awq, compressed-tensors, hqq"
    ):
        write_checkpoint(tmp_path / "model", weights, {}, {}, "mxfp4")
    with pytest.raises(ValueError, match="weights: got none"):
        write_checkpoint(tmp_path / "model", {}, {}, {})
    assert not (tmp_path / "model").exists()


class Counted(dict[str, QuantizedWeight]):
    """A mapping that notes what it is asked for."""

    def __init__(self, weights: dict[str, QuantizedWeight]) -> None:
        super().__init__(weights)
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> QuantizedWeight:
        self.asked.append(name)
        return super().__getitem__(name)


def test_with_outlines_weights_are_asked_for_when_they_are_written(tmp_path: Path) -> None:
    weights = {name: make_weight(8, 64, 32) for name in ("a", "b")}
    lazy = Counted(weights)
    write_checkpoint(tmp_path, lazy, {}, {}, outlines={name: weight.to("meta") for name, weight in weights.items()})
    assert lazy.asked == ["a", "b"]
    found = open_checkpoint(tmp_path).weight("b")
    assert isinstance(found, QuantizedWeight)
    assert torch.equal(found.dequantize(), weights["b"].dequantize())


def test_what_fails_half_way_leaves_no_files(tmp_path: Path) -> None:
    outlines = {name: make_weight(8, 64, 32).to("meta") for name in ("a", "b")}
    weights = {"a": make_weight(8, 64, 32), "b": make_weight(12, 64, 32)}
    with pytest.raises(ValueError, match=r"weights\['b'\]: awq cannot hold it, because its 12 rows are no multiple"):
        write_checkpoint(tmp_path, weights, {}, {}, "awq", outlines=outlines, max_shard_bytes=1)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_a_model_is_not_written_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"layer": make_weight(8, 64, 32)}, {}, {})
    with pytest.raises(FileExistsError, match="which holds safetensors already"):
        write_checkpoint(tmp_path, {"layer": make_weight(8, 64, 32)}, {}, {})


def make_folder(
    path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], name: str = "config.json"
) -> Path:
    save_file(tensors, path / "model.safetensors")
    (path / name).write_text(json.dumps(config))
    return path


def test_a_folder_that_is_not_quantised(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_folder(tmp_path, dict(OTHERS), CONFIG))
    assert checkpoint.format == "plain"
    assert checkpoint.layers() == []
    assert sorted(checkpoint.names()) == sorted(OTHERS)
    assert torch.equal(checkpoint.tensor("model.norm.weight"), OTHERS["model.norm.weight"])


@pytest.mark.parametrize(
    ("name", "config", "form"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}, "gptq"),
        (
            "quantize_config.json",
            {"bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
            "gptq_v2",
        ),
        ("quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}, "awq"),
    ],
)
def test_a_configuration_beside(tmp_path: Path, name: str, config: dict[str, Any], form: str) -> None:
    from evenshare.quant.formats.registry import format_named

    weight = make_weight(16, 64, 32, zero_form="zeros")
    tensors = {f"layer.{part}": tensor for part, tensor in format_named(form).write(weight).items()}
    found = open_checkpoint(make_folder(tmp_path, tensors, config, name))
    assert found.format == form
    assert torch.equal(found.weight("layer").dequantize(), weight.dequantize())  # type: ignore[union-attr]


def test_modelopt_and_gpt_oss(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    e4m3 = torch.ones(4, 2).to(torch.float8_e4m3fn)
    tensors = {
        "up.weight": torch.zeros(4, 16, dtype=torch.uint8),
        "up.weight_scale": e4m3,
        "up.input_scale": torch.ones(1),
    }
    tensors["up.weight_scale_2"] = torch.tensor(0.5)
    config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    checkpoint = open_checkpoint(make_folder(tmp_path / "a", tensors, config, "hf_quant_config.json"))
    assert (checkpoint.format, checkpoint.layers(), checkpoint.plain()) == ("modelopt", ["up"], ["up.input_scale"])
    weight = checkpoint.weight("up")
    assert isinstance(weight, QuantizedWeight)
    assert (weight.scales == 0.5).all()

    blocks = {"experts.up_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8), "experts.up_bias": torch.zeros(2, 4)}
    blocks["experts.up_scales"] = torch.full((2, 4, 1), 127, dtype=torch.uint8)
    oss = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    checkpoint = open_checkpoint(make_folder(tmp_path / "b", blocks, oss))
    assert (checkpoint.format, checkpoint.layers(), checkpoint.plain()) == (
        "mxfp4",
        ["experts.up"],
        ["experts.up_bias"],
    )
    assert checkpoint.weight("experts.up").shape == (8, 32)


def test_a_gguf_file(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    blocks = torch.randint(0, 60, (3, 2 * 18), dtype=torch.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", blocks.numpy(), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("output_norm.weight", torch.ones(64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.format == "gguf"
    assert checkpoint.config["general.architecture"] == "llama"
    assert (checkpoint.layers(), checkpoint.plain()) == (["blk.0.ffn_up.weight"], ["output_norm.weight"])
    assert isinstance(checkpoint.weight("blk.0.ffn_up.weight"), QuantizedWeight)
    assert torch.equal(checkpoint.tensor("output_norm.weight"), torch.ones(64))
    with pytest.raises(KeyError, match="got a tensor of type Q4_0, want weight"):
        checkpoint.tensor("blk.0.ffn_up.weight")


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "aqlm"},
        {"quant_method": "awq", "version": "gemv"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {"quant_method": "gptq", "checkpoint_format": "marlin"},
    ],
)
def test_methods_that_are_not_known(tmp_path: Path, quantization: dict[str, Any]) -> None:
    folder = make_folder(tmp_path, dict(OTHERS), {"quantization_config": quantization})
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    message = str(error.value)
    assert message.startswith(f"{folder}: quantization_config: got {{'quant_method': '{quantization['quant_method']}'")
    for method in ("gptq", "awq", "compressed-tensors", "hqq", "bitsandbytes", "mxfp4", "modelopt"):
        assert f"quant_method {method}" in message


def test_layers_that_are_damaged(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": make_weight(16, 64, 32), "b": make_weight(16, 64, 32)}, {}, {}, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["a.scales"]
    tensors["b.scales"] = tensors["b.scales"][:1]
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"layer 'a': tensors: got \['g_idx', 'qweight', 'qzeros'\], want scales as"
    ):
        checkpoint.weight("a")
    with pytest.raises(CheckpointError, match=r"layer 'b': qzeros: got shape \(2, 2\), want \(1, 2\)"):
        checkpoint.weight("b")
    with pytest.raises(KeyError, match="c: got no layer or tensor of that name"):
        checkpoint.weight("c")


def test_files_that_are_damaged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"got no \*\.safetensors, want a folder with some"):
        open_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: got a file that safetensors cannot read"):
        open_checkpoint(tmp_path)
    save_file({"a": torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match="got one safetensors file, want the folder"):
        open_checkpoint(file)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: got a file that is not JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: got list, want an object"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: got no such file, want it, for the index names it"):
        open_checkpoint(tmp_path).tensor("a")


def test_transformers_loads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads)).eval()
    state = dict(model.state_dict())
    names = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    weights = {name: quantize(state.pop(f"{name}.weight"), 32, symmetric=False) for name in names}
    write_checkpoint(tmp_path, weights, state, model.config.to_dict())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, weight in weights.items():
        model.get_submodule(name).weight.data = weight.dequantize()
    ids = torch.randint(0, 50, (1, 7))
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)

"""`evenshare quantize` and `evenshare inspect` with a toy model, as a user runs them."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from evenshare.cli import app
from evenshare.compat.transformers import disable, enable
from evenshare.quant import QuantizedWeight, QuantLinear, convert, quantize, quantize_model
from evenshare.quant.convert import quantize_checkpoint
from evenshare.quant.formats.checkpoint import open_checkpoint
from evenshare.report.quantize_command import linear_shapes
from tests.compat.checkpoints import toy_llama
from tests.generate.gguf_models import greedy


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture(params=[False, True], ids=["own head", "tied head"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A 16-bit toy model in two shards, with a file of a tokenizer."""
    model = toy_llama(tie_word_embeddings=request.param).bfloat16()
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file()
    return tmp_path / "model"


def table(output: str) -> dict[str, list[str]]:
    """Cells by layer."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    return {row[0]: row[1:] for row in rows if row[0].startswith("model.layers.")}


@pytest.mark.parametrize("options", [[], ["--asymmetric"], ["--plain", "--bits", "8"]], ids=" ".join)
def test_quantised_folder_is_the_quantised_model(folder: Path, options: list[str]) -> None:
    out = folder.parent / "out"
    code, output = run("quantize", folder, out, "--group-size", 32, *options)
    assert code == 0, output
    assert "14 layers, 0.1 M weights in " in output
    assert (out / "tokenizer.json").is_file()
    assert (out / "generation_config.json").is_file()
    enable()
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    disable()
    want = quantize_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        32,
        bits=8 if "8" in options else 4,
        symmetric="--asymmetric" not in options,
        refine="--plain" not in options,
        scale_dtype=torch.bfloat16,
    )
    for name, module in want.named_modules():
        if isinstance(module, QuantLinear):
            assert torch.equal(model.get_submodule(name).quantized.dequantize(), module.quantized.dequantize())
    assert greedy(model, [3, 1, 4], 12) == greedy(want, [3, 1, 4], 12)


@pytest.mark.skipif(importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors")
def test_other_tools_load_it(folder: Path) -> None:
    """transformers' own loader, with the package compressed-tensors: nothing of the file is left over or missing."""
    out = folder.parent / "out"
    assert run("quantize", folder, out, "--group-size", 32)[0] == 0
    disable()
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    enable()
    ours = AutoModelForCausalLM.from_pretrained(out)
    disable()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        got, want = ours(ids).logits.float(), model(ids).logits.float()
    assert float((got - want).norm() / want.norm()) < 0.05  # two bfloat16 models of four layers


def test_ignored_layers_stay(folder: Path) -> None:
    out = folder.parent / "out"
    patterns = ["--ignore", "lm_head", "--ignore", "mlp.down_proj", "--ignore", "model.layers.0.*"]
    assert run("quantize", folder, out, "--group-size", 32, *patterns)[0] == 0
    _, output = run("inspect", out)
    assert list(table(output)) == [
        f"model.layers.1.{name}"
        for name in ("mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj")
    ]  # fmt: skip
    enable()
    model = AutoModelForCausalLM.from_pretrained(out)
    disable()
    assert type(model.model.layers[1].mlp.down_proj) is nn.Linear


def test_inspect(folder: Path) -> None:
    out = folder.parent / "out"
    assert run("quantize", folder, out, "--group-size", 32, "--asymmetric")[0] == 0
    code, output = run("inspect", out)
    assert code == 0
    assert "compressed-tensors, 14 quantised layers" in output
    rows = table(output)
    # 64 x 96 codes of half a byte; 64 x 3 scales of two bytes and zero points of one.
    assert rows["model.layers.0.mlp.down_proj"] == ["64 x 96", "int4", "32", "integer", f"{64 * 48 + 64 * 3 * 3:,}"]
    code, output = run("inspect", out, "--against", folder)
    assert code == 0
    dense = open_checkpoint(folder).tensor("model.layers.0.mlp.down_proj.weight").float()
    quantized = quantize(dense, 32, symmetric=False, refine=True, scale_dtype=torch.bfloat16).dequantize()
    error = float((quantized - dense).norm() / dense.norm())
    assert table(output)["model.layers.0.mlp.down_proj"][-1] == f"{error:.4f}"
    assert "largest error 0.0" in output


def test_inspect_a_model_in_16_bits(folder: Path) -> None:
    code, output = run("inspect", folder)
    assert code == 0
    assert "no quantised layers, 2" in output


def test_wrong_input(folder: Path) -> None:
    out = folder.parent / "out"
    for arguments, message in (
        ((folder.parent / "none", out), "error: "),
        ((folder, out, "--group-size", 48), "group_size: got 48"),
        ((folder, out, "--group-size", 256), "compressed-tensors cannot hold it"),
        ((folder, out, "--ignore", "*"), "layers: got none"),
        ((folder, folder), "holds safetensors already"),
    ):
        code, output = run("quantize", *arguments)
        assert (code, message in output) == (2, True), output
        assert not out.exists()
    assert run("quantize", folder, out, "--group-size", 32)[0] == 0
    code, output = run("quantize", out, folder.parent / "again", "--group-size", 32)
    assert (code, "quantised already (compressed-tensors)" in output) == (2, True)
    shutil.copytree(folder, folder.parent / "other")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["model.layers.0.mlp.up_proj.weight"]
    assert "model.layers.0.mlp.up_proj.weight" in load_file(folder / shard)
    index["weight_map"].pop("model.layers.0.mlp.up_proj.weight")
    (folder.parent / "other" / "model.safetensors.index.json").write_text(json.dumps(index))
    code, output = run("inspect", out, "--against", folder.parent / "other")
    assert (code, "against: got no tensor model.layers.0.mlp.up_proj.weight" in output) == (2, True)
    with pytest.raises(ValueError, match=r"layers: got \['model.layers.0.mlp.up_proj'\], want layers of"):
        quantize_checkpoint(
            open_checkpoint(folder.parent / "other"), folder.parent / "x", {"model.layers.0.mlp.up_proj": (96, 64)}
        )


def test_layers_are_written_one_by_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No quantised layer lives on when the next is made: the mapping that is written holds none."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def watched(dense: torch.Tensor, *arguments: Any, **options: Any) -> QuantizedWeight:
        nonlocal most
        weight = quantize(dense, *arguments, **options)
        if not dense.is_meta:
            alive.append(weakref.ref(weight.codes))
            most = max(most, sum(codes() is not None for codes in alive))
        return weight

    monkeypatch.setattr(convert, "quantize", watched)
    layers, kept = linear_shapes(folder, ("lm_head",))
    outlines = quantize_checkpoint(open_checkpoint(folder), folder.parent / "out", layers, kept, group_size=32)
    assert len(alive) == len(layers) == 14
    assert most <= 2  # the one that is made, and the last one that was written
    assert {name: weight.shape for name, weight in outlines.items()} == layers
    assert "lm_head" in open_checkpoint(folder.parent / "out").config["quantization_config"]["ignore"]

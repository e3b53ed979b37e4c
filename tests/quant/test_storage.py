"""Saved weights come back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")

from evenshare.quant import load_weights, save_weights
from tests.quant.helpers import random_permutation, random_weight


def test_round_trip(tmp_path: Path) -> None:
    weights = {
        "q": random_weight(4, 33, 16, "zeros"),
        "layers.0.down": random_weight(6, 64, 32, "offsets", dtype=torch.float32),
        "head": random_weight(8, 64, 32, bits=8),
        "per.channel": random_weight(2, 40, -1, dtype=torch.bfloat16),
        "table": random_weight(4, 64, 32, "e2m1"),
        "act-order": random_weight(4, 33, 16, "nf4", permutation=random_permutation(33, 15)),
    }
    save_weights(tmp_path / "w.safetensors", weights)
    loaded = load_weights(tmp_path / "w.safetensors")
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        got = loaded[name]
        for field in ("k", "group_size", "bits", "encoding"):
            assert getattr(got, field) == getattr(weight, field)
        assert got.scales.dtype == weight.scales.dtype
        assert torch.equal(got.dequantize(), weight.dequantize())


def test_files_of_version_1_are_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weight = random_weight(4, 33, 16, "zeros")
    form = {"k": 33, "group_size": 16, "bits": 4}
    tensors = {f"q.{part}": getattr(weight, part) for part in ("codes", "scales", "zeros")}
    header = {"evenshare.quantized": json.dumps({"version": 1, "weights": {"q": form}})}
    save_file(tensors, str(tmp_path / "w.safetensors"), header)
    assert torch.equal(load_weights(tmp_path / "w.safetensors")["q"].dequantize(), weight.dequantize())


def test_slices_are_saved_alone(tmp_path: Path) -> None:
    weight = random_weight(64, 256, 32)
    save_weights(tmp_path / "w.safetensors", {"part": weight.narrow(0, 1)})
    assert torch.equal(load_weights(tmp_path / "w.safetensors")["part"].dequantize(), weight.dequantize()[:1])


def test_refuses(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(
        FileNotFoundError, match=r"none.safetensors: got no such file, want one written by save_weights"
    ):
        load_weights(tmp_path / "none.safetensors")
    save_file({"a": torch.zeros(1)}, str(tmp_path / "other.safetensors"))
    with pytest.raises(ValueError, match=r"other.safetensors: got evenshare.quantized version None, want 1 or 2"):
        load_weights(tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match=r"broken.safetensors: got a file that safetensors cannot read"):
        load_weights(tmp_path / "broken.safetensors")

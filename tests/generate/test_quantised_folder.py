"""A 4-bit Hugging Face folder runs like a GGUF file: fused layers, the tokens of the dequantised model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from evenshare.compat.transformers.layers import FusedStack
from evenshare.generate import load_model, stream_tokens
from evenshare.quant import quantize
from tests.compat.checkpoints import GROUP_SIZE, act_order, write_toy
from tests.generate.gguf_models import greedy, write_model


@pytest.mark.parametrize("quantise", [partial(quantize, group_size=GROUP_SIZE), act_order], ids=["plain", "act-order"])
def test_tokens(quantise: object, tmp_path: Path) -> None:
    write_model(tmp_path / "other.gguf")
    want = write_toy(tmp_path / "model", "compressed-tensors", quantise)  # type: ignore[arg-type]
    load_model(tmp_path / "other.gguf").tokenizer.save_pretrained(tmp_path / "model")
    loaded = load_model(tmp_path / "model", dtype=torch.float32)
    fused = isinstance(loaded.model.model.layers[0], FusedStack)
    assert fused == (quantise is not act_order)  # q, k and v have permutations of their own
    prompt = [3, 1, 4, 1, 5]
    assert list(stream_tokens(loaded, prompt, max_new_tokens=20)) == greedy(want, prompt, 20)

"""Weights as GGUF blocks: dequantised by the gguf package, and read again from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from evenshare.quant import QuantizedWeight
from evenshare.quant.formats.gguf import read_gguf
from evenshare.quant.formats.gguf_write import gguf_blocks
from tests.quant.formats.helpers import make_weight, permuted


def small_zeros(group_size: int) -> QuantizedWeight:
    """Integer zero points whose products with the scales float16 can hold."""
    weight = make_weight(5, 128, group_size, zero_form="zeros")
    scales = torch.round(weight.scales.float() * 64).div(64).half()
    return QuantizedWeight(weight.codes, scales, 128, group_size, zeros=weight.zeros)


WEIGHTS = {
    "Q4_0": make_weight(5, 128, 32),
    "Q4_0 of groups of 64": make_weight(5, 96, 64, dtype=torch.float16),
    "Q4_0 per channel": make_weight(3, 96, -1),
    "Q4_1": make_weight(5, 128, 32, zero_form="offsets"),
    "Q4_1 of integer zeros": small_zeros(64),
    "Q8_0": make_weight(5, 64, 32, bits=8),
}


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_written_and_read_again(tmp_path: Path, name: str) -> None:
    gguf = pytest.importorskip("gguf")
    weight = WEIGHTS[name]
    kind, blocks = gguf_blocks(weight)
    assert kind == name.split()[0]
    raw_dtype = gguf.GGMLQuantizationType[kind]
    assert np.array_equal(gguf.quants.dequantize(blocks, raw_dtype), weight.dequantize().numpy())

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", blocks, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    again = read_gguf(tmp_path / "m.gguf")["w"]
    assert isinstance(again, QuantizedWeight)
    assert torch.equal(again.dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (make_weight(4, 64, 16), "Q4_0 cannot hold it, because its groups are 16 of 64 columns"),
        (make_weight(4, 48, -1), "Q4_0 cannot hold it, because its groups are 48 of 48 columns"),
        (make_weight(4, 64, 32, bits=8, zero_form="zeros"), "Q8_0 cannot hold it, because it has zero points"),
        (make_weight(4, 64, 32, encoding="nf4"), "Q4_0 cannot hold it, because its codes are nf4"),
        (make_weight(4, 64, 32, dtype=torch.float32), "Q4_0 cannot hold it, because its scales are not all float16"),
        (make_weight(4, 64, 32, zero_form="zeros"), "Q4_1 cannot hold it, because its offsets are not all float16"),
        (permuted(make_weight(4, 64, 32), torch.arange(64) % 2), "Q4_0 cannot hold it, because it has a permutation"),
    ],
)
def test_what_it_cannot_hold(weight: QuantizedWeight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gguf_blocks(weight)

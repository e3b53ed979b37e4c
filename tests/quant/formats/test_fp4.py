"""MXFP4 of gpt-oss, ModelOpt's NVFP4, and the search for NVFP4's tensor scale."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenshare.quant.formats import mxfp4, nvfp4
from tests.quant.formats.helpers import SEEDS

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def e2m1(data: int, index: int) -> float:
    """The index-th e2m1 number of a byte, low nibble first."""
    nibble = data >> 4 * index & 15
    return -E2M1[nibble & 7] if nibble & 8 else E2M1[nibble]


def test_every_e8m0_scale() -> None:
    data = torch.arange(256, dtype=torch.uint8).view(1, 256)
    weight = mxfp4.from_codes(torch.full((1, 256 * 16), 0x22, dtype=torch.uint8), data)
    want = torch.exp2(torch.arange(256).double() - 127)
    want[255] = torch.nan
    torch.testing.assert_close(weight.scales[0].double(), want, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(weight.dequantize()[0, ::32].double(), want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(mxfp4.e8m0(weight.scales), data)


@pytest.mark.parametrize("leading", [(), (3,), (2, 2)])
def test_blocks_of_gpt_oss(leading: tuple[int, ...]) -> None:
    n, groups = 5, 3
    blocks = torch.randint(0, 256, (*leading, n, groups, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (*leading, n, groups), dtype=torch.uint8)
    weight = mxfp4.MXFP4.read({"blocks": blocks, "scales": scales}, {"quant_method": "mxfp4"})
    rows = [
        [
            e2m1(data, i) * 2.0 ** (scale - 127)
            for group, scale in zip(*row, strict=True)
            for data in group
            for i in (0, 1)
        ]
        for row in zip(blocks.view(-1, groups, 16).tolist(), scales.view(-1, groups).tolist(), strict=True)
    ]
    assert torch.equal(weight.dequantize(), torch.tensor(rows))
    if leading == (3,):
        assert torch.equal(weight.narrow(n, 2 * n).dequantize(), torch.tensor(rows[n : 2 * n]))


def test_wrong_blocks() -> None:
    blocks = torch.zeros(4, 2, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"blocks, scales: got shapes \(4, 2, 16\) and \(4, 3\), want"):
        mxfp4.MXFP4.read({"blocks": blocks, "scales": torch.zeros(4, 3, dtype=torch.uint8)}, {})
    with pytest.raises(TypeError, match=r"scales: got torch.int8, want torch.uint8"):
        mxfp4.MXFP4.read({"blocks": blocks, "scales": torch.zeros(4, 2, dtype=torch.int8)}, {})
    with pytest.raises(ValueError, match="mxfp4 cannot hold it, because it has no writer"):
        mxfp4.MXFP4.write(mxfp4.from_codes(blocks.view(4, 32), torch.zeros(4, 2, dtype=torch.uint8)))


def test_layer_of_modelopt() -> None:
    weight = torch.randint(0, 256, (6, 24), dtype=torch.uint8)
    scales = torch.randint(0, 127, (6, 3), dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {"weight": weight, "weight_scale": scales, "weight_scale_2": torch.tensor(0.0123)}
    read = nvfp4.MODELOPT.read(tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    joined = scales.float() * 0.0123
    rows = [
        [e2m1(data, i) * float(joined[row, j // 8]) for j, data in enumerate(weight[row].tolist()) for i in (0, 1)]
        for row in range(6)
    ]
    # 2 bits of significand times 24: exact in float64, rounded once to float32.
    assert torch.equal(read.dequantize(), torch.tensor(rows, dtype=torch.float64).float())


def test_wrong_tensors_of_modelopt() -> None:
    good = {
        "weight": torch.zeros(6, 24, dtype=torch.uint8),
        "weight_scale": torch.zeros(6, 3).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.ones(()),
    }
    for name, tensor, message in (
        ("weight", torch.zeros(6, 20, dtype=torch.uint8), "codes: got k = 40, want a multiple of 16"),
        ("weight_scale", torch.zeros(6, 2).to(torch.float8_e4m3fn), r"scales: got shape \(6, 2\), want \(6, 3\)"),
        ("weight_scale_2", torch.ones(6), r"weight_scale_2: got shape \(6,\), want one element"),
    ):
        with pytest.raises(ValueError, match=message):
            nvfp4.MODELOPT.read({**good, name: tensor}, {})


@settings(max_examples=200, deadline=None)
@given(
    count=st.integers(1, 40),
    divisor=st.floats(2.0**-20, 2.0**20, width=32),
    top=st.integers(0, 126),
    negative=st.booleans(),
    seed=SEEDS,
)
def test_tensor_scale_is_found(count: int, divisor: float, top: int, negative: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, top + 1, (1, count), dtype=torch.uint8, generator=generator)
    data = data | 0x80 if negative else data
    scales = data.view(torch.float8_e4m3fn).float() / torch.tensor(divisor)
    split = nvfp4.split_scales(scales)
    assert split is not None
    assert torch.equal(split[0].float() / split[1], scales)


def test_tensor_scale_that_does_not_exist() -> None:
    two = torch.tensor([[448.0, 300.0]])  # 300 is no e4m3 number, and 448 / 300 is the quotient of none
    assert nvfp4.split_scales(two) is None
    assert nvfp4.split_scales(torch.arange(1, 300).float()[None]) is None

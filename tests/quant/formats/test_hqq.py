"""HQQ against the layout's own formula and against the package."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenshare.quant import QuantizedWeight
from evenshare.quant.formats.hqq import HQQ
from tests.quant.formats.helpers import SEEDS, make_weight, permuted


def random_layer(n: int, k: int, group_size: int, bits: int, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = n * k // group_size
    return {
        "W_q": torch.randint(0, 256, (rows * bits // 8, group_size), dtype=torch.uint8, generator=generator),
        "scale": torch.randn(rows, 1, generator=generator).to(dtype),
        "zero": (torch.randn(rows, 1, generator=generator) * 20).to(dtype),
        "shape": torch.tensor([n, k]),
        "axis": torch.tensor(1, dtype=torch.int32),
        "nbits": torch.tensor(bits, dtype=torch.int32),
    }


def loop(layer: dict[str, torch.Tensor]) -> torch.Tensor:
    """(q - zero) * scale in float64, weight by weight: [n, k]."""
    W_q, bits = layer["W_q"].tolist(), int(layer["nbits"])
    rows, columns = len(layer["scale"]), len(W_q[0])
    out = torch.empty(rows, columns, dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            q = W_q[i][j] if bits == 8 else W_q[i][j] >> 4 if i < rows // 2 else W_q[i - rows // 2][j] & 15
            out[i, j] = (q - layer["zero"][i, 0].double()) * layer["scale"][i, 0].double()
    return out.view(layer["shape"].tolist())


@settings(max_examples=30, deadline=None)
@given(
    n=st.sampled_from([1, 2, 6, 7]),
    shape=st.sampled_from([(64, 16), (96, 16), (40, 40)]),
    bits=st.sampled_from([4, 8]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=SEEDS,
)
def test_reads_what_the_layout_says(n: int, shape: tuple[int, int], bits: int, dtype: torch.dtype, seed: int) -> None:
    k, group_size = shape
    n = n + n % 2 if bits == 4 else n
    layer = random_layer(n, k, group_size, bits, dtype, seed)
    weight = HQQ.read(layer, {})
    # q * scale and zero * scale are rounded to float32, then their sum: 2u + u² of the absolute sum, u = 2^-24.
    scale, zero = (
        layer[name].double().abs().view(n, -1).repeat_interleave(group_size, 1) for name in ("scale", "zero")
    )
    largest = ((1 << bits) - 1 + zero) * scale
    assert ((weight.dequantize().double() - loop(layer)).abs() <= 2.001 * 2.0**-24 * largest + 2.0**-149).all()
    if dtype != torch.float32:
        again = HQQ.read(HQQ.write(weight), {})
        assert torch.equal(again.dequantize(), weight.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_integer_zero_points_stay_integers(bits: int, dtype: torch.dtype) -> None:
    layer = random_layer(6, 64, 16, bits, dtype, seed=1)
    layer["zero"] = torch.randint(0, 1 << bits, layer["zero"].shape).to(dtype)
    weight = HQQ.read(layer, {})
    assert weight.zeros is not None
    assert torch.equal(weight.dequantize(), loop(layer).float())


@settings(max_examples=30, deadline=None)
@given(
    n=st.sampled_from([2, 6, 7]),
    group_size=st.sampled_from([16, 32, -1]),
    bits=st.sampled_from([4, 8]),
    zero_form=st.sampled_from(["symmetric", "zeros"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=SEEDS,
)
def test_written_and_read_again(
    n: int, group_size: int, bits: int, zero_form: str, dtype: torch.dtype, seed: int
) -> None:
    n = n + n % 2 if bits == 4 else n
    weight = make_weight(n, 96, group_size, bits=bits, zero_form=zero_form, dtype=dtype, seed=seed)
    tensors = HQQ.write(weight)
    assert torch.equal(HQQ.read(tensors, {}).dequantize(), weight.dequantize())
    assert torch.equal(loop(tensors).float(), weight.dequantize())


def test_a_group_of_scale_zero_is_zero_whatever_its_zero_point() -> None:
    layer = random_layer(2, 32, 16, 4, torch.float16, seed=2)
    layer["scale"][0], layer["zero"][0] = 0, torch.inf
    weight = HQQ.read(layer, {})
    assert (weight.dequantize()[0, :16] == 0).all()
    assert torch.isfinite(weight.dequantize()).all()


def test_bytes_viewed_as_floats() -> None:
    layer = random_layer(2, 64, 32, 4, torch.float16, seed=4)
    viewed = {**layer, "W_q": layer["W_q"].view(torch.float16)}
    assert torch.equal(HQQ.read(viewed, {}).dequantize(), HQQ.read(layer, {}).dequantize())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": torch.tensor(0)}, "axis: got 0, want 1: with 0 a group's scale is shared by rows"),
        ({"nbits": torch.tensor(3)}, "nbits: got 3, want 4 or 8"),
        ({"shape": torch.tensor([6, 48])}, r"W_q: got shape \(12, 16\) of bytes, want 6 x 48 codes of 4 bits"),
        ({"scale": torch.zeros(24)}, r"scale: got shape \(24,\), want \(24, 1\)"),
    ],
)
def test_wrong_tensors(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HQQ.read({**random_layer(6, 64, 16, 4, torch.float16, seed=1), **changes}, {})


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (make_weight(3, 48, 16), "its 9 groups are an odd number"),
        (make_weight(2, 40, 16), "its groups of 16 do not cut its 40 columns evenly"),
        (make_weight(8, 64, 32, zero_form="offsets"), "its offsets are not all a float zero point times the scale"),
        (make_weight(8, 64, 32, encoding="nf4"), "its codes are nf4"),
        (permuted(make_weight(8, 32, 16), torch.arange(32) % 2), r"it has a permutation"),
    ],
)
def test_what_it_cannot_hold(weight: QuantizedWeight, message: str) -> None:
    with pytest.raises(ValueError, match=f"hqq cannot hold it, because {message}"):
        HQQ.write(weight)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [64, None])
def test_layer_of_the_package(bits: int, group_size: int | None) -> None:
    pytest.importorskip("hqq")
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    quant_config = BaseQuantizeConfig(nbits=bits, group_size=group_size, axis=1)
    linear = torch.nn.Linear(128, 6, bias=False)
    layer = HQQLinear(linear, quant_config, compute_dtype=torch.float32, device="cpu")
    state = layer.state_dict()
    weight = HQQ.read(state, {})
    torch.testing.assert_close(weight.dequantize(), layer.dequantize(), rtol=0, atol=2.0**-20)

    written = HQQ.write(make_weight(6, 128, 64, bits=bits, zero_form="zeros"))
    layer.load_state_dict({**written, "W_q": torch.nn.Parameter(written["W_q"], requires_grad=False)})
    layer.meta["compute_dtype"] = torch.float32
    assert torch.equal(layer.dequantize().float(), HQQ.read(written, {}).dequantize())

"""bitsandbytes' nf4 against the layout and against the package."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenshare.quant import QuantizedWeight
from evenshare.quant.encodings import NF4 as TABLE
from evenshare.quant.formats.nf4 import NF4, STATE
from tests.quant.formats.helpers import SEEDS, make_weight


def state_of(**state: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def nested_layer(n: int, k: int, block: int, nested_block: int) -> dict[str, torch.Tensor]:
    blocks = n * k // block
    return {
        "weight": torch.randint(0, 256, (n * k // 2, 1), dtype=torch.uint8),
        "weight.absmax": torch.randint(0, 256, (blocks,), dtype=torch.uint8),
        "weight.quant_map": torch.tensor(TABLE),
        "weight.nested_absmax": torch.rand(-(-blocks // nested_block)),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        STATE: state_of(
            quant_type="nf4", blocksize=block, dtype="float16", shape=[n, k], nested_blocksize=nested_block,
            nested_dtype="float32", nested_offset=0.25,
        ),
    }  # fmt: skip


def test_nested_absmax_by_the_layout() -> None:
    n, k, block, nested_block = 6, 128, 64, 5
    layer = nested_layer(n, k, block, nested_block)
    want = torch.empty(n, k, dtype=torch.float64)
    data, absmax = layer["weight"].flatten().tolist(), layer["weight.absmax"].tolist()
    for i in range(n * k):
        code = data[i // 2] & 15 if i % 2 else data[i // 2] >> 4
        nested = i // block
        scale = layer["weight.nested_quant_map"][absmax[nested]].double()
        scale = scale * layer["weight.nested_absmax"][nested // nested_block].double() + 0.25
        want[i // k, i % k] = TABLE[code] * scale
    # Three roundings to float32 of numbers below 1.25.
    weight = NF4.read(layer, {})
    assert weight.encoding == "nf4"
    assert ((weight.dequantize().double() - want).abs() <= 3 * 1.25 * 2.0**-24).all()


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 7),
    shape=st.sampled_from([(32, 32), (96, 32), (64, -1), (192, 64)]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=SEEDS,
)
def test_written_and_read_again(n: int, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    weight = make_weight(n, *shape, encoding="nf4", dtype=dtype, seed=seed)
    again = NF4.read(NF4.write(weight), {})
    assert torch.equal(again.codes, weight.codes)
    assert torch.equal(again.dequantize(), weight.dequantize())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("n", "k", "block"), [(4, 64, 64), (37, 640, 64), (8, 256, 128)])
def test_layer_of_the_package(n: int, k: int, block: int, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")

    data, state = functional.quantize_4bit(
        torch.randn(n, k), blocksize=block, quant_type="nf4", compress_statistics=nested
    )
    layer = {"weight": data} | {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    weight = NF4.read(layer, {})
    assert torch.equal(weight.dequantize(), functional.dequantize_4bit(data, state))

    written = NF4.write(weight)
    parts = {name.removeprefix("weight."): tensor for name, tensor in written.items() if name != "weight"}
    state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
    state.dtype = torch.float32  # to compare without rounding
    assert torch.equal(functional.dequantize_4bit(written["weight"], state), weight.dequantize())


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (make_weight(8, 64, 32), "its codes are integer, not nf4"),
        (make_weight(8, 64, 16, encoding="nf4"), "its groups of 16 of 64 columns are not cut evenly"),
        (make_weight(8, 48, 32, encoding="nf4"), "its groups of 32 of 48 columns are not cut evenly"),
    ],
)
def test_what_it_cannot_hold(weight: QuantizedWeight, message: str) -> None:
    with pytest.raises(ValueError, match=f"bitsandbytes cannot hold it, because {message}"):
        NF4.write(weight)


def test_wrong_tensors() -> None:
    layer = nested_layer(6, 128, 64, 5)
    for changes, message in (
        ({"weight": torch.zeros(100, 1, dtype=torch.uint8)}, r"weight: got shape \(100,\), want \(384\)"),
        ({"weight.absmax": torch.zeros(11)}, r"weight.absmax: got shape \(11,\), want \(12\)"),
        ({"weight.nested_absmax": torch.zeros(2)}, r"weight.nested_absmax: got shape \(2,\), want \(3\)"),
        ({"weight.quant_map": torch.zeros(16)}, "weight.quant_map: got .*, want the table of nf4"),
        ({STATE: state_of(shape=[8, 96], blocksize=64)}, "got blocks of 64 codes for k = 96, want a divisor"),
        ({STATE: state_of(shape=[768], blocksize=64)}, r"got shape \[768\], want two dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            NF4.read({**layer, **changes}, {})
    del layer["weight.nested_absmax"]
    with pytest.raises(ValueError, match=r"want weight\.nested_absmax as well"):
        NF4.read(layer, {})

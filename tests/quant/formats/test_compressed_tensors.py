"""compressed-tensors: integers against a loop over the bits and against the package; e2m1 against the package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenshare.quant import QuantizedWeight
from evenshare.quant.formats.compressed_tensors import COMPRESSED_TENSORS
from tests.quant.formats.helpers import SEEDS, make_weight, packed_loop, permuted

read, write = COMPRESSED_TENSORS.read, COMPRESSED_TENSORS.write


def describe(*weights: QuantizedWeight) -> dict[str, Any]:
    assert COMPRESSED_TENSORS.describe is not None
    return COMPRESSED_TENSORS.describe({f"layer{i}": weight for i, weight in enumerate(weights)}, ["lm_head"])


def fp4_weight(n: int, k: int, group_size: int, seed: int = 0) -> QuantizedWeight:
    """e2m1 codes, with scales that MXFP4 (32) or NVFP4 (16) can hold: their own extremes among them."""
    generator = torch.Generator().manual_seed(seed)
    weight = make_weight(n, k, group_size, encoding="e2m1", seed=seed)
    scales = torch.randint(0, 255, weight.scales.shape, dtype=torch.uint8, generator=generator)
    if group_size == 32:
        scales.view(-1)[0], scales.view(-1)[-1] = 0, 254
        values = torch.exp2(scales.double() - 127).bfloat16()
    else:
        scales = torch.where(scales % 128 == 127, 126, scales)  # 127 and 255 are NaN
        values = scales.view(torch.float8_e4m3fn).float() / (torch.rand((), generator=generator) * 100 + 0.01)
    return QuantizedWeight(weight.codes, values, k, group_size, encoding="e2m1")


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 20),
    shape=st.sampled_from([(16, 16), (96, 32), (33, -1), (48, 16), (5, -1), (7, -1)]),
    bits=st.sampled_from([4, 8]),
    zero_form=st.sampled_from(["symmetric", "zeros"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    order=st.sampled_from(["none", "shuffled"]),
    seed=SEEDS,
)
def test_written_as_the_bits_say_and_read_again(
    n: int, shape: tuple[int, int], bits: int, zero_form: str, dtype: torch.dtype, order: str, seed: int
) -> None:
    k, group_size = shape
    weight = make_weight(n, k, group_size, bits=bits, zero_form=zero_form, dtype=dtype, seed=seed)
    if order == "shuffled":
        g_idx = torch.arange(k) // weight.group_size
        weight = permuted(weight, g_idx[torch.randperm(k, generator=torch.Generator().manual_seed(seed))])
    tensors = write(weight)
    assert torch.equal(packed_loop(tensors, bits=bits, group_size=k // weight.num_groups), weight.dequantize())
    assert torch.equal(read(tensors, describe(weight)).dequantize(), weight.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, None])
@pytest.mark.parametrize("n", [16, 11])
def test_integers_of_the_package(bits: int, symmetric: bool, group_size: int | None, n: int) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    k = 96
    groups = 1 if group_size is None else k // group_size
    args = QuantizationArgs(
        num_bits=bits,
        symmetric=symmetric,
        group_size=group_size,
        strategy="channel" if group_size is None else "group",
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    state = {"weight": torch.randn(n, k), "weight_scale": torch.rand(n, groups) * 4 / high + 0.01}
    state["weight_zero_point"] = torch.zeros(n, groups, dtype=torch.int8)
    if not symmetric:
        state["weight_zero_point"] = torch.randint(low, high + 1, (n, groups)).to(torch.int8)
        state["weight_zero_point"][0, 0], state["weight_zero_point"][-1, -1] = low, high
    tensors = PackedQuantizationCompressor.compress(state, scheme)
    want = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
    weight = read(tensors, {"config_groups": {"group_0": {"weights": args.model_dump()}}})
    assert weight.num_groups == groups
    assert torch.equal(weight.dequantize(), want)
    again = write(weight)
    assert all(torch.equal(again[name], tensors[name]) for name in again)
    assert (weight.zeros is None) == symmetric


@pytest.mark.parametrize("group_size", [16, 32])
def test_fp4_of_the_package(group_size: int) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import MXFP4PackedCompressor, NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig

    compressor = NVFP4PackedCompressor if group_size == 16 else MXFP4PackedCompressor
    weight = fp4_weight(6, 96, group_size)
    scheme = QuantizationConfig.model_validate(describe(weight)).config_groups["group_0"]
    tensors = write(weight)
    decompressed = compressor.decompress(tensors, scheme)["weight"]
    # It computes in bfloat16: the scale may be rounded to 8 bits, then the product once more.
    want = weight.dequantize()
    # Powers of two below bfloat16's normal numbers may be flushed.
    tiny = 6 * 2.0**-126 if group_size == 32 else 0.0
    torch.testing.assert_close(decompressed.float(), want, rtol=2 * 2.0**-8, atol=tiny)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 9), groups=st.integers(1, 5), group_size=st.sampled_from([16, 32]), seed=SEEDS)
def test_fp4_written_and_read_again(n: int, groups: int, group_size: int, seed: int) -> None:
    weight = fp4_weight(n, groups * group_size, group_size, seed)
    tensors = write(weight)
    again = read(tensors, describe(weight))
    assert torch.equal(again.codes, weight.codes)
    assert torch.equal(again.dequantize(), weight.dequantize())
    assert tensors["weight_packed"].dtype == torch.uint8
    assert ("weight_global_scale" in tensors) == (group_size == 16)


def test_schemes_by_layer() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig

    weights = (
        make_weight(8, 64, 32),
        make_weight(8, 64, -1, bits=8, zero_form="zeros"),
        fp4_weight(8, 64, 16),
        make_weight(4, 64, 32, seed=1),
    )
    config = describe(*weights)
    parsed = QuantizationConfig.model_validate(config)
    groups = parsed.config_groups
    assert parsed.format == "mixed-precision"
    assert [scheme.targets for scheme in groups.values()] == [["layer0", "layer3"], ["layer1"], ["layer2"]]
    assert [scheme.weights.num_bits for scheme in groups.values()] == [4, 8, 4]
    assert [scheme.weights.symmetric for scheme in groups.values()] == [True, False, True]
    assert [scheme.format for scheme in groups.values()] == ["pack-quantized", "pack-quantized", "nvfp4-pack-quantized"]
    for weight in weights:
        assert torch.equal(read(write(weight), config).dequantize(), weight.dequantize())
    assert COMPRESSED_TENSORS.matches(config)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (make_weight(8, 40, 16), "its groups of 16 do not cut its 40 columns evenly"),
        (make_weight(8, 32, 16, zero_form="offsets"), "it has float offsets"),
        (make_weight(8, 32, 16, encoding="nf4"), "its codes are nf4, not integers"),
        (make_weight(8, 64, 64, encoding="e2m1"), "its groups are 64 of 64 columns, not 32"),
        (make_weight(8, 64, 32, encoding="e2m1"), "its scales are not all powers of two"),
        (make_weight(8, 256, 16, encoding="e2m1"), "its scales are no e4m3 numbers over one float32"),
        (permuted(make_weight(8, 64, 16), torch.arange(64) % 3), "its permutation pads groups of unequal sizes"),
    ],
)
def test_what_it_cannot_hold(weight: QuantizedWeight, message: str) -> None:
    with pytest.raises(ValueError, match=f"compressed-tensors cannot hold it, because {message}"):
        write(weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_shape": None}, "want weight_shape as well"),
        ({"weight_shape": torch.tensor([2, 8, 64])}, r"weight_shape: got shape \(3,\), want \(2\)"),
        ({"weight_scale": None}, "want weight_scale as well"),
        ({"weight_packed": torch.zeros(8, 9).int()}, "weight_packed: got 9 words for k = 64, want 4 or 8 bits a code"),
        ({"weight_packed": torch.zeros(9, 8).int()}, r"weight_packed: got shape \(9, 8\), want \(8, any\)"),
        ({"weight_scale": torch.zeros(8, 3)}, "weight_scale: got 3 groups, want a divisor of k = 64"),
        ({"weight_zero_point": torch.zeros(8, 2).int()}, r"weight_zero_point: got shape \(8, 2\), want \(1, 2\)"),
        ({"weight_g_idx": torch.zeros(63).int()}, r"weight_g_idx: got shape \(63,\), want \(64\)"),
    ],
)
def test_wrong_tensors(changes: dict[str, torch.Tensor | None], message: str) -> None:
    layer = {**write(make_weight(8, 64, 32)), **changes}
    with pytest.raises(ValueError, match=message):
        read({name: tensor for name, tensor in layer.items() if tensor is not None}, {})


def test_nvfp4_without_its_tensor_scale() -> None:
    tensors = write(fp4_weight(2, 32, 16))
    del tensors["weight_global_scale"]
    with pytest.raises(ValueError, match="weight_global_scale: got None, want one element"):
        read(tensors, {})


@pytest.mark.parametrize(
    ("config", "matches"),
    [
        ({"format": "pack-quantized"}, True),
        ({"format": "float-quantized"}, False),
        ({"format": "mixed-precision", "config_groups": {"a": {"format": "nvfp4-pack-quantized"}}}, True),
        ({"format": "mixed-precision", "config_groups": {"a": {"format": "float-quantized"}}}, False),
        ({"format": "pack-quantized", "config_groups": {"a": {"format": None}}}, True),
    ],
)
def test_configurations(config: dict[str, object], matches: bool) -> None:
    assert COMPRESSED_TENSORS.matches({"quant_method": "compressed-tensors", **config}) == matches

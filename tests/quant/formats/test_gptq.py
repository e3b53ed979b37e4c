"""GPTQ of both versions against a loop over the bits, with act-order, shards and zero points that wrap around."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenshare.quant import QuantizedWeight
from evenshare.quant.formats.gptq import GPTQ, GPTQ_V2
from tests.quant.formats.helpers import SEEDS, gptq_loop, make_weight, permuted

FORMATS = {1: GPTQ, 2: GPTQ_V2}


def config_of(weight: QuantizedWeight, version: int, **changes: object) -> dict[str, object]:
    return {**FORMATS[version].describe({"layer": weight}, []), **changes}  # type: ignore[misc]


def random_layer(n: int, k: int, groups: int, bits: int, seed: int) -> dict[str, torch.Tensor]:
    """Random words: all zero points occur, 0 and the greatest among them."""
    generator = torch.Generator().manual_seed(seed)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)

    layer = {
        "qweight": words(k * bits // 32, n),
        "qzeros": words(groups, n * bits // 32),
        "scales": torch.randn(groups, n, generator=generator).half(),
    }
    layer["qzeros"][0, 0], layer["qzeros"][-1, -1] = -1, 0  # every field the greatest; every field 0
    return layer


@settings(max_examples=40, deadline=None)
@given(
    n=st.sampled_from([8, 24]),
    k=st.sampled_from([16, 32, 96, 104]),
    group_size=st.sampled_from([16, 32, -1]),
    bits=st.sampled_from([4, 8]),
    version=st.sampled_from([1, 2]),
    order=st.sampled_from(["none", "groups", "shuffled", "shard", "uneven"]),
    sym=st.booleans(),
    seed=SEEDS,
)
def test_reads_what_the_bits_say(
    n: int, k: int, group_size: int, bits: int, version: int, order: str, sym: bool, seed: int
) -> None:
    size = k if group_size == -1 else group_size
    groups = -(-k // size)
    layer = random_layer(n, k, groups + 3 if order == "shard" else groups, bits, seed)
    g_idx = torch.arange(k, dtype=torch.int32) // size
    if order == "shuffled":
        g_idx = g_idx[torch.randperm(k, generator=torch.Generator().manual_seed(seed))]
    elif order == "shard":  # columns from the middle of a longer row
        g_idx = (torch.arange(k, dtype=torch.int32) + size // 2) // size + 1
    elif order == "uneven":
        g_idx = torch.randint(0, groups, (k,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    tensors = layer if order == "none" else {**layer, "g_idx": g_idx}
    config = {"bits": bits, "group_size": group_size, "sym": sym}
    weight = FORMATS[version].read(tensors, config)
    want = gptq_loop({**layer, "g_idx": g_idx}, bits=bits, version=version, sym=sym)
    assert weight.shape == (n, k)
    assert torch.equal(weight.dequantize(), want)
    if order in ("none", "groups"):
        assert weight.permutation is None


def test_seven_in_v1_is_eight_in_v2_is_symmetric() -> None:
    layer = random_layer(16, 64, 2, 4, seed=3)
    sevens = torch.full_like(layer["qzeros"], 0x77777777)
    eights = torch.full((2, 2), -0x77777778, dtype=torch.int32)  # 0x88888888
    config = {"bits": 4, "group_size": 32, "sym": False}
    first = GPTQ.read({**layer, "qzeros": sevens}, config).dequantize()
    second = GPTQ_V2.read({**layer, "qzeros": eights}, config).dequantize()
    symmetric = GPTQ.read(layer, {**config, "sym": True}).dequantize()
    assert torch.equal(first, second)
    assert torch.equal(first, symmetric)


def test_fifteen_wraps_to_zero_in_v1() -> None:
    layer = random_layer(8, 32, 1, 4, seed=5)
    layer["qzeros"][:] = -1
    weight = GPTQ.read(layer, {"bits": 4, "group_size": -1, "sym": False})
    assert weight.zeros is not None
    assert (weight.zeros == 0).all()


@settings(max_examples=40, deadline=None)
@given(
    n=st.sampled_from([8, 24]),
    k=st.sampled_from([32, 96, 104]),
    group_size=st.sampled_from([16, 32, -1]),
    bits=st.sampled_from([4, 8]),
    zero_form=st.sampled_from(["symmetric", "zeros"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    version=st.sampled_from([1, 2]),
    order=st.sampled_from(["none", "shuffled", "uneven"]),
    seed=SEEDS,
)
def test_written_and_read_again(
    n: int, k: int, group_size: int, bits: int, zero_form: str, dtype: torch.dtype, version: int, order: str, seed: int
) -> None:
    weight = make_weight(n, k, group_size, bits=bits, zero_form=zero_form, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    if order == "shuffled":
        g_idx = torch.arange(k, dtype=torch.int32) // weight.group_size
        weight = permuted(weight, g_idx[torch.randperm(k, generator=generator)])
    elif order == "uneven":
        g_idx = torch.randint(0, weight.num_groups, (k,), dtype=torch.int32, generator=generator)
        weight = permuted(weight, g_idx)
    tensors = FORMATS[version].write(weight)
    config = config_of(weight, version)
    assert torch.equal(FORMATS[version].read(tensors, config).dequantize(), weight.dequantize())
    want = gptq_loop(tensors, bits=bits, version=version, sym=zero_form == "symmetric")
    assert torch.equal(weight.dequantize(), want)
    # Symmetric weights mean the same to a reader that looks at the zero points.
    assert torch.equal(FORMATS[version].read(tensors, {**config, "sym": False}).dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (make_weight(12, 32, 16), r"gptq cannot hold it, because its shape \(12, 32\) is no multiple of 8"),
        (make_weight(8, 36, -1), r"its shape \(8, 36\) is no multiple of 8"),
        (make_weight(8, 32, 16, zero_form="offsets"), "it has float offsets, and zero points are integers"),
        (make_weight(8, 32, 16, dtype=torch.float32), r"its scales are torch.float32, not float16 or bfloat16"),
        (make_weight(8, 32, 16, encoding="nf4"), "its codes are nf4, not integers"),
    ],
)
def test_what_it_cannot_hold(weight: QuantizedWeight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTQ.write(weight)


@pytest.mark.parametrize(
    ("changes", "config", "error", "message"),
    [
        ({"scales": None}, {}, ValueError, "want scales as well"),
        ({"scales": torch.zeros(3, 16).half()}, {}, ValueError, r"scales: got shape \(3, 16\), want \(2, 16\)"),
        ({"scales": torch.zeros(2, 16).double()}, {}, TypeError, "scales: got torch.float64, want torch.float16 or"),
        ({"qzeros": torch.zeros(2, 16).int()}, {}, ValueError, r"qzeros: got shape \(2, 16\), want \(2, 2\)"),
        ({"qweight": torch.zeros(8, 16).long()}, {}, TypeError, "qweight: got torch.int64, want torch.int32"),
        ({"g_idx": torch.zeros(63).int()}, {}, ValueError, r"g_idx: got shape \(63,\), want \(64\)"),
        ({"g_idx": torch.full((64,), 2).int()}, {}, ValueError, "g_idx: got groups from 2 to 2"),
        ({}, {"bits": 3}, ValueError, "bits: got 3, want 4 or 8"),
    ],
)
def test_wrong_tensors(
    changes: dict[str, torch.Tensor | None], config: dict[str, int], error: type[Exception], message: str
) -> None:
    layer = {**random_layer(16, 64, 2, 4, seed=1), **changes}
    tensors = {name: tensor for name, tensor in layer.items() if tensor is not None}
    with pytest.raises(error, match=message):
        GPTQ.read(tensors, {"bits": 4, "group_size": 32, "sym": True, **config})

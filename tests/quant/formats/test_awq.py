"""AWQ against a loop over the bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenshare.quant import QuantizedWeight
from evenshare.quant.formats.awq import AWQ
from tests.quant.formats.helpers import SEEDS, awq_loop, make_weight, permuted


@settings(max_examples=30, deadline=None)
@given(
    n=st.sampled_from([8, 24]),
    k=st.sampled_from([16, 33, 96]),
    group_size=st.sampled_from([16, 32, -1]),
    zero_form=st.sampled_from(["symmetric", "zeros"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=SEEDS,
)
def test_written_as_the_bits_say_and_read_again(
    n: int, k: int, group_size: int, zero_form: str, dtype: torch.dtype, seed: int
) -> None:
    weight = make_weight(n, k, group_size, zero_form=zero_form, dtype=dtype, seed=seed)
    tensors = AWQ.write(weight)
    assert torch.equal(awq_loop(tensors, weight.group_size), weight.dequantize())
    again = AWQ.read(tensors, AWQ.describe({"layer": weight}, []))  # type: ignore[misc]
    assert torch.equal(again.dequantize(), weight.dequantize())


@settings(max_examples=20, deadline=None)
@given(n=st.sampled_from([8, 24]), k=st.sampled_from([32, 96]), seed=SEEDS)
def test_reads_what_the_bits_say(n: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "qweight": torch.randint(-(2**31), 2**31, (k, n // 8), generator=generator).int(),
        "qzeros": torch.randint(-(2**31), 2**31, (k // 32, n // 8), generator=generator).int(),
        "scales": torch.randn(k // 32, n, generator=generator).half(),
    }
    assert torch.equal(AWQ.read(tensors, {"group_size": 32}).dequantize(), awq_loop(tensors, 32))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (permuted(make_weight(8, 32, 16), torch.arange(32) % 2), r"it has a permutation \(act-order\)"),
        (make_weight(12, 32, 16), "its 12 rows are no multiple of 8"),
        (make_weight(8, 32, 16, bits=8), "its codes have 8 bits, not 4"),
        (make_weight(8, 32, 16, zero_form="offsets"), "it has float offsets"),
        (make_weight(8, 32, 16, dtype=torch.float32), "its scales are torch.float32"),
    ],
)
def test_what_it_cannot_hold(weight: QuantizedWeight, message: str) -> None:
    with pytest.raises(ValueError, match=f"awq cannot hold it, because {message}"):
        AWQ.write(weight)


def test_wrong_shapes() -> None:
    tensors = AWQ.write(make_weight(8, 64, 32))
    with pytest.raises(ValueError, match=r"scales: got shape \(2, 8\), want \(4, 8\)"):
        AWQ.read(tensors, {"group_size": 16})
    with pytest.raises(ValueError, match=r"qzeros: got shape \(2, 2\), want \(2, 1\)"):
        AWQ.read({**tensors, "qzeros": torch.zeros(2, 2).int()}, {"group_size": 32})


@pytest.mark.parametrize(
    ("config", "matches"),
    [
        ({"version": "gemm"}, True),
        ({"version": "GEMM", "bits": 4}, True),
        ({"w_bit": 4, "q_group_size": 128}, True),
        ({"version": "gemv"}, False),
        ({"version": "gemm", "bits": 8}, False),
        ({"version": "gemm", "zero_point": False}, False),
    ],
)
def test_configurations(config: dict[str, object], matches: bool) -> None:
    assert AWQ.matches({"quant_method": "awq", **config}) == matches

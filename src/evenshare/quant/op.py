"""`torch.ops.evenshare.w4a16`: the product as an operator that torch.compile and torch.export keep whole."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch

from evenshare.quant.functions import w4a16_matmul, w8a16_matmul
from evenshare.quant.weight import QuantizedWeight

# An operator takes tensors, but packed forms belong to the `QuantizedWeight` around them: this leads back to it, by the id of its
# codes. An entry goes with its weight, and the weight keeps its codes alive, so no id is met again while it stands for another.
_WEIGHTS: WeakValueDictionary[int, QuantizedWeight] = WeakValueDictionary()

# Neither custom_op nor a mutated output: their bookkeeping costs 50 to 150 us a call, `define` and `impl` cost 18.
_LIBRARY = torch.library.Library("evenshare", "FRAGMENT")
_LIBRARY.define(
    "w4a16(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? offsets, Tensor? permutation, Tensor? bias, "
    "int k, int group_size, int bits, str encoding, str? activation, str? backend) -> Tensor"
)


def remember(weight: QuantizedWeight) -> QuantizedWeight:
    """Let calls of the operator with the tensors of `weight` use its packed forms; returns `weight`."""
    _WEIGHTS[id(weight.codes)] = weight
    return weight


def call(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    offsets: torch.Tensor | None,
    permutation: torch.Tensor | None,
    bias: torch.Tensor | None,
    k: int,
    group_size: int,
    bits: int,
    encoding: str,
    activation: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """activation(x Wᵀ + bias) [..., n] for x [..., k]; the weight by the fields of `QuantizedWeight`, 4 or 8 bits.

    Unless a weight of these very tensors is remembered, it is packed anew for this call.
    """
    return torch.ops.evenshare.w4a16(
        x, codes, scales, zeros, offsets, permutation, bias, k, group_size, bits, encoding, activation, backend
    )


def _compute(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    offsets: torch.Tensor | None,
    permutation: torch.Tensor | None,
    bias: torch.Tensor | None,
    k: int,
    group_size: int,
    bits: int,
    encoding: str,
    activation: str | None,
    backend: str | None,
) -> torch.Tensor:
    weight = _WEIGHTS.get(id(codes))
    tensors = (codes, scales, zeros, offsets, permutation)
    form = (k, group_size, bits, encoding)
    if weight is None or not _is(weight, tensors, form):
        weight = QuantizedWeight(codes, scales, k, group_size, bits, zeros, offsets, encoding, permutation)
    product = w4a16_matmul if bits == 4 else w8a16_matmul
    return product(x, weight, bias=bias, activation=activation, backend=backend)


def _is(weight: QuantizedWeight, tensors: tuple[torch.Tensor | None, ...], form: tuple[int, int, int, str]) -> bool:
    own = (weight.codes, weight.scales, weight.zeros, weight.offsets, weight.permutation)
    same = all(a is b for a, b in zip(own, tensors, strict=True))
    return same and (weight.k, weight.group_size, weight.bits, weight.encoding) == form


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("w4a16", _compute, _key)


@torch.library.register_fake("evenshare::w4a16", lib=_LIBRARY)
def _shape(x: torch.Tensor, codes: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])

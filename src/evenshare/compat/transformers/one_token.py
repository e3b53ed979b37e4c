"""The fused layers' work for one token on a CPU in bfloat16: the operators, and nothing around them.

A step of a small model is bound by the number of calls, not by arithmetic: for SmolLM2-135M on two cores `FusedLayer.forward`
takes 13.2 ms a token, of which the products take 7. Looking everything up beforehand and running the layers in one loop
saves 1.5 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from evenshare.compat.transformers.cache import InPlaceCache
from evenshare.quant import QuantLinear
from evenshare.quant.cpu import Int4Weight, pack

if TYPE_CHECKING:
    from evenshare.compat.transformers.layers import FusedLayer

_Operand = tuple[torch.Tensor, int, torch.Tensor]


@dataclass(frozen=True)
class _Step:
    """A layer's tensors: norm weights [d] and the operands of torch's int4 product."""

    attn_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qkv: _Operand
    o: _Operand
    gate_up: _Operand
    down: _Operand


class TokenLoop:
    """All layers for one token. Layers are alike but for their weights."""

    def __init__(self, layers: Sequence[FusedLayer], steps: list[_Step]) -> None:
        first = layers[0]
        self.q_heads, self.kv_heads, self.head_dim = first.q_heads, first.kv_heads, first.head_dim
        self.eps, self.scaling, self.window = first.eps, first.scaling, first.sliding_window
        self.steps = steps
        self.zeros = torch.zeros_like(steps[0].attn_norm)[None]

    def serves(self, length: int) -> bool:
        """Whether a token that sees `length` keys sees all of them."""
        return self.window is None or length <= self.window

    def run(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: InPlaceCache) -> torch.Tensor:
        """x [1, d], changed in place and returned; cos, sin [1, D] as `FusedRotary` makes them. The token joins the cache."""
        product, norm_of = torch._weight_int4pack_mm_for_cpu, torch.linalg.vector_norm
        q_heads, kv_heads, head_dim, eps = self.q_heads, self.kv_heads, self.head_dim, self.eps
        zeros, width, rotated_heads, half = self.zeros, x.shape[1], q_heads + kv_heads, head_dim // 2
        cache.begin_step(1, 1, kv_heads, head_dim, x)
        for step, slot, keys, values in zip(self.steps, cache.slots, cache.keys, cache.values, strict=True):
            # An RMS norm in two operators: on a CPU the norm can be a Python number without waiting for anything.
            scale = (norm_of(x, dtype=torch.float32).item() ** 2 / width + eps) ** -0.5
            heads = product(torch.addcmul(zeros, x, step.attn_norm, value=scale), *step.qkv).view(-1, head_dim)
            rotated = heads[:rotated_heads]
            torch.addcmul(rotated * cos, rotated.roll(half, 1), sin, out=rotated)
            slot.copy_(heads[q_heads:].view(slot.shape))
            packed = heads[:q_heads].view(
                1, kv_heads, -1, head_dim
            )  # the query heads of a KV head as rows of one matrix
            out = F.scaled_dot_product_attention(packed, keys, values, scale=self.scaling)
            x.add_(product(out.view(1, -1), *step.o))
            scale = (norm_of(x, dtype=torch.float32).item() ** 2 / width + eps) ** -0.5
            both = product(torch.addcmul(zeros, x, step.mlp_norm, value=scale), *step.gate_up)
            gate, up = both.view(2, 1, -1).unbind(0)
            x.add_(product(F.silu(gate, inplace=True).mul_(up), *step.down))
        return x


def make_token_loop(layers: Sequence[FusedLayer]) -> TokenLoop | None:
    """None if a layer is not made of what the loop computes: int4 products without bias, on a CPU, no norm of q and k."""
    steps = []
    for layer in layers:
        linears = (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
        operands = [_operand(linear) for linear in linears]
        if layer.q_norm is not None or layer.attn_norm.dtype != torch.bfloat16 or None in operands:
            return None
        width = layer.attn_norm.shape[0] // 2
        norms = (layer.attn_norm.detach()[:width], layer.mlp_norm.detach()[:width])
        steps.append(_Step(*norms, *operands))  # type: ignore[arg-type]
    return TokenLoop(layers, steps) if steps else None


def _operand(linear: QuantLinear) -> _Operand | None:
    if linear.bias is not None or linear.backend == "triton" or linear.quantized.device.type != "cpu":
        return None
    packed = pack(linear.quantized, torch.bfloat16)
    if not isinstance(packed, Int4Weight) or packed.repeats != 1:
        return None
    return packed.codes, packed.group_size, packed.scales_and_zeros

"""Tiny quantised checkpoints on disk, and the same model with dequantised weights as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from evenshare.quant import QuantizedWeight, quantize
from evenshare.quant.formats.write import write_checkpoint
from evenshare.quant.weight import order_by_group

GROUP_SIZE = 32
Quantise = Callable[[torch.Tensor], QuantizedWeight]


def toy_llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.3, dtype="float32",
        bos_token_id=None, eos_token_id=None, **options,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


def act_order(dense: torch.Tensor, **options: Any) -> QuantizedWeight:
    """Groups of columns that are no neighbours, as desc_act and actorder make them."""
    g_idx = torch.randperm(dense.shape[1]) // GROUP_SIZE
    permutation, group_size, _ = order_by_group(g_idx, dense.shape[1] // GROUP_SIZE, GROUP_SIZE)
    stored = quantize(dense[:, permutation.long()], group_size, **options)
    return QuantizedWeight(
        stored.codes, stored.scales, dense.shape[1], group_size, zeros=stored.zeros, permutation=permutation
    )


def write_toy(folder: Path, format: str, quantise: Quantise, **options: Any) -> LlamaForCausalLM:
    """Write a toy Llama whose layers `quantise` makes 4-bit; returns it dequantised, in float32."""
    model = toy_llama(**options)
    weights: dict[str, QuantizedWeight] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            weights[name] = quantise(module.weight.detach())
            module.weight.data = weights[name].dequantize()
    state = model.state_dict()
    other = {key: tensor for key, tensor in state.items() if key.removesuffix(".weight") not in weights}
    write_checkpoint(folder, weights, other, {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}, format)
    return model

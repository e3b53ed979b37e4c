"""Quantised modules: state dicts, devices, compilation, and whole models."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenshare.quant import (
    QuantEmbedding,
    QuantizedWeight,
    QuantLinear,
    op,
    quantize,
    quantize_codebook,
    quantize_model,
)
from evenshare.quant.linear import find_linears, is_ignored
from tests.quant.helpers import assert_product, random_weight


def permuted(n: int, k: int) -> QuantizedWeight:
    weight = random_weight(n, k, 16, "zeros")
    return QuantizedWeight(
        weight.codes, weight.scales, k, 16, zeros=weight.zeros, permutation=torch.randperm(k, dtype=torch.int32)
    )


WEIGHTS: dict[str, Callable[[], QuantizedWeight]] = {
    "symmetric": lambda: random_weight(48, 64, 32),
    "zeros": lambda: random_weight(48, 64, 32, "zeros"),
    "offsets": lambda: random_weight(48, 64, 32, "offsets", dtype=torch.float32),
    "8 bits": lambda: random_weight(48, 64, 32, bits=8),
    "odd k": lambda: random_weight(5, 33, -1, "zeros"),
    "permuted": lambda: permuted(48, 64),
    "nvfp4": lambda: quantize_codebook(torch.randn(48, 64), "nvfp4"),
}


def like(layer: QuantLinear) -> QuantLinear:
    """Another layer of the same form with other values."""
    other = copy.deepcopy(layer)
    for name, tensor in other.state_dict().items():
        if name != "_extra_state":
            tensor.copy_(tensor.flip(0))
    return other


def through_torch(state: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


def through_safetensors(state: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(state, folder / "state.safetensors")
    return safetensors.load_file(folder / "state.safetensors")


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("store", [through_torch, through_safetensors])
@pytest.mark.parametrize("name", WEIGHTS)
def test_state_dict_round_trip(name: str, store: Any, assign: bool, tmp_path: Path) -> None:
    layer = QuantLinear(WEIGHTS[name](), torch.randn(WEIGHTS[name]().n))
    x = torch.randn(3, layer.in_features)
    loaded = like(layer)
    assert not torch.equal(loaded(x), layer(x))  # and its weight is packed now
    loaded.load_state_dict(store(layer.state_dict(), tmp_path), assign=assign)
    for part in ("codes", "scales", "zeros", "offsets", "permutation"):
        want, got = getattr(layer, part), getattr(loaded, part)
        assert (want is None and got is None) or (want.dtype == got.dtype and torch.equal(want, got))
        assert got is getattr(loaded.quantized, part)
    assert torch.equal(loaded(x), layer(x))


def test_state_goes_into_a_layer_on_the_meta_device() -> None:
    linear = nn.Linear(64, 48)
    layer = QuantLinear.from_linear(linear, 32, symmetric=False, refine=True)
    with torch.device("meta"):
        empty = QuantLinear.from_linear(nn.Linear(64, 48), 32, symmetric=False)
    assert empty.quantized.device.type == "meta"
    empty.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(2, 64)
    assert torch.equal(empty(x), layer(x))
    assert_product(layer(x), x, layer.quantized, linear.bias.detach())


def test_wrong_states_are_named() -> None:
    layer = QuantLinear(random_weight(48, 64, 32, "zeros"))
    state = layer.state_dict()
    assert set(state) == {"codes", "scales", "zeros", "_extra_state"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"zeros"'):
        layer.load_state_dict({name: tensor for name, tensor in state.items() if name != "zeros"})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"zeros"'):
        QuantLinear(random_weight(48, 64, 32)).load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch for codes"):
        QuantLinear(random_weight(32, 64, 32, "zeros")).load_state_dict(state)
    with pytest.raises(ValueError, match=r"state dict: got \(k, group_size, bits, encoding\) = \[63, "):
        QuantLinear(random_weight(48, 64, 32)).load_state_dict(QuantLinear(random_weight(48, 63, 32)).state_dict())


@pytest.mark.parametrize("module", [QuantLinear, lambda weight: QuantEmbedding(weight, torch.float16)])
def test_moving_keeps_dtypes(module: Any) -> None:
    layer = module(random_weight(32, 64, 32, "offsets", dtype=torch.float32))
    packed = layer.quantized
    layer.half()
    assert layer.quantized is packed  # nothing moved, so what was packed stays
    layer.to("meta", torch.bfloat16)
    assert (layer.codes.dtype, layer.scales.dtype, layer.offsets.dtype) == (torch.uint8, torch.float32, torch.float32)
    assert layer.quantized.device.type == layer.codes.device.type == "meta"
    assert layer.to_empty(device="cpu").quantized.device.type == "cpu"


def test_replaced_buffers_count() -> None:
    """As loaders do it that set tensors one by one."""
    layer, other = (QuantLinear(random_weight(48, 64, 32, "zeros")) for _ in range(2))
    x = torch.randn(2, 64)
    layer(x)
    for name in ("codes", "scales", "zeros"):
        setattr(layer, name, getattr(other, name))
    assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_hold_no_packed_forms(duplicate: Any) -> None:
    layer, x = QuantLinear(random_weight(48, 64, 32)), torch.randn(2, 64)
    want = layer(x)
    other = duplicate(layer)
    assert not other.quantized.packed
    assert torch.equal(other(x), want)
    buffer = io.BytesIO()
    pickle.dump(layer, buffer)
    assert buffer.tell() < 48 * 64 * 4  # less than the dequantised weight that the layer keeps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", WEIGHTS)
def test_operator(name: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[name]()
    x, bias = torch.randn(2, 3, weight.k, dtype=dtype), torch.randn(weight.n, dtype=dtype)
    layer = QuantLinear(weight, bias)
    parts = (layer.codes, layer.scales, layer.zeros, layer.offsets, layer.permutation)
    form = (weight.k, weight.group_size, weight.bits, weight.encoding)
    assert torch.equal(op.call(x, *parts, bias, *form), layer(x))
    torch.library.opcheck(torch.ops.evenshare.w4a16.default, (x, *parts, bias, *form, "silu", None))


def test_operator_packs_remembered_weights_once() -> None:
    layer = QuantLinear(random_weight(48, 64, 32))
    weight, x = layer.quantized, torch.randn(2, 64)
    form = (64, 32, 4, "integer")
    op.call(x, layer.codes, layer.scales, None, None, None, None, *form)
    (packed,) = weight.packed.values()
    op.call(x, layer.codes, layer.scales, None, None, None, None, *form)
    assert [id(kept) for kept in weight.packed.values()] == [id(packed)]
    scales = 2 * layer.scales  # not the tensors that are remembered
    y = op.call(x, layer.codes, scales, None, None, None, None, *form)
    torch.testing.assert_close(y, 2 * layer(x))
    key = id(layer.codes)
    del layer, weight
    gc.collect()
    assert key not in op._WEIGHTS


@pytest.mark.parametrize("name", ["zeros", "8 bits", "permuted"])
def test_compiles_without_graph_breaks(name: str) -> None:
    torch._dynamo.reset()
    layer = QuantLinear(WEIGHTS[name](), torch.randn(48))
    model = nn.Sequential(layer, nn.SiLU())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.inference_mode():
        for rows in (1, 5):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(compiled(x), model(x))
    assert list(layer.quantized.packed) == [("cpu", torch.float32)]  # packed by the first call, found by the others
    graph = torch.export.export(model, (torch.randn(2, 64),)).graph
    assert torch.ops.evenshare.w4a16.default in [node.target for node in graph.nodes]


def test_compiled_layer_runs_the_kernel(device: torch.device) -> None:
    """By the interpreter, or on a GPU, where a layer moves with its packed form left behind."""
    torch._dynamo.reset()
    layer = QuantLinear(random_weight(48, 64, 32, "zeros"), torch.randn(48), backend="triton").to(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 64, dtype=torch.float16, device=device)
    with torch.inference_mode():
        assert_product(compiled(x), x, layer.quantized, layer.bias)
    assert {"triton", ("hopper", False)} & layer.quantized.packed.keys()


def toy() -> nn.Module:
    return nn.ModuleDict(
        {"body": nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)), "lm_head": nn.Linear(64, 96)}
    )


def test_quantize_model() -> None:
    model, seen = toy(), []
    dense = model["body"][2].weight.detach().clone()
    same = quantize_model(model, 32, refine=True, progress=lambda *done: seen.append(done))
    assert same is model
    assert seen == [("body.0", 1, 2), ("body.2", 2, 2)]
    assert isinstance(model["lm_head"], nn.Linear)
    want = quantize(dense, 32, refine=True)
    assert torch.equal(model["body"][2].codes, want.codes)
    with torch.device("meta"):
        empty = quantize_model(toy(), 32)
    empty.load_state_dict(model.state_dict(), assign=True)
    x = torch.randn(2, 64)
    assert torch.equal(empty["body"](x), model["body"](x))


def test_ignored_modules() -> None:
    assert find_linears(toy()) == ["body.0", "body.2", "lm_head"]
    assert find_linears(toy(), ["body.*"]) == ["lm_head"]
    assert is_ignored("layers.3.mlp.gate", ["mlp.gate"])
    assert not is_ignored("layers.3.mlp.gate_proj", ["mlp.gate", "gate"])
    with pytest.raises(ValueError, match=r"model: got one without an nn.Linear that is not ignored"):
        quantize_model(toy(), 32, ignore=["*"])


def test_from_linear_refuses() -> None:
    with pytest.raises(TypeError, match=r"linear: got ReLU, want an nn.Linear"):
        QuantLinear.from_linear(nn.ReLU())  # type: ignore[arg-type]

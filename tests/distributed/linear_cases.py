"""Layers split over ranks against the whole layer in float64, and head-parallel attention against all heads."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from evenshare import attention, matmul
from evenshare.distributed import ColumnParallelLinear, RowParallelLinear, even_share, parallelize, share_heads
from evenshare.quant import QuantLinear, quantize_model
from tests.attention.helpers import int32
from tests.distributed.spawn import Case, Place
from tests.quant.helpers import random_permutation, random_weight

N, K, M = 96, 128, 6


def make_layer(kind: str, n: int, k: int, bias: bool, place: Place, dtype: torch.dtype) -> nn.Linear | QuantLinear:
    """kind: "16-bit", a zero form or encoding of a 4-bit weight, "8-bit", "act-order" or "padded act-order"."""
    layer = nn.Linear(k, n, bias=bias, dtype=dtype)
    layer.weight.data.copy_(torch.randn(n, k).to(dtype) / k**0.5)
    if kind != "16-bit":
        order = {"act-order": random_permutation(k), "padded act-order": random_permutation(k, 32)}.get(kind)
        form = kind if order is None and kind not in ("8-bit", "per channel") else "zeros"
        bits = 8 if kind == "8-bit" else 4
        weight = random_weight(n, k, -1 if kind == "per channel" else 32, form, bits, permutation=order)
        return QuantLinear(weight, layer.bias).to(place.device)
    return layer.to(place.device)


def dense_weight(layer: nn.Linear | QuantLinear) -> torch.Tensor:
    return (layer.quantized.dequantize() if isinstance(layer, QuantLinear) else layer.weight).double()


def whole_product(layer: nn.Linear | QuantLinear, x: torch.Tensor) -> torch.Tensor:
    y = x.double() @ dense_weight(layer).T
    return y if layer.bias is None else y + layer.bias.double()


def assert_close(got: torch.Tensor, want: torch.Tensor, magnitudes: torch.Tensor, num_roundings: int) -> None:
    """magnitudes: of want, the sums of its terms' magnitudes. float32: sqrt(k) eps / 2 of them, a sum's probabilistic bound (Higham
    and Mary, 2019), and the roundings. 16 bits: the roundings, of numbers below a quarter of the magnitudes, as the sum of any
    part of some hundred random terms is.
    """
    assert got.shape == want.shape
    eps = torch.finfo(got.dtype).eps
    bound = (K**0.5 / 2 + num_roundings) * eps * magnitudes
    if got.dtype != torch.float32:
        bound = num_roundings * eps / 2 * magnitudes / 4
    assert ((got.double() - want).abs() <= bound).all()


KINDS = ("16-bit", "symmetric", "zeros", "offsets", "nf4", "8-bit", "per channel", "act-order", "padded act-order")


def check_row_parallel(
    place: Place, kind: str = "16-bit", unit: int = 1, k: int = K, reduce: str = "all", num_chunks: int = 1, m: int = M
) -> None:
    for dtype in (*place.dtypes, torch.float32):
        torch.manual_seed(0)
        layer = make_layer(kind, N, k, True, place, dtype)
        x = torch.randn(m, k).to(place.device, dtype)
        residual = torch.randn(m, N).to(place.device, dtype)
        want = whole_product(layer, x) + residual.double()
        magnitudes = (
            x.double().abs() @ dense_weight(layer).abs().T + layer.bias.double().abs() + residual.double().abs()
        )
        share = even_share(k, place.rank, place.size, unit)
        part = RowParallelLinear(layer, unit=unit, reduce=reduce, num_chunks=num_chunks)
        own = x[:, share.start : share.stop]
        rows = slice(None)
        if reduce == "tokens":
            rows = slice(place.rank * m // place.size, (place.rank + 1) * m // place.size)
        out = part(own, residual[rows])
        # A product's own errors of a 16-bit weight, its result, and a rounding of every sum.
        num_roundings = 2 + 2 * place.size
        assert_close(out, want[rows], magnitudes[rows], num_roundings)
        assert torch.equal(part(own, residual[rows]), out)
        if reduce == "all":
            assert torch.equal(part(own[None], residual[None]), out[None])
            assert_close(part(own), want - residual.double(), magnitudes, num_roundings)


def check_column_parallel(place: Place, kind: str = "16-bit", gated: bool = False, gather: bool = False) -> None:
    for dtype in (*place.dtypes, torch.float32):
        torch.manual_seed(0)
        layer = make_layer(kind, N, K, True, place, dtype)
        x = torch.randn(M, K).to(place.device, dtype)
        activation = "silu_and_multiply" if gated else None
        part = ColumnParallelLinear(layer, parts=2 if gated else 1, activation=activation, gather_output=gather)
        got = part(x)
        weight, bias = dense_weight(layer).to(dtype), layer.bias
        rows = slice(None)
        if not gather:
            n = N // 2 if gated else N
            share = even_share(n, place.rank, place.size)
            rows = torch.tensor([*share, *range(n + share.start, n + share.stop)] if gated else [*share])  # type: ignore[assignment]
        # One layer of the same rows is the same product: the same bits, but for the order of a sum.
        want = matmul(x, weight[rows].T.contiguous(), bias=bias[rows], activation=activation)
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 4 * torch.finfo(dtype).eps * want.abs().max()


def check_mlp(place: Place) -> None:
    """Column- then row-parallel, named by patterns as a transformers plan names them; 5 groups of 32 are uneven shares."""
    torch.manual_seed(0)
    dtype = torch.float32
    up, down = make_layer("zeros", 160, K, True, place, dtype), make_layer("act-order", N, 160, True, place, dtype)
    x = torch.randn(M, K).to(place.device, dtype)
    inner = whole_product(up, x)
    magnitudes = (x.double().abs() @ dense_weight(up).abs().T + inner.abs()) @ dense_weight(down).abs().T
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"up_proj": up, "down_proj": down})})
    parallelize(model, {"*.up_proj": "colwise", "*.down_proj": "rowwise"}, unit=32)
    got = model.mlp.down_proj(model.mlp.up_proj(x))
    assert_close(got, whole_product(down, inner), magnitudes, 2 * place.size)


def check_head_parallel(place: Place, heads: tuple[int, int] = (8, 4)) -> None:
    """A rank's heads alone, from a fused projection's rows, are those of all heads."""
    torch.manual_seed(0)
    dim, lens = 16, [7, 1, 12]
    layer = make_layer("16-bit", (heads[0] + 2 * heads[1]) * dim, K, False, place, torch.float32)
    x = torch.randn(sum(lens), K).to(place.device)
    indptr = int32([0, 7, 8, 20], place.device)

    def attend(y: torch.Tensor, num_qo_heads: int, num_kv_heads: int) -> torch.Tensor:
        q, k, v = y.unflatten(1, (-1, dim)).split((num_qo_heads, num_kv_heads, num_kv_heads), 1)
        return attention(q, k, v, qo_indptr=indptr, kv_indptr=indptr, causal=True)

    want = attend(whole_product(layer, x).float(), *heads)
    share = share_heads(*heads, place.rank, place.size)
    q, kv = share.rows(dim, of="qo"), share.rows(dim, of="kv")
    first = [heads[0] * dim, (heads[0] + heads[1]) * dim]
    rows = [q, *(range(begin + kv.start, begin + kv.stop) for begin in first)]
    got = attend(ColumnParallelLinear(layer, outputs=rows)(x), len(share.qo), len(share.kv))
    torch.testing.assert_close(got, want[:, share.qo.start : share.qo.stop], rtol=1e-5, atol=1e-5)


def check_device_mesh(place: Place) -> None:
    """A mesh of two dimensions: the sum is over one of them; and weights that are DTensors already."""
    dtype = place.dtypes[0]
    mesh = init_device_mesh(place.device.type, (place.size // 2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    layer = make_layer("16-bit", N, K, True, place, dtype)
    x = torch.randn(M, K).to(place.device, dtype)
    want = whole_product(layer, x)
    part = RowParallelLinear(layer, group=mesh["tensor"])
    own = x.chunk(2, 1)[mesh["tensor"].get_local_rank()]
    magnitudes = x.double().abs() @ dense_weight(layer).abs().T + want.abs()
    assert_close(part(own), want, magnitudes, 4)
    layer.weight = nn.Parameter(
        distribute_tensor(layer.weight.detach(), mesh["tensor"], [Shard(1)]), requires_grad=False
    )
    assert torch.equal(RowParallelLinear(layer, group=mesh["tensor"])(own), part(own))
    with pytest.raises(ValueError, match="device mesh of 2 dimensions"):
        RowParallelLinear(layer, group=mesh)


CASES: dict[str, Case] = {
    **{f"row-parallel, {kind}": partial(check_row_parallel, kind=kind) for kind in KINDS},
    **{f"row-parallel, whole groups, {kind}": partial(check_row_parallel, kind=kind, unit=32) for kind in KINDS},
    "row-parallel, uneven groups": partial(check_row_parallel, kind="zeros", unit=32, k=224),
    "row-parallel, uneven": partial(check_row_parallel, k=101),
    "row-parallel, into tokens": partial(check_row_parallel, kind="zeros", reduce="tokens", m=8),
    "row-parallel, no rows": partial(check_row_parallel, kind="zeros", m=0),
    "row-parallel, into tokens, no rows": partial(check_row_parallel, reduce="tokens", m=0),
    "row-parallel, in chunks": partial(check_row_parallel, kind="zeros", num_chunks=4),
    "row-parallel, more chunks than rows": partial(check_row_parallel, num_chunks=4, m=1),
    **{f"column-parallel, {kind}": partial(check_column_parallel, kind=kind) for kind in KINDS},
    **{f"column-parallel, gated, {kind}": partial(check_column_parallel, kind=kind, gated=True) for kind in KINDS[:2]},
    **{
        f"column-parallel, gathered, {kind}": partial(check_column_parallel, kind=kind, gather=True)
        for kind in KINDS[:2]
    },
    "column- and row-parallel by name": check_mlp,
    **{
        f"head-parallel, {q}/{kv} heads": partial(check_head_parallel, heads=(q, kv))
        for q, kv in ((8, 4), (8, 1), (12, 2))
    },
    "device mesh": check_device_mesh,
}


def check_transformers(place: Place) -> None:
    """A Llama whose linears are replaced by the plan that its configuration names, 4-bit and 16-bit."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        attn_implementation="eager",
    )
    ids = torch.randint(50, (2, 7), device=place.device)
    for quantised in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(place.device).eval()
        if quantised:
            quantize_model(model, 32)
        with torch.no_grad():
            want = model(ids).logits
            parallelize(model, model._tp_plan)
            got = model(ids).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def check_guide(place: Place) -> None:
    """The code of docs/distributed.md, which says that it runs on several ranks as it does on one."""
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    code = re.sub(r"^dist\.(init|destroy)_process_group\(.*\n", "", "\n".join(blocks), flags=re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(code, "distributed.md", "exec"), names)
    assert names["num_ranks"] == place.size
    assert names["whole"].shape == (3200, 8, 64)
    assert names["y"].shape == (3200, 512)


# On as many ranks as the model has KV heads.
PAIR_CASES: dict[str, Case] = {"a transformers model": check_transformers, "the guide's code": check_guide}

"""Norms, activations, rotary embedding, pages, bits and merged states under FlashInfer's names."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import evenshare.compat.flashinfer as flashinfer
from evenshare.compat.flashinfer.triton.cascade import variable_length_merge_states
from tests.compat.flashinfer.oracle import turn


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == want.shape
    assert float((got.double() - want.double()).abs().max()) <= tolerance


def test_norms() -> None:
    x, residual, weight, bias = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16), torch.randn(16)
    norm = lambda y, w: F.rms_norm(y.double(), (16,), w.double(), 1e-6)  # noqa: E731
    close(flashinfer.rmsnorm(x, weight), norm(x, weight))
    out = torch.empty_like(x)
    assert flashinfer.rmsnorm(x, weight, 1e-6, out) is out
    close(flashinfer.gemma_rmsnorm(x, weight), norm(x, weight + 1))
    close(flashinfer.layernorm(x, weight, bias), F.layer_norm(x.double(), (16,), weight.double(), bias.double(), 1e-6))
    for fused, w in ((flashinfer.fused_add_rmsnorm, weight), (flashinfer.gemma_fused_add_rmsnorm, weight + 1)):
        y, total = x.clone(), residual.clone()
        assert fused(y, total, weight) is None
        close(total, x + residual)
        close(y, norm(x + residual, w))
    scale = torch.tensor([0.1])
    codes, total = torch.empty(3, 16, dtype=torch.float8_e4m3fn), residual.clone()
    flashinfer.rmsnorm_quant(codes, x, weight, scale)
    close(codes.float() * 0.1, norm(x, weight), tolerance=0.3)
    flashinfer.fused_add_rmsnorm_quant(codes, x, total, weight, scale)
    close(codes.float() * 0.1, norm(x + residual, weight), tolerance=0.3)
    close(total, x + residual)


def test_activations() -> None:
    x = torch.randn(2, 3, 8)
    gate, up = x.double().chunk(2, -1)
    out = torch.empty(2, 3, 4)
    assert flashinfer.silu_and_mul(x, out) is out
    close(out, F.silu(gate) * up)
    close(flashinfer.gelu_and_mul(x), F.gelu(gate) * up)
    close(flashinfer.gelu_tanh_and_mul(x), F.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("inplace", [False, True])
def test_rope(inplace: bool) -> None:
    q, k = torch.randn(6, 3, 16), torch.randn(6, 1, 16)
    positions = torch.tensor([5, 6, 0, 1, 2, 9], dtype=torch.int32)
    ragged = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32), torch.tensor([5, 7, 0, 9], dtype=torch.int32)
    suffix = "_inplace" if inplace else ""

    def call(name: str, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = q.clone(), k.clone()
        got = getattr(flashinfer, name + suffix)(x, y, *arguments, **options)
        if inplace:
            assert got is None
        else:
            assert torch.equal(x, q)
        return (x, y) if inplace else got

    for got in (call("apply_rope", *ragged), call("apply_rope_pos_ids", positions)):
        close(got[0], turn(q, positions))
        close(got[1], turn(k, positions))
    got = call("apply_rope_pos_ids", positions, 8, True, 2.0, 5e3)
    pairs = q[..., :8].unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2)  # interleaved pairs as halves
    want = turn(pairs, positions, 2.0, 5e3).unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2)
    close(got[0], torch.cat((want, q[..., 8:].double()), -1))
    # Wavelengths below old_context_len / high_freq_factor are kept, those above old_context_len / low_freq_factor stretched.
    for long, options in ((1.0, {"old_context_len": 10**9}), (8.0, {"old_context_len": 1})):
        for got in (
            call("apply_llama31_rope", *ragged, **options),
            call("apply_llama31_rope_pos_ids", positions, **options),
        ):
            close(got[0], turn(q, positions, long, 5e5))


@pytest.mark.parametrize("is_neox", [False, True])
def test_rope_with_cos_sin_cache(is_neox: bool) -> None:
    positions = torch.tensor([3, 0, 11])
    q, k = torch.randn(3, 2 * 16), torch.randn(3, 16)
    radians = torch.arange(12).double()[:, None] * 1e4 ** (-torch.arange(8).double() / 8)
    table = torch.cat((radians.cos(), radians.sin()), -1).float()
    got = flashinfer.apply_rope_with_cos_sin_cache(positions, q, k, 16, table, is_neox)
    want = flashinfer.apply_rope_pos_ids(q.view(3, 2, 16), k.view(3, 1, 16), positions, interleave=not is_neox)
    for g, w in zip(got, want, strict=True):
        close(g, w.flatten(1))
    assert flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 16, table, is_neox) is None
    assert torch.equal(q, got[0])
    with pytest.raises(ValueError, match=r"cos_sin_cache: got dtype torch\.float16, want torch.float32"):
        flashinfer.apply_rope_with_cos_sin_cache(positions, q, k, 16, table.half())
    with pytest.raises(ValueError, match=r"query: got shape \(3, 32\), want \[nnz, heads \* 12\]"):
        flashinfer.apply_rope_with_cos_sin_cache(positions, q, k, 12, table)
    with pytest.raises(ValueError, match=r"offsets: got shape \(2,\), want \[1\]"):
        flashinfer.apply_rope(q.view(3, 2, 16), k.view(3, 1, 16), torch.tensor([0, 3]), torch.tensor([0, 1]))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_append(kv_layout: str, as_tuple: bool, dtype: torch.dtype) -> None:
    """Requests append 2, 0 and 5 rows to caches of 3, 4 and 0, in pages of 4."""
    append_indptr, page_indptr = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 2, 7], [0, 2, 3, 5]))
    last = torch.tensor([1, 4, 1], dtype=torch.int32)
    lengths = flashinfer.get_seq_lens(page_indptr, last, 4)
    assert lengths.tolist() == [5, 4, 5]
    buffers = torch.zeros(9, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    rows, positions = flashinfer.get_batch_indices_positions(append_indptr, lengths, 7)
    assert rows.tolist() == [0, 0, 2, 2, 2, 2, 2]
    assert positions.tolist() == [3, 4, 0, 1, 2, 3, 4]
    again = flashinfer.get_batch_indices_positions(append_indptr, lengths, 8, *buffers)
    assert again[0] is buffers[0]
    assert again[1].tolist() == [3, 4, 0, 1, 2, 3, 4, -1, 0]
    pages = torch.tensor([4, 1, 5, 0, 2], dtype=torch.int32)
    shape = (6, 2, 4, 3, 8) if kv_layout == "NHD" else (6, 2, 3, 4, 8)
    cache = torch.zeros(shape, dtype=torch.float16).to(dtype)
    k, v = (torch.randn(7, 3, 8).to(dtype) for _ in range(2))
    given = (cache[:, 0], cache[:, 1]) if as_tuple else cache
    flashinfer.append_paged_kv_cache(k, v, rows, positions, given, pages, page_indptr, last, kv_layout)
    nhd = (cache if kv_layout == "NHD" else cache.transpose(2, 3)).float()
    places = [(4, 3), (1, 0), (0, 0), (0, 1), (0, 2), (0, 3), (2, 0)]
    for row, (page, slot) in enumerate(places):
        assert torch.equal(nhd[page, 0, slot], k[row].float())
        assert torch.equal(nhd[page, 1, slot], v[row].float())
        nhd[page, :, slot] = 0
    assert not nhd.any()
    with pytest.raises(TypeError, match=r"batch_indices: got dtype torch\.int64, want torch.int32"):
        flashinfer.append_paged_kv_cache(k, v, rows.long(), positions, given, pages, page_indptr, last, kv_layout)
    with pytest.raises(ValueError, match=r"append_indptr: got shape \(4,\), want \[2\]"):
        flashinfer.get_batch_indices_positions(append_indptr, lengths[:1], 7)


@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_bits(bitorder: str) -> None:
    x = torch.rand(77) < 0.5
    assert flashinfer.packbits(x, bitorder).tolist() == np.packbits(x.numpy(), bitorder=bitorder).tolist()
    bounds = [0, 3, 3, 11, 19, 77]
    packed, indptr = flashinfer.segment_packbits(x, torch.tensor(bounds), bitorder)
    parts = [np.packbits(x[a:b].numpy(), bitorder=bitorder) for a, b in pairwise(bounds)]
    assert packed.tolist() == np.concatenate(parts).tolist()
    assert indptr.tolist() == [0, *np.cumsum([len(part) for part in parts]).tolist()]
    assert flashinfer.packbits(x[:0]).shape == (0,)
    with pytest.raises(ValueError, match="bitorder: got 'middle'"):
        flashinfer.packbits(x, "middle")


def merged(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """v [n, L, H, D], s [n, L, H]: in float64, by natural exponentials."""
    natural = s.double() * math.log(2)
    total = torch.logsumexp(natural, 1)
    weights = torch.exp(natural - torch.where(total == -math.inf, 0.0, total)[:, None])
    return (v.double() * weights[..., None]).sum(1), total / math.log(2)


def test_merged_states() -> None:
    v, s = torch.randn(5, 3, 2, 64), torch.randn(5, 3, 2) * 4
    s[1] = -math.inf  # nothing, three times
    s[2, 1] = -math.inf
    want = merged(v, s)
    got = flashinfer.merge_states(v, s)
    assert (got[0][1] == 0).all()
    assert torch.equal(got[1] == -math.inf, want[1] == -math.inf)
    close(got[0], want[0])
    close(got[1].nan_to_num(neginf=0.0), want[1].nan_to_num(neginf=0.0))
    pair = merged(v[:, :2], s[:, :2])
    a, b = (v[:, 0], s[:, 0]), (v[:, 1], s[:, 1])
    close(flashinfer.merge_state(*a, *b)[0], pair[0])
    mask = torch.tensor([True, False, True, False, True])
    for given in (None, mask):
        x, y = v[:, 0].clone(), s[:, 0].clone()
        assert flashinfer.merge_state_in_place(x, y, *b, given) is None
        changed = torch.ones(5, dtype=torch.bool) if given is None else given
        close(x[changed], pair[0][changed])
        close(y[changed].nan_to_num(neginf=0.0), pair[1][changed].nan_to_num(neginf=0.0))
        assert torch.equal(x[~changed], v[~changed][:, 0])
        assert torch.equal(y[~changed], s[~changed][:, 0])
    out, lse = flashinfer.merge_states(v[:, :0], s[:, :0])
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    with pytest.raises(ValueError, match=r"mask: got shape \(4,\), want \[5\]"):
        flashinfer.merge_state_in_place(*a, *b, mask[:4])


def test_variable_length_merge_states() -> None:
    v, s = torch.randn(7, 2, 8), torch.randn(7, 2)
    s[3:5] = -math.inf
    out, lse = variable_length_merge_states(v, s, torch.tensor([0, 3, 3, 5, 7], dtype=torch.int32))
    for row, states in ((0, slice(0, 3)), (3, slice(5, 7))):
        want = merged(v[None, states], s[None, states])
        close(out[row], want[0][0])
        close(lse[row], want[1][0])
    for row in (1, 2):
        assert (out[row] == 0).all()
        assert (lse[row] == -math.inf).all()


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("rmsnorm", ["input", "weight", "eps", "out", "enable_pdl"]),
        ("fused_add_rmsnorm", ["input", "residual", "weight", "eps", "enable_pdl"]),
        ("rmsnorm_quant", ["out", "input", "weight", "scale", "eps"]),
        ("layernorm", ["input", "gemma", "beta", "eps"]),
        ("silu_and_mul", ["input", "out", "enable_pdl"]),
        ("apply_rope", ["q", "k", "indptr", "offsets", "rotary_dim", "interleave", "rope_scale", "rope_theta"]),
        ("apply_rope_with_cos_sin_cache", ["positions", "query", "key", "head_size", "cos_sin_cache", "is_neox"]),
        (
            "append_paged_kv_cache",
            ["append_key", "append_value", "batch_indices", "positions", "paged_kv_cache", "kv_indices"],
        ),
        ("merge_state_in_place", ["v", "s", "v_other", "s_other", "mask"]),
    ],
)
def test_order_of_arguments(name: str, order: list[str]) -> None:
    assert list(inspect.signature(getattr(flashinfer, name)).parameters)[: len(order)] == order

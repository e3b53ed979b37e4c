"""The backends for vLLM and SGLang that docs/plug-in.md shows, over those engines' caches and metadata on a CPU."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import evenshare
from tests.compat import engines

FOLDER = Path(__file__).parents[2] / "docs" / "engines"
QO_LENS, KV_LENS = [1, 3, 5], [40, 12, 5]
HQ, HKV, D = 4, 2, 32


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return engines.install(monkeypatch)


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def indptr(lens: list[int]) -> torch.Tensor:
    return torch.nn.functional.pad(torch.tensor(lens).cumsum(0, dtype=torch.int32), (1, 0))


def expected(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any) -> torch.Tensor:
    """keys, values: [sum of KV_LENS, Hkv, D], the batch's own as the last of each request."""
    return evenshare.attention(
        q, keys, values, qo_indptr=indptr(QO_LENS), kv_indptr=indptr(KV_LENS), causal=True, **options
    )


def new_rows(x: torch.Tensor) -> torch.Tensor:
    """Of the tensors of all keys, those of the batch's new tokens."""
    return torch.cat([part[-n:] for part, n in zip(x.split(KV_LENS), QO_LENS, strict=True)])


@pytest.mark.parametrize("window", [None, 4])
def test_vllm(registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    module = load("evenshare_vllm", monkeypatch)
    module.register()
    assert registered["EVENSHARE"] == "evenshare_vllm.EvenshareBackend"
    backend = module.EvenshareBackend
    assert backend().get_name() == "EVENSHARE"  # nothing abstract is left
    block = 16
    cache = torch.randn(12, HKV, block, 2 * D)
    table = torch.tensor([[3, 7, 1], [5, 0, 0], [9, 0, 0]], dtype=torch.int32)
    q, keys, values = torch.randn(sum(QO_LENS), HQ, D), *torch.randn(2, sum(KV_LENS), HKV, D)
    slots = []
    for request, (k, v) in enumerate(zip(keys.split(KV_LENS), values.split(KV_LENS), strict=True)):
        for i in range(len(k)):
            page, place = int(table[request, i // block]), i % block
            if i < len(k) - QO_LENS[request]:  # earlier steps have written these
                cache[page, :, place] = torch.cat([k[i], v[i]], -1)
            else:
                slots.append(page * block + place)
    batch = SimpleNamespace(
        query_start_loc=indptr(QO_LENS),
        seq_lens=torch.tensor(KV_LENS, dtype=torch.int32),
        block_table_tensor=table,
        slot_mapping=torch.tensor([*slots, -1]),  # int64, and padded
        num_reqs=3,
        num_actual_tokens=sum(QO_LENS),
        causal=True,
    )
    step = backend.get_builder_cls()(None, ["a"], None, torch.device("cpu")).build(0, batch)
    layers = [backend.get_impl_cls()(HQ, D, 0.2, HKV, sliding_window=window, logits_soft_cap=0.0) for _ in range(2)]
    want = expected(q, keys, values, sm_scale=0.2, window_left=-1 if window is None else window - 1)
    for layer in layers:
        output = torch.full((sum(QO_LENS) + 1, HQ, D), 7.0)
        padded = [torch.cat([x, torch.zeros(1, *x.shape[1:])]) for x in (q, new_rows(keys), new_rows(values))]
        assert layer.forward(None, *padded, cache, step, output) is output
        torch.testing.assert_close(output[:-1], want)
        assert (output[-1] == 7).all()
    assert len(step.plans) == 1
    assert not layers[0].forward(None, *padded, cache, None, output).any()
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        backend.get_impl_cls()(HQ, D, 0.2, alibi_slopes=[0.5] * HQ)


@pytest.mark.parametrize("decoding", [False, True])
def test_sglang(registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch, decoding: bool) -> None:
    if decoding:
        monkeypatch.setattr(f"{__name__}.QO_LENS", [1, 1, 1])
    load("evenshare_sglang", monkeypatch).register()
    assert registered["choices"] == ["evenshare"]
    slots = torch.randperm(80)[: sum(KV_LENS)].int()
    req_to_token = torch.zeros(6, 64, dtype=torch.int32)
    places = torch.tensor([4, 0, 2])
    for place, own in zip(places, slots.split(KV_LENS), strict=True):
        req_to_token[place, : len(own)] = own
    q, keys, values = torch.randn(sum(QO_LENS), HQ, D), *torch.randn(2, sum(KV_LENS), HKV, D)
    buffers = torch.zeros(2, 80, HKV, D)
    buffers[0, slots], buffers[1, slots] = keys, values
    new = new_rows(slots)
    buffers[:, new] = 0  # written by the backend

    def set_kv_buffer(layer: Any, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        buffers[0, loc], buffers[1, loc] = k, v

    pool = SimpleNamespace(set_kv_buffer=set_kv_buffer, get_kv_buffer=lambda layer_id: buffers.unbind())
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=req_to_token), token_to_kv_pool=pool)
    backend = registered["evenshare"](runner)
    layer = SimpleNamespace(
        is_cross_attention=False, layer_id=0, tp_q_head_num=HQ, tp_k_head_num=HKV, qk_head_dim=D, v_head_dim=D,
        scaling=0.2, logit_cap=0.0, sliding_window_size=-1,
    )  # fmt: skip
    lens = torch.tensor(KV_LENS)
    batch = SimpleNamespace(
        req_pool_indices=places,
        seq_lens=lens,
        seq_lens_cpu=lens,
        extend_seq_lens=torch.tensor(QO_LENS),
        out_cache_loc=new,
        forward_mode=SimpleNamespace(is_decode=lambda: decoding, is_idle=lambda: False),
    )
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if decoding else backend.forward_extend
    out = forward(q.flatten(1), new_rows(keys), new_rows(values), layer, batch)
    torch.testing.assert_close(out.view(-1, HQ, D), expected(q, keys, values, sm_scale=0.2))


def test_signatures_are_the_engines(registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, sglang = load("evenshare_vllm", monkeypatch), load("evenshare_sglang", monkeypatch)
    pairs = {
        vllm.EvenshareImpl: engines.AttentionImpl,
        vllm.EvenshareBuilder: engines.AttentionMetadataBuilder,
        vllm.EvenshareBackend: engines.AttentionBackend,
        sglang.EvenshareBackend: engines.SGLangBackend,
    }
    for ours, theirs in pairs.items():
        for name, function in vars(theirs).items():
            if inspect.isfunction(function) and not (name == "__init__" and theirs is engines.SGLangBackend):
                own = list(inspect.signature(getattr(ours, name)).parameters)
                assert own == list(inspect.signature(function).parameters), f"{ours.__name__}.{name}"

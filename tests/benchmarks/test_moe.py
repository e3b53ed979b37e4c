"""The table of a mixture of experts with tiny layers on the CPU: its routings, its peers, its summary."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from benchmarks import harness, moe, peers
from benchmarks.results import Row

LAYER = moe.Layer("tiny", 6, 2, 32, 256)


@pytest.fixture(autouse=True)
def _own_weights() -> None:
    moe.make_weights.cache_clear()


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_a_case(bench: harness.Bench, num_tokens: int) -> None:
    bench.peers = list(moe.USUAL_PEERS)
    row = moe.measure(bench, moe.Case(LAYER, num_tokens))
    assert row.case == f"tiny, 6 x 32 x 256, tokens={num_tokens}"
    assert set(row.peers) == {moe.BF16, *moe.USUAL_PEERS}, bench.console.export_text()
    assert row.flops == 2 * 2 * num_tokens * 32 * 256
    if num_tokens == 1:  # two experts are read
        assert row.bytes == 2 * 32 * (128 + 2 * 2) + 2 * 2 * (32 + 256)
    assert [speed.case.partition("speed, ")[2] for speed in bench.rows[1:]] == [
        f"{ours} / {name}" for ours in ("ours", moe.BF16) for name in moe.USUAL_PEERS
    ]


def test_a_token_takes_different_experts() -> None:
    for num_tokens in (1, 40):
        routing = moe.make_routing(moe.Case(LAYER, num_tokens), torch.device("cpu"))
        counts = [end - begin for begin, end in itertools.pairwise(routing.bounds)]
        assert len(counts) == 6
        assert sum(counts) == 2 * num_tokens == routing.x.shape[0]
        assert max(counts) <= num_tokens
        assert routing.offsets.tolist() == routing.bounds


@pytest.mark.parametrize("name", moe.USUAL_PEERS)
def test_peers_compute_the_same(name: str) -> None:
    routing = moe.make_routing(moe.Case(LAYER, 5), torch.device("cpu"))
    _, dense = moe.make_weights(LAYER, torch.device("cpu"))
    call = peers.grouped(name, routing.x, dense, routing.offsets, routing.bounds)
    assert call is not None
    want = moe.loop(routing, lambda rows, expert: rows.float() @ dense[expert].float().T, torch.empty(10, 32))
    assert peers.relative_error(call(), want) < 1e-2


def test_fill_summarises_few_and_many_tokens(bench: harness.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "FEW_TOKENS", 2)
    monkeypatch.setattr(moe, "CASES", [moe.Case(replace(LAYER, name=name), m) for name in "ab" for m in (1, 3)])
    bench.peers = list(moe.USUAL_PEERS)
    moe.fill(bench)
    assert bench.failed == []
    assert [(row.case.partition(":")[0], row.ours) for row in bench.rows[-4:]] == [
        (f"2 cases of {what}", 1.0) for what in ("up to 2 tokens", "more tokens") for _ in range(2)
    ]


def test_warming_up_calls_both_of_ours_for_each_number_of_tokens(
    bench: harness.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, int]] = []
    monkeypatch.setattr(moe, "CASES", [moe.Case(LAYER, m) for m in (1, 3)] + [moe.Case(replace(LAYER, name="b"), 5)])
    monkeypatch.setattr(moe, "grouped_w4a16_matmul", lambda x, *_: made.append(("4 bits", x.shape[0])))
    monkeypatch.setattr(moe, "grouped_matmul", lambda x, *_: made.append(("bf16", x.shape[0])))
    moe.warm_up(bench, LAYER)
    assert sorted(made) == [(what, rows) for what in ("4 bits", "bf16") for rows in (2, 6)]


def test_the_best_peer_is_none_of_ours() -> None:
    row = Row("a", "us", "lower", 20.0, peers={moe.BF16: 10.0, "torch-grouped": 40.0, "torch-loop": 50.0})
    assert [found.ours for found in moe.summarise([row], "all")] == [2.0, 4.0]
    assert moe.summarise([replace(row, peers={moe.BF16: 10.0})], "all") == []


def test_cases() -> None:
    assert len({case.title for case in moe.CASES}) == len(moe.CASES) == 3 * 7
    assert {case.num_tokens for case in moe.CASES} == {1, 4, 16, 64, 256, 512, 4096}

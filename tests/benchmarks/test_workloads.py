"""Lengths, traces and counted work."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.workloads import (
    attention_flops,
    const,
    one_long,
    read_traces,
    uniform,
    visible_pairs,
    zipf,
)


@pytest.mark.parametrize(("qo_len", "kv_len"), [(1, 9), (5, 5), (4, 9), (9, 4), (3, 0), (0, 3)])
def test_pairs_are_those_that_the_mask_leaves(qo_len: int, kv_len: int) -> None:
    pairs = [(i, j) for i in range(qo_len) for j in range(kv_len)]
    assert visible_pairs(qo_len, kv_len, causal=False) == len(pairs)
    assert visible_pairs(qo_len, kv_len, causal=True) == sum(j <= kv_len - qo_len + i for i, j in pairs)


def test_flops_of_a_batch() -> None:
    assert attention_flops([2, 1], [3, 4], num_qo_heads=6, head_dim=32, causal=False) == 4 * 32 * 6 * 10
    assert attention_flops([2, 1], [3, 4], num_qo_heads=6, head_dim=32, causal=True) == 4 * 32 * 6 * 9


def test_lengths_are_repeatable_and_as_said() -> None:
    assert const(7, 3) == [7, 7, 7]
    assert one_long() == [65536] + [256] * 15
    drawn = uniform(512, 1024, 500)
    assert drawn == uniform(512, 1024, 500) != uniform(512, 1024, 500, seed=1)
    assert (min(drawn) >= 512, max(drawn) <= 1024, len(set(drawn)) > 100) == (True, True, True)


@pytest.mark.parametrize(("mean", "batch"), [(1024, 16), (1024, 1000), (1, 5)])
def test_zipf_has_its_mean(mean: int, batch: int) -> None:
    lengths = zipf(mean, batch)
    assert lengths == zipf(mean, batch)
    assert sum(lengths) / batch == pytest.approx(mean, abs=1)
    ordered = sorted(lengths, reverse=True)
    if mean > 1:
        assert ordered != lengths
        assert ordered[0] / ordered[1] == pytest.approx(2, rel=1e-2)


def write_traces(folder: Path) -> None:
    rows = [(100, 10), (0, 5), (300, 1)]
    with gzip.open(folder / "azure.csv.gz", "wt") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        file.writelines(f"2023-11-16 18:17:03.97,{prompt},{output}\n" for prompt, output in rows)
    records = [{"timestamp": 0, "input_length": i, "output_length": o, "hash_ids": [1]} for i, o in rows]
    (folder / "moon.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    (folder / "README.md").write_text("not a trace")


def test_traces_of_both_forms(tmp_path: Path) -> None:
    write_traces(tmp_path)
    azure, moon = read_traces(tmp_path)
    assert (azure.name, moon.name) == ("azure", "moon")
    for trace in (azure, moon):
        assert (trace.prompts, trace.outputs) == ([100, 300], [10, 1])
        assert trace.prefill(250, seed=1) == [100, 150]
        assert trace.prefill(1000, seed=1) == [100, 300]
        lengths = trace.decode(200)
        assert lengths == trace.decode(200)
        assert set(lengths) <= {*range(101, 111), 301}
        assert 5 < lengths.count(301) < 40  # one in eleven


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got no traces, want"):
        read_traces(tmp_path)
    (tmp_path / "empty.csv").write_text("ContextTokens,GeneratedTokens\n0,7\n")
    with pytest.raises(ValueError, match=r"empty\.csv: got no requests"):
        read_traces(tmp_path)
    (tmp_path / "empty.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"empty\.csv: got no trace .* want the columns ContextTokens"):
        read_traces(tmp_path)

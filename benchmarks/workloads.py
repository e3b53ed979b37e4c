"""Lengths of the requests of a batch, made up or taken from traces, and the work of attention over them."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACE_SUFFIXES = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz")
TRACE_COLUMNS = (("ContextTokens", "GeneratedTokens"), ("input_length", "output_length"))  # Azure, Mooncake


def const(length: int, batch: int) -> list[int]:
    return [length] * batch


def uniform(low: int, high: int, batch: int, seed: int = 0) -> list[int]:
    """Drawn from [low, high]."""
    draw = random.Random(seed)
    return [draw.randint(low, high) for _ in range(batch)]


def zipf(mean: int, batch: int, seed: int = 0) -> list[int]:
    """Lengths as 1 to 1/2 to 1/3 ..., scaled to `mean` (rounded down, at least 1), in random order."""
    scale = mean * batch / sum(1 / rank for rank in range(1, batch + 1))
    lengths = [max(int(scale / rank), 1) for rank in range(1, batch + 1)]
    random.Random(seed).shuffle(lengths)
    return lengths


def one_long() -> list[int]:
    """64k + 15x256."""
    return [65536] + [256] * 15


MEAN_1024 = {"const 1024": const(1024, 16), "U(512,1024)": uniform(512, 1024, 16), "zipf 1024": zipf(1024, 16)}
LONG_TAIL = {"64k + 15x256": one_long()}


def visible_pairs(qo_len: int, kv_len: int, causal: bool) -> int:
    """(query, key) pairs that a mask leaves; causal is bottom-right aligned: query i of n sees key j of m iff j <= m - n + i."""
    if not causal:
        return qo_len * kv_len
    seeing = min(qo_len, kv_len)  # the last queries; those before them see nothing
    return seeing * (kv_len - seeing) + seeing * (seeing + 1) // 2


def attention_flops(
    qo_lens: Sequence[int], kv_lens: Sequence[int], num_qo_heads: int, head_dim: int, causal: bool
) -> int:
    """Operations of QKᵀ and PV over the visible pairs: 4 * head_dim a pair and query head."""
    pairs = sum(visible_pairs(qo, kv, causal) for qo, kv in zip(qo_lens, kv_lens, strict=True))
    return 4 * head_dim * num_qo_heads * pairs


@dataclass(frozen=True)
class Trace:
    """Requests that a service got, in order of arrival. Tokens."""

    name: str
    prompts: list[int]
    outputs: list[int]

    def prefill(self, num_tokens: int, seed: int = 0) -> list[int]:
        """Prompts that came one after the other, `num_tokens` in all: the last one is cut, as in chunked prefill."""
        lengths: list[int] = []
        left = num_tokens
        for prompt in self.prompts[random.Random(seed).randrange(len(self.prompts)) :]:
            lengths.append(min(prompt, left))
            left -= lengths[-1]
            if not left:
                break
        return lengths

    def decode(self, batch: int, seed: int = 0) -> list[int]:
        """Keys of `batch` requests caught at a random step: a request is as likely as its output is long."""
        draw = random.Random(seed)
        chosen = draw.choices(range(len(self.prompts)), self.outputs, k=batch)
        return [self.prompts[i] + draw.randint(1, self.outputs[i]) for i in chosen]


def read_traces(folder: Path) -> list[Trace]:
    """Every .csv or .jsonl, gzipped or not, of a folder, in Azure's columns or Mooncake's; those without a prompt or an
    output are left out.

    Raises ValueError naming the folder if it holds none, or the file if its columns are others.
    """
    files = sorted(path for path in folder.glob("*") if path.name.endswith(TRACE_SUFFIXES))
    if not files:
        raise ValueError(f"{folder}: got no traces, want {', '.join(TRACE_SUFFIXES)}")
    return [_read_trace(path) for path in files]


def _read_trace(path: Path) -> Trace:
    try:
        lengths = [pair for pair in map(_lengths, _records(path)) if min(pair) > 0]
    except (KeyError, OSError, TypeError, ValueError) as error:
        columns = " or ".join(" and ".join(pair) for pair in TRACE_COLUMNS)
        raise ValueError(f"{path}: got no trace ({error!r}), want the columns {columns}") from error
    if not lengths:
        raise ValueError(f"{path}: got no requests, want one with a prompt and an output at least")
    return Trace(path.name.partition(".")[0], [prompt for prompt, _ in lengths], [output for _, output in lengths])


def _records(path: Path) -> Iterator[dict[str, str | int]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        if ".csv" in path.suffixes:
            yield from csv.DictReader(lines)
        else:
            yield from map(json.loads, lines)


def _lengths(record: dict[str, str | int]) -> tuple[int, int]:
    columns = next((pair for pair in TRACE_COLUMNS if pair[0] in record), TRACE_COLUMNS[0])
    return int(record[columns[0]]), int(record[columns[1]])

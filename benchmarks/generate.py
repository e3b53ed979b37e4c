"""Tokens per second of the main job, beside transformers' own float32 and bfloat16 on the same dequantised weights.

The three take turns, so that a busy machine is busy for all of them. A token's time is the median over a run; the figure is the
median over the rounds, and a ratio is the median of the rounds' ratios. Peers run `model.generate`, ours the loop of
`evenshare generate`. Loading is timed from the start of a new process to a model that is ready to generate.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as `evenshare generate` does, for every contestant

import torch
from rich.console import Console

from benchmarks.harness import make_report, show
from benchmarks.results import Row, write_report
from evenshare.generate import LoadedModel, encode_prompt, fetch_model, load_model, stream_tokens
from evenshare.generate.architecture import find_architecture, make_config, model_class
from evenshare.generate.load import read_weights
from evenshare.quant.formats.gguf import read_gguf

PROMPT = "Explain in three sentences how a bicycle stays upright."
TARGETS = {"float32": 3.0, "bfloat16": 1.2}  # times as fast as transformers in that dtype, on a CPU
LOAD_TARGETS = {"first time": 15.0, "from the cache": 5.0}  # seconds
LOAD = "from evenshare.generate import load_model; load_model(device={!r})"


def dequantised(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' own model of a GGUF file with sdpa attention, every weight dequantised to `dtype`."""
    file = read_gguf(path)
    architecture = find_architecture(file.metadata)
    weights = read_weights(file, architecture, torch.device("cpu"))
    state = {f"{name}.weight": weight.dequantize(dtype) for name, weight in weights.quantized.items()}
    state |= {name: tensor.to(dtype) for name, tensor in weights.plain.items()}
    tied = "lm_head.weight" not in state
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    bias = "model.layers.0.self_attn.q_proj.bias" in state
    config = make_config(architecture, file.metadata, tied=tied, attention_bias=bias)
    with torch.device("meta"):
        model = model_class(architecture)(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.set_attn_implementation("sdpa")
    return model.eval().to(device)


class Clock:
    """A streamer for transformers' generate that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def run_peer(model: Any, prompt: list[int], tokens: int) -> tuple[float, float]:
    """(seconds to the first token, seconds per further token)."""
    ids, clock = torch.tensor([prompt], device=model.device), Clock()
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        streamer=clock,
        pad_token_id=0,
    )
    return _summary(start, clock.times[1:])  # the first put is the prompt itself


def run_ours(loaded: LoadedModel, prompt: list[int], tokens: int) -> tuple[float, float]:
    """(seconds to the first token, seconds per further token)."""
    start = time.perf_counter()
    return _summary(start, [time.perf_counter() for _ in stream_tokens(loaded, prompt, max_new_tokens=tokens)])


def _summary(start: float, times: list[float]) -> tuple[float, float]:
    return times[0] - start, median(b - a for a, b in pairwise(times))


def load_seconds(device: str, cache: Path) -> float:
    """From the start of a process to a loaded model."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", LOAD.format(device)], env={**os.environ, "EVENSHARE_CACHE": str(cache)}, check=True
    )
    return time.perf_counter() - start


def load_rows(device: str, repeats: int) -> list[Row]:
    """Loading with nothing cached but the fetched file, and with the tokenizer cached."""
    path = fetch_model()
    seconds: dict[str, list[float]] = {case: [] for case in LOAD_TARGETS}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "models", path.name)
            target.parent.mkdir()
            target.symlink_to(path.resolve())
            for case in LOAD_TARGETS:
                seconds[case].append(load_seconds(device, Path(folder)))
    return [
        Row(f"load, {case}", "s", "lower", median(values), target=LOAD_TARGETS[case], timing="wall")
        for case, values in seconds.items()
    ]


def speed_rows(device: torch.device, peers: Sequence[str], tokens: int, rounds: int) -> list[Row]:
    """Tokens per second and time to the first token."""
    loaded = load_model(None, device)
    loaded.model.generation_config.eos_token_id = None  # every run has the same length
    prompt = encode_prompt(loaded.tokenizer, PROMPT)
    models = {name: dequantised(loaded.path, device, getattr(torch, name)) for name in peers}
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ("ours", *peers)}
    for i in range(rounds + 1):
        for name, found in runs.items():
            timing = run_ours(loaded, prompt, tokens) if name == "ours" else run_peer(models[name], prompt, tokens)
            if i:  # the first round warms up
                found.append(timing)

    def figures(column: int, convert: Any) -> tuple[float, dict[str, float]]:
        values = {name: median(convert(run[column]) for run in found) for name, found in runs.items()}
        return values["ours"], {f"transformers {name}": values[name] for name in peers}

    speed, speed_peers = figures(1, lambda seconds: 1 / seconds)
    first, first_peers = figures(0, lambda seconds: 1000 * seconds)
    case = f"SmolLM2-135M Q4_1 on {device.type}, one prompt"
    rows = [
        Row(f"{case}, {tokens} tokens", "tokens/s", "higher", speed, peers=speed_peers, timing="wall"),
        Row(f"{case} of {len(prompt)}, first token", "ms", "lower", first, peers=first_peers, timing="wall"),
    ]
    for name in peers:
        ratio = median(theirs[1] / ours[1] for ours, theirs in zip(runs["ours"], runs[name], strict=True))
        target = TARGETS.get(name) if device.type == "cpu" else None
        rows.append(
            Row(f"{case}, ours / transformers {name}", "x", "higher", ratio, "ratio", target=target, timing="wall")
        )
    return rows


def read_gb_s() -> float:
    """What a sum over 512 MB reads per second."""
    words = torch.ones(1 << 27)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        words.sum()
        times.append(time.perf_counter() - start)
    return words.numel() * 4e-9 / min(times)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's model with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else 'CPU'}, {torch.get_num_threads()} threads"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__)
    parser.add_argument("--peers", nargs="*", default=["float32", "bfloat16"], help="dtypes of transformers' own path")
    parser.add_argument("--out", type=Path, help="one file for everything, instead of results/NAME-DEVICE.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    rows = load_rows(options.device, repeats=min(options.rounds, 3))
    rows += speed_rows(device, options.peers, options.tokens, options.rounds)
    console = Console()
    show(console, "generate", rows)
    ceilings = {"read_gb_s": read_gb_s()} if device.type == "cpu" else {}
    console.print(f"written: {write_report(make_report('generate', device_name(device), ceilings, rows), options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Quantised weights on disk, as one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from evenshare.quant.encodings import INTEGER
from evenshare.quant.weight import QuantizedWeight

FORMAT_KEY = "evenshare.quantized"
FORMAT_VERSION = 2  # 1 knew no encodings and no permutations
PARTS = ("codes", "scales", "zeros", "offsets", "permutation")


def save_weights(path: str | Path, weights: Mapping[str, QuantizedWeight]) -> None:
    """Write named weights to `path`: tensors `name.codes`, `name.scales` and, where a weight has them, `name.zeros`,
    `name.offsets`, `name.permutation`; and a JSON header entry with k, group size, bits and encoding."""
    from safetensors.torch import save_file

    tensors = {
        f"{name}.{part}": tensor.contiguous()
        for name, weight in weights.items()
        for part in PARTS
        if (tensor := getattr(weight, part)) is not None
    }
    forms = {
        name: {"k": w.k, "group_size": w.group_size, "bits": w.bits, "encoding": w.encoding}
        for name, w in weights.items()
    }
    save_file(tensors, str(path), {FORMAT_KEY: json.dumps({"version": FORMAT_VERSION, "weights": forms})})


def load_weights(path: str | Path, device: torch.device | str = "cpu") -> dict[str, QuantizedWeight]:
    """Read what `save_weights` wrote.

    Raises FileNotFoundError if there is no such file, ValueError if it was not written by `save_weights` or lacks a tensor.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: got no such file, want one written by save_weights")
    try:
        with safe_open(str(path), "pt", device=str(device)) as file:
            return _read(path, file)
    except SafetensorError as error:
        raise ValueError(
            f"{path}: got a file that safetensors cannot read ({error}), want one written by save_weights"
        ) from error


def _read(path: Path, file: Any) -> dict[str, QuantizedWeight]:
    header = json.loads((file.metadata() or {}).get(FORMAT_KEY, "{}"))
    if header.get("version") not in (1, FORMAT_VERSION):
        raise ValueError(f"{path}: got {FORMAT_KEY} version {header.get('version')}, want 1 or {FORMAT_VERSION}")
    present = set(file.keys())

    def part(name: str, which: str) -> torch.Tensor | None:
        key = f"{name}.{which}"
        return file.get_tensor(key) if key in present else None

    weights = {}
    for name, form in header["weights"].items():
        codes, scales, zeros, offsets, permutation = (part(name, which) for which in PARTS)
        if codes is None or scales is None:
            raise ValueError(f"{path}: got no tensor {name}.codes or {name}.scales, want both")
        encoding = form.get("encoding", INTEGER)
        weights[name] = QuantizedWeight(
            codes, scales, form["k"], form["group_size"], form["bits"], zeros, offsets, encoding, permutation
        )
    return weights

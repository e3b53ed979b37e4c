"""From a 16-bit checkpoint to a quantised one, tensor by tensor: the model itself is never built."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evenshare.quant.formats.checkpoint import PLAIN, Checkpoint
from evenshare.quant.formats.registry import format_named
from evenshare.quant.formats.write import write_checkpoint
from evenshare.quant.rounding import quantize
from evenshare.quant.weight import QuantizedWeight

# What lies beside the weights and goes with them: tokenizer, chat template, generation settings, licence.
COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "NOTICE*")


def quantize_checkpoint(
    source: Checkpoint,
    folder: str | Path,
    layers: Mapping[str, tuple[int, int]],
    kept: Sequence[str] = (),
    *,
    group_size: int = 128,
    format: str = "compressed-tensors",
    device: torch.device | str = "cpu",
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> dict[str, QuantizedWeight]:
    """Quantise the linear layers of a checkpoint without data and write the result to `folder`.

    layers: name -> (n, k) of those to quantise, as "model.layers.0.mlp.up_proj"; their tensors are `name.weight`.
    kept: linear layers of the model that stay as they are, also those without a tensor of their own, like a tied head.
    format: as in `write_checkpoint`. options: those of `evenshare.quantize`: bits, symmetric, refine.
    device: where the arithmetic runs.
    progress: called with (layer, weights done, weights in all).

    Scales have the dtype of the 16-bit weights, which is what engines compute with (float16 for float32 weights). Memory holds the
    quantised model and the largest layer. The tokenizer's files and the like are copied. Returns the quantised weights.

    Raises ValueError if the checkpoint is quantised already, a layer is missing or of another shape, or the format cannot hold
    it, FileExistsError if the folder holds a model: all but the first look at a shape before any work.
    """
    folder = Path(folder)
    if source.format != PLAIN:
        raise ValueError(f"source: got a checkpoint that is quantised already ({source.format}), want a 16-bit one")
    if any(folder.glob("*.safetensors")):
        raise FileExistsError(f"folder: got {folder}, which holds safetensors already, want a new or an empty one")
    names = set(source.plain())
    missing = [name for name in layers if f"{name}.weight" not in names]
    if missing or not layers:
        raise ValueError(f"layers: got {missing or 'none'}, want layers of {source.path}")
    for shape, name in {shape: name for name, shape in layers.items()}.items():
        weight = quantize(torch.empty(shape, device="meta"), group_size, **options)
        reason = format_named(format).refusal(weight)
        if reason is not None:
            raise ValueError(f"layer {name!r}: {format} cannot hold it, because {reason}")

    weights: dict[str, QuantizedWeight] = {}
    total, done = sum(n * k for n, k in layers.values()), 0
    for name, shape in layers.items():
        dense = source.tensor(f"{name}.weight")
        if tuple(dense.shape) != tuple(shape):
            raise ValueError(f"layer {name!r}: got shape {tuple(dense.shape)}, want {tuple(shape)}")
        scale_dtype = torch.float16 if dense.dtype == torch.float32 else dense.dtype
        quantized = quantize(dense.to(device), group_size, scale_dtype=scale_dtype, **options)
        weights[name] = quantized.to("cpu")
        done += dense.numel()
        if progress is not None:
            progress(name, done, total)
    other = {name: source.tensor(name) for name in names if name.removesuffix(".weight") not in layers}
    write_checkpoint(folder, weights, other, source.config, format)
    _ignore(folder, kept)
    _copy_companions(source.path, folder)
    return weights


def _ignore(folder: Path, kept: Sequence[str]) -> None:
    """Name kept layers in a compressed-tensors configuration: it targets all linears, and `write_checkpoint` sees only tensors."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    ignore = config["quantization_config"].get("ignore")
    if ignore is not None:
        ignore += [name for name in kept if name not in ignore]
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _copy_companions(source: Path, folder: Path) -> None:
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file() and path.name != "config.json" and not path.name.endswith(".index.json"):
                shutil.copy2(path, folder / path.name)

"""A folder of safetensors that other tools load: weights in one format, everything else as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from evenshare.quant.formats.format import Format
from evenshare.quant.formats.registry import format_named
from evenshare.quant.weight import QuantizedWeight


def write_checkpoint(
    folder: str | Path,
    weights: Mapping[str, QuantizedWeight],
    other_tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    format: str = "compressed-tensors",
    *,
    kept: Sequence[str] = (),
    outlines: Mapping[str, QuantizedWeight] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model to `folder`: config.json, and model.safetensors or several of them with an index.

    weights: layer -> weight, as "model.layers.0.mlp.up_proj".
    other_tensors: all others under their full names, biases of quantised layers too.
    config: the model's config.json; quantization_config is added. Files of a tokenizer are the caller's to copy.
    format: "gptq", "gptq_v2", "awq", "compressed-tensors", "hqq" or "bitsandbytes".
    kept: linear layers that stay as they are without a tensor of their own, like a head tied to the embedding. The others are
        found: matrices among `other_tensors`.
    outlines: `weights` on the meta device. With them a lazy mapping is asked for each weight once, as it is written, without them
        twice; of lazy weights and tensors memory holds one shard.
    max_shard_bytes: a new file is begun before one gets larger.

    Raises ValueError if the format is unknown or cannot hold a weight (the message names both and why), FileExistsError if
    the folder holds safetensors already. Both before anything is written, as far as `outlines` tell;
    what fails later leaves no files.
    """
    folder, form = Path(folder), format_named(format)
    if any(folder.glob("*.safetensors")):
        raise FileExistsError(f"folder: got {folder}, which holds safetensors already, want a new or an empty one")
    outlines = weights if outlines is None else outlines
    if not outlines:
        raise ValueError("weights: got none, want at least one quantised layer")
    for name in outlines:
        _check_fits(form, name, outlines[name])
    assert form.describe is not None  # format_named gives formats that can be written
    matrices = [name.removesuffix(".weight") for name in other_tensors if _is_matrix(name, other_tensors[name])]
    skipped = list(dict.fromkeys([*matrices, *kept]))
    quantization = form.describe(outlines, skipped)
    folder.mkdir(parents=True, exist_ok=True)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from other_tensors.items()
        for layer in weights:
            weight = weights[layer]
            _check_fits(form, layer, weight)
            for part, tensor in form.pack(weight).items():
                yield f"{layer}{form.separator}{part}", tensor

    _write_shards(folder, tensors(), max_shard_bytes)
    # Last, so that a folder that was not finished is no model.
    _write_json(folder / "config.json", {**config, "quantization_config": quantization})


def _check_fits(form: Format, name: str, weight: QuantizedWeight) -> None:
    reason = form.refusal(weight)
    if reason is not None:
        raise ValueError(f"weights[{name!r}]: {form.name} cannot hold it, because {reason}")


def _is_matrix(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(".weight") and tensor.ndim == 2


def _write_shards(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], max_bytes: int) -> None:
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    total = size = 0
    with TemporaryDirectory(prefix=".unfinished-", dir=folder) as directory:

        def flush() -> None:
            save_file(shard, str(Path(directory) / str(len(shards))), {"format": "pt"})
            shards.append(list(shard))
            shard.clear()

        for name, tensor in tensors:
            if shard and size + tensor.nbytes > max_bytes:
                flush()
                size = 0
            # A copy: safetensors refuses tensors that share memory, as parts of a fused weight do.
            shard[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            size, total = size + tensor.nbytes, total + tensor.nbytes
        flush()

        # How many there are is known now.
        count = len(shards)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        for i, name in enumerate(names):
            (Path(directory) / str(i)).rename(folder / name)
    if count > 1:
        weight_map = {tensor: name for name, held in zip(names, shards, strict=True) for tensor in held}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

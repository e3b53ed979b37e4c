"""From a 16-bit checkpoint to a quantised one, tensor by tensor: the model itself is never built."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from evenshare.quant.formats.checkpoint import PLAIN, Checkpoint
from evenshare.quant.formats.write import write_checkpoint
from evenshare.quant.rounding import quantize
from evenshare.quant.weight import QuantizedWeight

# What lies beside the weights and goes with them: tokenizer, chat template, generation settings, licence.
COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "NOTICE*")
Value = TypeVar("Value")


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

    Scales have the dtype of the 16-bit weights, which is what engines compute with (float16 for float32 weights). Each layer is
    written as soon as it is quantised: memory holds a file of 5 GB and the largest layer. The tokenizer's files and the like are
    copied. Returns the quantised weights' outlines, on the meta device.

    Raises ValueError if the checkpoint is quantised already, a layer is missing or of another shape, or the format cannot hold
    it, FileExistsError if the folder holds a model: all before any work. ValueError for a weight that is not finite.
    """
    folder = Path(folder)
    if source.format != PLAIN:
        raise ValueError(f"source: got a checkpoint that is quantised already ({source.format}), want a 16-bit one")
    names = set(source.plain())
    missing = [name for name in layers if f"{name}.weight" not in names]
    if missing or not layers:
        raise ValueError(f"layers: got {missing or 'none'}, want layers of {source.path}")

    def quantized(dense: torch.Tensor) -> QuantizedWeight:
        scale_dtype = torch.float16 if dense.dtype == torch.float32 else dense.dtype
        return quantize(dense, group_size, scale_dtype=scale_dtype, **options)

    total, done = sum(n * k for n, k in layers.values()), 0

    def make(name: str) -> QuantizedWeight:
        nonlocal done
        weight = quantized(source.tensor(f"{name}.weight").to(device)).to("cpu")
        done += weight.n * weight.k
        if progress is not None:
            progress(name, done, total)
        return weight

    outlines: dict[str, QuantizedWeight] = {}
    known: dict[tuple[torch.Size, torch.dtype], QuantizedWeight] = {}
    for name, shape in layers.items():
        dense = source.tensor(f"{name}.weight")  # mapped, not read
        if tuple(dense.shape) != tuple(shape):
            raise ValueError(f"layer {name!r}: got shape {tuple(dense.shape)}, want {tuple(shape)}")
        key = dense.shape, dense.dtype
        if key not in known:
            known[key] = quantized(torch.empty_like(dense, device="meta"))
        outlines[name] = known[key]
    others = [name for name in source.plain() if name.removesuffix(".weight") not in layers]
    write_checkpoint(
        folder,
        Lazy(layers, make),
        Lazy(others, source.tensor),
        source.config,
        format,
        kept=kept,
        outlines=outlines,
    )
    _copy_companions(source.path, folder)
    return outlines


class Lazy(Mapping[str, Value]):
    """name -> make(name), made anew each time it is asked for."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Value]) -> None:
        self._names, self._make = list(names), make

    def __getitem__(self, name: str) -> Value:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _copy_companions(source: Path, folder: Path) -> None:
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file() and path.name != "config.json" and not path.name.endswith(".index.json"):
                shutil.copy2(path, folder / path.name)

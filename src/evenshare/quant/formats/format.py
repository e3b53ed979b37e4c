"""What every format of this folder is: names of a layer's tensors, a reader and a writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evenshare.quant.weight import QuantizedWeight

Tensors = Mapping[str, torch.Tensor]
Config = Mapping[str, Any]


def holds_nothing(weight: QuantizedWeight) -> str | None:
    return "it has no writer"


def packs_nothing(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    raise NotImplementedError


@dataclass(frozen=True)
class Format:
    """One way to store quantised layers in safetensors files.

    name: what `open_checkpoint` and `write_checkpoint` call it.
    wants: the configurations that it reads, in words, for errors and docs.
    required, optional: names of a layer's tensors behind the layer's own name and `separator`. The first one exists in
        quantised layers only.
    matches: whether a model's quantization_config is of this format, in a variant that can be read.
    unpack, pack: the reader and the writer, after the checks of `read` and `write`.
    refusal: why the format cannot hold a weight, or None. On the meta device it looks at the shapes alone.
    describe: the quantization_config of layers {name: weight} in a model whose modules `skipped` are not quantised.
    """

    name: str
    wants: str
    required: tuple[str, ...]
    matches: Callable[[Config], bool]
    unpack: Callable[[Tensors, Config], QuantizedWeight]
    optional: tuple[str, ...] = ()
    refusal: Callable[[QuantizedWeight], str | None] = holds_nothing
    pack: Callable[[QuantizedWeight], dict[str, torch.Tensor]] = packs_nothing
    describe: Callable[[Mapping[str, QuantizedWeight], Sequence[str]], dict[str, Any]] | None = None
    separator: str = "."

    def read(self, tensors: Tensors, config: Config) -> QuantizedWeight:
        """The weight of one layer, with the file's own codes.

        tensors: the layer's tensors under the names of `required` and `optional`; others are not looked at.
        config: the model's quantization_config.

        Raises ValueError if a tensor is missing or of a wrong shape, TypeError if it is of a wrong dtype.
        """
        missing = [name for name in self.required if name not in tensors]
        if missing:
            raise ValueError(f"tensors: got {sorted(tensors)}, want {', '.join(missing)} as well ({self.name})")
        return self.unpack(tensors, config)

    def write(self, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        """The tensors that `read` makes `weight` from: `dequantize` of the two is equal bit for bit.

        Raises ValueError, naming what the format cannot hold.
        """
        reason = self.refusal(weight)
        if reason is not None:
            raise ValueError(f"weight: {self.name} cannot hold it, because {reason}")
        return self.pack(weight)


def check(name: str, tensor: torch.Tensor, dtypes: torch.dtype | Sequence[torch.dtype], *shape: int | None) -> None:
    """Raise unless `tensor` has one of `dtypes` and `shape`, where None stands for any size."""
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    if tensor.dtype not in allowed:
        raise TypeError(f"{name}: got {tensor.dtype}, want {' or '.join(map(str, allowed))}")
    if tensor.ndim != len(shape) or any(w not in (None, g) for g, w in zip(tensor.shape, shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want ({wanted})")


def one_of_all(name: str, values: Sequence[Any]) -> Any:
    """The value that all layers share. Raises ValueError if they do not."""
    if len(set(values)) != 1:
        raise ValueError(f"weights: got {name} {sorted(set(values))}, want one for all layers in this format")
    return values[0]

"""Checkpoints on disk: a Hugging Face folder of safetensors in any of the formats of this folder, or a GGUF file."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from evenshare.quant.formats.gguf import FLOAT_DTYPES, GGUFFile, read_gguf
from evenshare.quant.formats.registry import find_format
from evenshare.quant.weight import QuantizedWeight

PLAIN = "plain"  # the format of a folder without a quantization_config


class CheckpointError(ValueError):
    """The folder is damaged or holds something that cannot be read: the message names it, what was got and what is wanted."""


class Checkpoint(ABC):
    """What lies in a checkpoint, by name. Nothing is read before it is asked for, and nothing is kept.

    path: the folder or file.
    format: "gptq", "gptq_v2", "awq", "compressed-tensors", "hqq", "bitsandbytes", "mxfp4", "modelopt", "gguf", or "plain".
    config: config.json, or the metadata of a GGUF file.
    """

    path: Path
    format: str
    config: Mapping[str, Any]

    @abstractmethod
    def layers(self) -> list[str]:
        """Names of the quantised layers, as "model.layers.0.mlp.up_proj", in a GGUF file as "blk.0.ffn_up.weight"."""

    @abstractmethod
    def plain(self) -> list[str]:
        """Names of the tensors that are no part of a quantised layer's weight: norms, biases, layers in 16 bits."""

    def names(self) -> list[str]:
        """`layers` and `plain`."""
        return self.layers() + self.plain()

    @abstractmethod
    def weight(self, name: str) -> QuantizedWeight | torch.Tensor:
        """What is called `name` in `names`: a QuantizedWeight with the file's own codes if it is a quantised layer.

        Raises KeyError if there is nothing of that name, CheckpointError if tensors of the layer are missing or wrong.
        """

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as it is stored, also one of a quantised layer ("model.layers.0.mlp.up_proj.qweight").

        Raises KeyError if there is none of that name.
        """


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder with config.json and *.safetensors (one file, or several with an index), or a GGUF file.

    The format is told by `quantization_config` in config.json, or else by quantize_config.json (GPTQ), quant_config.json
    (AWQ) or hf_quant_config.json (ModelOpt) beside it; without any of them tensors are read as they are.

    Raises FileNotFoundError if there is no such path, and ValueError (CheckpointError, GGUFError) if it cannot be read or its
    quantization method is not known; then the message names those that are.
    """
    path = Path(path)
    if path.is_dir():
        return _Folder(path)
    if path.is_file() and path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: got one safetensors file, want the folder that holds it and its config.json")
    return _GGUF(read_gguf(path))


class _GGUF(Checkpoint):
    def __init__(self, file: GGUFFile) -> None:
        self.path, self.format, self.config = file.path, "gguf", file.metadata
        self._file = file

    def layers(self) -> list[str]:
        return [name for name, info in self._file.infos.items() if info.type_name not in FLOAT_DTYPES]

    def plain(self) -> list[str]:
        return [name for name, info in self._file.infos.items() if info.type_name in FLOAT_DTYPES]

    def weight(self, name: str) -> QuantizedWeight | torch.Tensor:
        return self._file[name]

    def tensor(self, name: str) -> torch.Tensor:
        found = self._file[name]
        if isinstance(found, QuantizedWeight):
            raise KeyError(f"{name}: got a tensor of type {self._file.infos[name].type_name}, want weight({name!r})")
        return found


class _Folder(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_json(path / "config.json") if (path / "config.json").is_file() else {}
        quantization = _quantization_config(path, self.config)
        self._files = _tensor_files(path)
        self._open: dict[Path, Any] = {}
        self._quantization, self._format = quantization, None
        self.format, self._parts = PLAIN, {}
        if quantization:
            try:
                self._format = find_format(quantization)
            except ValueError as error:
                raise CheckpointError(f"{path}: {error}") from error
            self.format, self._parts = self._format.name, self._find_layers()

    def _find_layers(self) -> dict[str, dict[str, str]]:
        """Layer -> its tensors: name in the format -> name in the files."""
        assert self._format is not None
        separator, names = self._format.separator, (*self._format.required, *self._format.optional)
        mark = separator + self._format.required[0]
        layers = [name.removesuffix(mark) for name in self._files if name.endswith(mark)]
        return {
            layer: {name: full for name in names if (full := f"{layer}{separator}{name}") in self._files}
            for layer in layers
        }

    def layers(self) -> list[str]:
        return list(self._parts)

    def plain(self) -> list[str]:
        taken = {full for parts in self._parts.values() for full in parts.values()}
        return [name for name in self._files if name not in taken]

    def weight(self, name: str) -> QuantizedWeight | torch.Tensor:
        if name not in self._parts or self._format is None:
            return self.tensor(name)
        tensors = {part: self.tensor(full) for part, full in self._parts[name].items()}
        try:
            return self._format.read(tensors, self._quantization)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.path}: layer {name!r}: {error}") from error

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise KeyError(f"{name}: got no layer or tensor of that name in {self.path}, want one of names()")
        return self._file(self._files[name]).get_tensor(name)

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = _open_safetensors(path)
        return self._open[path]


def _open_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), "pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: got no such file, want it, for the index names it") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: got a file that safetensors cannot read ({error}): truncated?") from error


def _tensor_files(path: Path) -> dict[str, Path]:
    """Name of each tensor -> its file."""
    index = sorted(path.glob("*.safetensors.index.json"))
    if index:
        weight_map = _read_json(index[0]).get("weight_map", {})
        return {name: path / file for name, file in weight_map.items()}
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path}: got no *.safetensors, want a folder with some (pickled weights are not read)")
    return {name: file for file in files for name in _open_safetensors(file).keys()}  # noqa: SIM118  not a mapping


def _quantization_config(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that says how the folder is quantised; empty if it is not."""
    for found in (config.get("quantization_config"), config.get("compression_config")):
        if found:
            return dict(found)
    beside = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
    for name, method in beside.items():
        if (path / name).is_file():
            found = _read_json(path / name)
            return {"quant_method": method, **found.get("quantization", found)}
    return {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: got a file that is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: got {type(found).__name__}, want an object")
    return found

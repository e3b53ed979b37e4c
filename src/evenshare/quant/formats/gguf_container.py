"""The container of a GGUF file: metadata and the table of tensors, read without touching the tensors' data.

The `gguf` package's reader builds one array object per vocabulary entry and takes 2.6 s for a file of 98 MB with 49152 tokens;
here an array of the metadata is skipped by its lengths and decoded when it is asked for.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
STRING, ARRAY = 8, 9
# Value types of the metadata: number -> struct format.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Tensor types: number -> (name, weights per block, bytes per block). Only those that have a reader.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    30: ("BF16", 1, 2),
}


class GGUFError(ValueError):
    """The file is not a GGUF file that can be read: the message names the file, what was got and what is wanted."""


@dataclass(frozen=True)
class TensorInfo:
    """One row of the table of tensors. `shape` is torch's order, outermost first; `offset` counts from the file's begin."""

    name: str
    type_number: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def type_name(self) -> str:
        return TENSOR_TYPES[self.type_number][0]


class _Cursor:
    """Reads little-endian values one after the other, and says what is missing when the file ends."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def skip(self, nbytes: int, what: str) -> int:
        """Step over `nbytes`; returns where they begin."""
        start = self.at
        if nbytes > len(self.data) - start:
            raise GGUFError(
                f"{self.path}: got {len(self.data)} bytes, want {nbytes} bytes of {what} at offset {start}: truncated file?"
            )
        self.at = start + nbytes
        return start

    def scalar(self, form: str, what: str) -> Any:
        return struct.unpack_from("<" + form, self.data, self.skip(struct.calcsize("<" + form), what))[0]

    def string(self, what: str) -> str:
        nbytes = self.scalar("Q", what)
        start = self.skip(nbytes, what)
        try:
            return self.data[start : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise GGUFError(
                f"{self.path}: got bytes that are not UTF-8 as {what} at offset {start}, want text"
            ) from error

    def value(self, kind: int, what: str) -> Any:
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self.array(what)
        if kind not in SCALARS:
            raise GGUFError(f"{self.path}: got value type {kind} of {what}, want one of 0 to 12")
        return self.scalar(SCALARS[kind], what)

    def array(self, what: str) -> list[Any]:
        kind, count = self.scalar("I", what), self.scalar("Q", what)
        if kind in SCALARS:
            form = SCALARS[kind]
            start = self.skip(count * struct.calcsize("<" + form), what)
            return np.frombuffer(self.data, np.dtype("<" + form), count, start).tolist()
        return [self.value(kind, what) for _ in range(count)]

    def skip_value(self, kind: int, what: str) -> None:
        if kind != ARRAY:
            self.value(kind, what)
            return
        item, count = self.scalar("I", what), self.scalar("Q", what)
        if item in SCALARS:
            self.skip(count * struct.calcsize("<" + SCALARS[item]), what)
        elif item == STRING:
            self._skip_strings(count, what)
        else:
            for _ in range(count):
                self.skip_value(item, what)

    def _skip_strings(self, count: int, what: str) -> None:
        # A vocabulary: inlined, because this loop is most of the time of opening a file.
        data, at, size, unpack = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > size:
                at = size + 1
                break
            at += 8 + unpack(data, at)[0]
        if at > size:
            raise GGUFError(f"{self.path}: got {size} bytes, want {count} strings of {what}: truncated file?")
        self.at = at


class Metadata(Mapping[str, Any]):
    """Key -> value of the file's metadata. Values are decoded when asked for, and kept."""

    def __init__(self, path: Path, data: mmap.mmap, places: dict[str, tuple[int, int]]) -> None:
        self._path, self._data, self._places = path, data, places
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            kind, at = self._places[key]
            cursor = _Cursor(self._path, self._data)
            cursor.at = at
            self._values[key] = cursor.value(kind, key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_container(path: Path, data: mmap.mmap) -> tuple[Metadata, dict[str, TensorInfo]]:
    """Metadata and table of tensors of a mapped file; every tensor's bytes lie inside the file.

    Raises GGUFError if the file is no GGUF file of version 2 or 3, is cut short, or holds a tensor type without a reader.
    """
    cursor = _Cursor(path, data)
    magic = bytes(data[:4])
    cursor.skip(4, "magic")
    if magic != MAGIC:
        raise GGUFError(f"{path}: got first bytes {magic!r}, want {MAGIC!r}: not a GGUF file")
    version = cursor.scalar("I", "version")
    if version not in VERSIONS:
        raise GGUFError(f"{path}: got GGUF version {version}, want one of {VERSIONS}, little-endian")
    num_tensors, num_values = cursor.scalar("Q", "tensor count"), cursor.scalar("Q", "metadata count")
    places = {}
    for i in range(num_values):
        key = cursor.string(f"metadata key {i}")
        kind = cursor.scalar("I", f"type of {key}")
        places[key] = (kind, cursor.at)
        cursor.skip_value(kind, key)
    metadata = Metadata(path, data, places)
    rows = [_tensor_row(cursor, i) for i in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise GGUFError(f"{path}: got general.alignment {alignment!r}, want a positive integer")
    data_begin = -(-cursor.at // alignment) * alignment
    return metadata, {row[0]: _tensor_info(path, len(data), data_begin, *row) for row in rows}


def _tensor_row(cursor: _Cursor, i: int) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string(f"name of tensor {i}")
    num_dims = cursor.scalar("I", f"dimensions of {name}")
    if num_dims > MAX_DIMS:
        raise GGUFError(f"{cursor.path}: got {num_dims} dimensions of tensor {name!r}, want at most {MAX_DIMS}")
    dims = [cursor.scalar("Q", f"shape of {name}") for _ in range(num_dims)]
    return name, tuple(reversed(dims)), cursor.scalar("I", f"type of {name}"), cursor.scalar("Q", f"offset of {name}")


def _tensor_info(
    path: Path, size: int, data_begin: int, name: str, shape: tuple[int, ...], type_number: int, offset: int
) -> TensorInfo:
    if type_number not in TENSOR_TYPES:
        known = ", ".join(type_name for type_name, _, _ in TENSOR_TYPES.values())
        raise GGUFError(f"{path}: got tensor type {type_number} for {name!r}, want one of {known}")
    type_name, block, block_bytes = TENSOR_TYPES[type_number]
    if shape and shape[-1] % block:
        raise GGUFError(f"{path}: got {shape[-1]} columns of {type_name} tensor {name!r}, want a multiple of {block}")
    nbytes = math.prod(shape) // block * block_bytes
    if data_begin + offset + nbytes > size:
        raise GGUFError(
            f"{path}: got {size} bytes, want {data_begin + offset + nbytes} for tensor {name!r}: truncated file?"
        )
    return TensorInfo(name, type_number, shape, data_begin + offset, nbytes)

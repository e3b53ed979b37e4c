"""GGUF files: tensors by name, 4- and 8-bit ones as `QuantizedWeight` with the file's own codes (nothing is quantised again).

    blocks of 32 along k                                               w
    Q4_0   fp16 d, 16 bytes                                            (q - 8) * d
    Q4_1   fp16 d, fp16 m, 16 bytes                                    q * d + m
    Q8_0   fp16 d, 32 int8                                             q * d
    Q4_K   256 weights: fp16 d, fp16 dmin, 12 bytes of 6-bit scale     q * (d * scale) - dmin * min
           and min for 8 groups of 32, 128 bytes of codes

The first half of a group lies in the low nibbles of its 16 bytes, the second in the high ones; in Q4_K a pair of groups shares
32 bytes, one in the low nibbles, the next in the high ones.

Files converted from Hugging Face's llama keep the rows of attn_q and attn_k in the order of interleaved rope: that is the
model's knowledge, and `QuantizedWeight.take_rows` undoes it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenshare.quant.formats.gguf_container import TENSOR_TYPES, GGUFError, Metadata, TensorInfo, read_container
from evenshare.quant.weight import QuantizedWeight

__all__ = ["GGUFError", "GGUFFile", "TensorInfo", "read_gguf"]

GROUP_SIZE = 32
FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFFile(Mapping[str, "QuantizedWeight | torch.Tensor"]):
    """Tensors by name, read when asked for and not kept: F32, F16 and BF16 as torch.Tensor, the others as QuantizedWeight.

    metadata: key -> value (lists for arrays), decoded when asked for.
    infos: name -> TensorInfo (type, shape), without reading the data.
    """

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self._data = data
        self.metadata: Metadata
        self.infos: dict[str, TensorInfo]
        self.metadata, self.infos = read_container(path, data)

    def __getitem__(self, name: str) -> QuantizedWeight | torch.Tensor:
        info = self.infos[name]
        raw = np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)
        if info.type_name in FLOAT_DTYPES:
            # One copy: the map is read-only, and it may go away with the file.
            flat = torch.from_numpy(raw.copy()).view(FLOAT_DTYPES[info.type_name])
            return flat.view(info.shape)
        if len(info.shape) != 2:
            raise GGUFError(
                f"{self.path}: got {info.type_name} tensor {name!r} of shape {info.shape}, want two dimensions"
            )
        n, k = info.shape
        _, block, block_bytes = TENSOR_TYPES[info.type_number]
        return READERS[info.type_name](raw.reshape(n, k // block, block_bytes), k)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


def read_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file (version 2 or 3, little-endian). Tensors are decoded one by one, when asked for.

    Raises FileNotFoundError if there is no such file, and GGUFError (a ValueError) if it is not a GGUF file, is cut short, or
    holds a tensor of another type than F32, F16, BF16, Q4_0, Q4_1, Q4_K, Q8_0. Messages name the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: got no such file, want a GGUF file")
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise GGUFError(f"{path}: got an empty file, want a GGUF file")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return GGUFFile(path, data)


def _float16(blocks: np.ndarray[Any, Any], start: int) -> torch.Tensor:
    """The fp16 at byte `start` of every block: float16 [n, num_blocks]."""
    return torch.from_numpy(np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0])


def _pair_up(nibbles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Codes one a byte [..., 2j] -> canonical bytes [..., j], low nibble first."""
    pairs = nibbles.view("<u2")
    return (pairs | pairs >> 4).astype(np.uint8)


def _nibble_codes(packed: np.ndarray[Any, Any], n: int) -> torch.Tensor:
    """Bytes [..., j] that hold one run of codes in the low nibbles and the next in the high ones -> canonical [n, k / 2]."""
    packed = np.ascontiguousarray(packed)
    halves = np.stack((_pair_up(packed & 15), _pair_up(packed >> 4)), axis=-2)
    return torch.from_numpy(halves.reshape(n, -1))


def _q4_0(blocks: np.ndarray[Any, Any], k: int) -> QuantizedWeight:
    return QuantizedWeight(_nibble_codes(blocks[..., 2:], len(blocks)), _float16(blocks, 0), k, GROUP_SIZE)


def _q4_1(blocks: np.ndarray[Any, Any], k: int) -> QuantizedWeight:
    codes = _nibble_codes(blocks[..., 4:], len(blocks))
    return QuantizedWeight(codes, _float16(blocks, 0), k, GROUP_SIZE, offsets=_float16(blocks, 2))


def _q8_0(blocks: np.ndarray[Any, Any], k: int) -> QuantizedWeight:
    codes = blocks[..., 2:].reshape(len(blocks), k) ^ 0x80  # int8 -> unsigned about 128
    return QuantizedWeight(torch.from_numpy(codes), _float16(blocks, 0), k, GROUP_SIZE, bits=8)


def _q4_k(blocks: np.ndarray[Any, Any], k: int) -> QuantizedWeight:
    n = len(blocks)
    # 12 bytes a | b | c of 4 each. Groups 0..3: scale = low 6 bits of a, min = of b. Groups 4..7: low nibble of c is the
    # scale's, high nibble the min's; their two top bits are the spare ones of a and b.
    a, b, c = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = torch.from_numpy(np.concatenate((a & 63, c & 15 | a >> 6 << 4), axis=-1))
    low = torch.from_numpy(np.concatenate((b & 63, c >> 4 | b >> 6 << 4), axis=-1))
    # fp16 times 6 bits is exact in float32.
    scales = _float16(blocks, 0).float()[..., None] * scale
    offsets = -(_float16(blocks, 2).float()[..., None] * low)
    codes = _nibble_codes(blocks[..., 16:].reshape(n, -1, 4, 32), n)
    return QuantizedWeight(codes, scales.view(n, -1), k, GROUP_SIZE, offsets=offsets.view(n, -1))


READERS: dict[str, Callable[[np.ndarray[Any, Any], int], QuantizedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
}

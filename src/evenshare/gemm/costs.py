"""What the tiles of each kernel cost: tables of constants, one a device, that `evenshare calibrate` measures.

A tile is looked for in the file that $EVENSHARE_GEMM_TABLE names, in the cache folder and in the package, in this order. What no
table has is derived from the tile's sizes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from evenshare._cache import cache_dir
from evenshare.schedule.cost_model import CostModel

VARIABLE = "EVENSHARE_GEMM_TABLE"
SHIPPED = Path(__file__).parent / "tables"
OPERAND_BYTES = {"fp8": 1, "16-bit": 2, "tf32": 4, "fp32": 4}
# Of one SM of an H200: what it multiplies in a microsecond, in full tiles, and what it reads from the L2. Only ratios matter.
FLOPS_PER_US = {"fp8": 9.0e6, "16-bit": 5.3e6, "tf32": 2.6e6, "fp32": 0.4e6}
BYTES_PER_US = 8.0e4


class TileKey(NamedTuple):
    """Whose constants they are."""

    kernel: str  # "matmul", "scaled_matmul" (portable), "hopper_matmul", "hopper_scaled" or "hopper_skinny"
    operands: str  # a key of OPERAND_BYTES
    block_m: int
    block_n: int
    block_k: int  # of one iteration


@dataclass(frozen=True, eq=False)
class CostTable:
    """Constants of one device in microseconds."""

    device: str  # its name as torch has it
    models: Mapping[TileKey, CostModel]

    def model(self, key: TileKey) -> CostModel:
        """That of a tile, derived if it is not in the table."""
        found = self.models.get(key)
        return derive(key) if found is None else found


def derive(key: TileKey) -> CostModel:
    """From a tile's sizes alone. An iteration takes the longer of its multiplications and its loads; a partial's fp32 bytes cost as
    much as the same bytes of operands, and the barrier and the atomic as much as one iteration."""
    iteration_bytes = OPERAND_BYTES[key.operands] * key.block_k * (key.block_m + key.block_n)
    flops = 2 * key.block_m * key.block_n * key.block_k
    c = max(flops / FLOPS_PER_US[key.operands], iteration_bytes / BYTES_PER_US)
    partial = 4 * key.block_m * key.block_n / iteration_bytes
    return CostModel(a=c, b=c * (1.0 + partial), c=c, d=c * (0.5 + partial))


DERIVED = CostTable("", {})


def costs_of(device: torch.device) -> CostTable:
    """The table of a GPU; on a CPU, all of it derived."""
    return _costs_of(device.index) if device.type == "cuda" else DERIVED


@lru_cache
def _costs_of(index: int | None) -> CostTable:
    return load_table(torch.cuda.get_device_name(index))


@lru_cache
def load_table(device: str) -> CostTable:
    """The constants of the device of this name, as far as there are tables of it.

    Raises ValueError for a file that cannot be read as a table, naming it.
    """
    name = f"{slug(device)}.json"
    paths = [SHIPPED / name, user_table(device)]
    if named := os.environ.get(VARIABLE):
        paths.append(Path(named).expanduser())
        if not paths[-1].exists():
            raise ValueError(f"{VARIABLE}: got {named}, want a file")
    models: dict[TileKey, CostModel] = {}
    for path in paths:
        if path.exists():
            owner, found = read_table(path)
            models |= found if owner == device else {}
    return CostTable(device, models)


def slug(device: str) -> str:
    """A file's name for a device's."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def user_table(device: str) -> Path:
    """Where `evenshare calibrate` writes."""
    return cache_dir() / "gemm" / f"{slug(device)}.json"


def read_table(path: Path) -> tuple[str, dict[TileKey, CostModel]]:
    """(device, constants) of a file. Raises ValueError if it is no table."""
    try:
        text: dict[str, Any] = json.loads(path.read_text())
        models = {
            TileKey(entry["kernel"], entry["operands"], *entry["tile"]): CostModel(*(entry[name] for name in "abcd"))
            for entry in text["tiles"]
        }
        return text["device"], models
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: got no table of GEMM costs ({error!r}), want one of `evenshare calibrate`") from None


def write_table(path: Path, device: str, models: Mapping[TileKey, CostModel], **about: Any) -> None:
    """A file that `read_table` reads. about: what else to say of it."""
    tiles = [
        {"kernel": key.kernel, "operands": key.operands, "tile": list(key[2:])}
        | {name: float(f"{getattr(model, name):.4g}") for name in "abcd"}
        for key, model in models.items()
    ]
    lines = ",\n    ".join(json.dumps(tile) for tile in tiles)
    head = json.dumps({"device": device, "unit": "us", **about})[:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head}, "tiles": [\n    {lines}\n]}}\n')

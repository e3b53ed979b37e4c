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
from evenshare.schedule.plan import UniformPlan

VARIABLE = "EVENSHARE_GEMM_TABLE"
SHIPPED = Path(__file__).parent / "tables"
CONSTANTS = ("a", "b", "c", "d", "whole_c")
OPERAND_BYTES = {"fp8": 1, "16-bit": 2, "tf32": 4, "fp32": 4}
# Of one SM of an H200 in a microsecond: what it multiplies in full tiles; what it reads from the L2 alone, and together with
# neighbours that read the same at the same time. Only ratios matter.
FLOPS_PER_US = {"fp8": 9.0e6, "16-bit": 5.3e6, "tf32": 2.6e6, "fp32": 0.4e6}
BYTES_PER_US, SHARED_BYTES_PER_US = 5.3e4, 1.1e5


class TileKey(NamedTuple):
    """Whose constants they are."""

    kernel: str  # "matmul", "scaled_matmul" (portable), "hopper_matmul", "hopper_scaled" or "hopper_skinny"
    operands: str  # a key of OPERAND_BYTES
    block_m: int
    block_n: int
    block_k: int  # of one iteration


@dataclass(frozen=True)
class TileCosts(CostModel):
    """The model of a tile, in microseconds.

    Iterations come at two prices. Workers that begin whole tiles together read the same rows and columns at the same time, and the
    L2 answers them together; those of cut tiles are at different k, and each reads for itself. On an H200, 256 x 3584 x 8192 took
    59 us in 132 even shares of 112 tiles of 64 x 128, 0.48 us an iteration; 1024 x 1024 x 8192 took 29 us in 128 whole ones, 0.22.
    """

    whole_c: float  # an iteration of a tile that is not cut; c is one of a cut tile

    def makespan(self, shares: UniformPlan) -> float:
        """When the worker with most to do is done."""
        return sum(getattr(self, name) * times for name, times in zip(CONSTANTS, count_work(shares), strict=True))


def count_work(shares: UniformPlan) -> tuple[int, int, int, int, int]:
    """How often the worker with most to do pays each of CONSTANTS."""
    workers, iters = shares.num_workers, shares.iters_per_tile
    waves = -(-shares.num_whole // workers)
    tail_tiles = shares.num_tiles - shares.num_whole
    if tail_tiles * iters == 0:
        return waves, 0, 0, 0, waves * iters
    share = -(-tail_tiles * iters // workers)
    # Contributors of a tile beside the one that merges: a share may begin anywhere in it, unless each tile has as many of its own.
    further = workers // tail_tiles + (1 if workers % tail_tiles else -1)
    return waves + -(-share // iters), int(further > 0), share, further, waves * iters


@dataclass(frozen=True, eq=False)
class CostTable:
    """Constants of one device."""

    device: str  # its name as torch has it
    models: Mapping[TileKey, TileCosts]

    def model(self, key: TileKey) -> TileCosts:
        """That of a tile, derived if it is not in the table."""
        found = self.models.get(key)
        return derive(key) if found is None else found


def derive(key: TileKey) -> TileCosts:
    """From a tile's sizes alone. An iteration takes the longer of its multiplications and its loads; a partial's fp32 bytes cost as
    much as the same bytes of operands, and the barrier and the atomic as much as one iteration."""
    num_bytes = OPERAND_BYTES[key.operands] * key.block_k * (key.block_m + key.block_n)
    multiplied = 2 * key.block_m * key.block_n * key.block_k / FLOPS_PER_US[key.operands]
    c, whole_c = (max(multiplied, num_bytes / speed) for speed in (BYTES_PER_US, SHARED_BYTES_PER_US))
    partial = 4 * key.block_m * key.block_n / num_bytes
    return TileCosts(a=c, b=c * (1.0 + partial), c=c, d=c * (0.5 + partial), whole_c=whole_c)


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
    models: dict[TileKey, TileCosts] = {}
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


def read_table(path: Path) -> tuple[str, dict[TileKey, TileCosts]]:
    """(device, constants) of a file. Raises ValueError if it is no table."""
    try:
        text: dict[str, Any] = json.loads(path.read_text())
        models = {
            TileKey(entry["kernel"], entry["operands"], *entry["tile"]): TileCosts(*(entry[name] for name in CONSTANTS))
            for entry in text["tiles"]
        }
        return text["device"], models
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: got no table of GEMM costs ({error!r}), want one of `evenshare calibrate`") from None


def write_table(path: Path, device: str, models: Mapping[TileKey, TileCosts], **about: Any) -> None:
    """A file that `read_table` reads. about: what else to say of it."""
    tiles = [
        {"kernel": key.kernel, "operands": key.operands, "tile": list(key[2:])}
        | {name: float(f"{getattr(model, name):.4g}") for name in CONSTANTS}
        for key, model in models.items()
    ]
    lines = ",\n    ".join(json.dumps(tile) for tile in tiles)
    head = json.dumps({"device": device, "unit": "us", **about})[:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head}, "tiles": [\n    {lines}\n]}}\n')

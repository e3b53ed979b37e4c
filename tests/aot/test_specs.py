"""The specs name their kernels' arguments, cover every tile size that a launch can choose, and outcomes are judged as promised."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch
import triton

import evenshare
from evenshare.attention import tiles
from evenshare.attention.problem import Problem
from evenshare.gemm import hopper, hopper_scaled, hopper_skinny
from evenshare.gemm.plan import choose_tile
from evenshare.quant import plan as quant_plan
from tests.aot import specs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Called by kernels of other files, never launched.
DEVICE_FUNCTIONS = {
    "load_tile",
    "load_tile_id",
    "readable_len",
    "key_rows",
    "pieces",
    "row_index",
    "valid_rows",
    "produce",
}
DEVICE_FUNCTIONS |= {"request_bounds", "store_segment", "clear_segments", "dequantize", "accumulate"}
DEVICE_FUNCTIONS |= {"tile_coordinates", "coordinates", "stage_before", "parts_of_64", "store_columns"}
DEVICE_FUNCTIONS |= {"join", "merge_tile", "merge_partials", "with_sink", "store_rows"}
DEVICE_FUNCTIONS |= {
    "integers",
    "looked_up",
    "as_pair",
    "as_batch",
    "as_operand",
    "store_rows",
    "subnormals",
    "parts_of",
    "zeros_of",
}
DEVICE_MODULES = {f"evenshare.ops.kernels.sampling_{name}" for name in ("rows", "search")}  # that hold nothing else
BLOCKS = ("BLOCK_M", "BLOCK_N", "BLOCK_K")


def constants_of(kernel_name: str, wide: bool | None = None) -> set[tuple[Any, ...]]:
    """(fp32 or not, blocks, warps, stages) of the specs of one kernel."""
    return {
        ("*fp32" in (spec.types.get("out_ptr"),), *(spec.constants[b] for b in BLOCKS if b in spec.constants),
         spec.num_warps, spec.constants["NUM_STAGES"])
        for spec in specs.all_specs()
        if spec.name.split()[0] in kernel_name.split("|") and (wide is None or (spec.constants["HEAD_DIM"] > 128) == wide)
    }  # fmt: skip


def test_names_are_unique() -> None:
    names = [spec.name for spec in specs.all_specs()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("spec", specs.all_specs(), ids=lambda spec: spec.name)
def test_every_argument_has_a_type(spec: specs.Spec) -> None:
    types, constants, attributes = spec.signature()
    assert list(types) == list(inspect.signature(spec.kernel.fn).parameters)
    flat = [part for kind in types.values() for part in (kind if isinstance(kind, tuple) else (kind,))]
    assert len(constants) == flat.count("constexpr")
    assert not set(constants) & set(attributes)


def test_a_wrong_name_is_refused() -> None:
    spec = specs.all_specs()[0]
    wrong = specs.Spec("wrong", spec.kernel, spec.constants, {**spec.types, "c_ptr": "*fp32"})
    with pytest.raises(ValueError, match="wrong: got no or a wrong entry for c_ptr"):
        wrong.signature()


def test_every_launched_kernel_has_a_spec() -> None:
    known = {id(spec.kernel) for spec in specs.all_specs()}
    launched = {}
    for module in pkgutil.walk_packages(evenshare.__path__, "evenshare."):
        if ".kernels." not in module.name or module.name in DEVICE_MODULES:
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            kernel = isinstance(value, triton.runtime.KernelInterface) and value.fn.__module__ == module.name
            if kernel and not name.startswith("_") and name not in DEVICE_FUNCTIONS:
                launched[f"{module.name}.{name}"] = value
    assert launched
    assert [name for name, kernel in launched.items() if id(kernel) not in known] == []


def test_gemm_tiles_are_covered() -> None:
    wanted = set()
    for itemsize in (2, 4):
        for m, n in ((1, 64), (64, 64), (4096, 4096)):
            for aligned in (True, False):
                tile = choose_tile(m, n, itemsize, 132, aligned)
                blocks = (tile.block_m, tile.block_n, tile.block_k)
                wanted.add((itemsize == 4, *blocks, tile.num_warps, tile.num_stages))
    assert wanted <= constants_of("gemm")
    fp8 = {choose_tile(m, 4096, 1, 132, aligned) for m in (1, 64, 4096) for aligned in (True, False)}
    known = {(*(spec.constants[b] for b in BLOCKS), spec.num_warps, spec.constants["NUM_STAGES"])
             for spec in specs.all_specs() if spec.name.startswith("fp8 gemm")}  # fmt: skip
    assert {(t.block_m, t.block_n, t.block_k, t.num_warps, t.num_stages) for t in fp8} <= known


def test_hopper_gemm_tiles_are_covered() -> None:
    compiled = [spec for spec in specs.all_specs() if spec.name.startswith("hopper")]
    dense = {(c["BLOCK_M"], c["BLOCK_N"], c["CONSUMERS"], c["STAGES"])
             for spec in compiled if "CONSUMERS" in (c := spec.constants)}  # fmt: skip
    for tile in (*hopper.TILES, *hopper_scaled.TILES):
        assert (tile.block_m, tile.block_n, tile.consumers, tile.num_stages) in dense
    skinny = {(c["BLOCK_M"], c["STRIPS"], c["STAGES"])
              for spec in compiled if spec.name.startswith("hopper skinny") for c in [spec.constants]}  # fmt: skip
    for tile in (hopper_skinny.SkinnyTile(rows, strips) for rows in hopper_skinny.BLOCK_M for strips in (1, 2)):
        assert (tile.block_m, tile.strips, tile.num_stages) in skinny


def test_w4a16_tiles_are_covered() -> None:
    wanted = set()
    for itemsize in (2, 4):
        for m in (1, 17, 33, 65):
            tile = quant_plan.choose_tile(m, itemsize)
            wanted.add((itemsize == 4, tile.block_m, tile.block_n, tile.num_warps, tile.num_stages))
    # float32 has the 16-bit tile of 17 to 32 rows, with half the registers of its 64 x 64 one.
    assert wanted - {(True, 32, 64, 4, 3)} <= constants_of("w4a16")


@pytest.mark.parametrize("head_dim", [128, 256])
def test_attention_tiles_are_covered(head_dim: int) -> None:
    wanted = set()
    for dtype in (torch.bfloat16, torch.float32):
        problem = Problem(8, 2, head_dim, head_dim, dtype, 16, True, -1, 0.0, 1.0)
        for rows in (1, 8, 16, 64):
            tile = tiles.choose_tile(problem, rows)
            wanted.add((dtype == torch.float32, tile.block_m, tile.block_n, tile.num_warps, tile.num_stages))
    assert wanted <= constants_of("attention", wide=head_dim > 128)

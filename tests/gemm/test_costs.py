"""Tables of costs: where they are found, what they say, and that plans follow them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from evenshare.gemm import costs, hopper, hopper_scaled, hopper_skinny, plan
from evenshare.gemm.costs import CostTable, TileCosts, TileKey, derive, load_table, read_table, write_table

H200 = "NVIDIA H200"
KEYS = [
    *map(hopper.tile_key, hopper.TILES),
    *map(hopper_scaled.tile_key, hopper_scaled.TILES),
    *(hopper_skinny.tile_key(hopper_skinny.SkinnyTile(rows, n)) for rows in hopper_skinny.BLOCK_M for n in (1, 2)),
]
PORTABLE_KEYS = [plan.tile_key(tile, size) for size, tiles in plan.TILES.items() for tile in tiles]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("EVENSHARE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(costs.VARIABLE, raising=False)
    load_table.cache_clear()
    yield
    load_table.cache_clear()


def test_the_shipped_table_has_every_hopper_tile() -> None:
    owner, models = read_table(costs.SHIPPED / "nvidia-h200.json")
    assert owner == H200
    assert set(models) >= set(KEYS)
    assert load_table(H200) is load_table(H200)


@pytest.mark.parametrize("key", [*KEYS, *PORTABLE_KEYS], ids=str)
def test_derived_constants(key: TileKey) -> None:
    """Of an unknown device: positive, and larger for a larger tile."""
    model = load_table("no such device").model(key)
    assert min(model.a, model.b, model.c, model.d) > 0
    larger = derive(key._replace(block_n=2 * key.block_n))
    assert larger.c > model.c
    assert larger.d > model.d


def test_what_a_user_has_measured_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = load_table(H200)
    cached, named = TileCosts(1.0, 2.0, 3.0, 4.0, 2.5), TileCosts(5.0, 6.0, 7.0, 8.0, 6.5)
    write_table(costs.user_table(H200), H200, {KEYS[0]: cached, KEYS[1]: cached})
    write_table(tmp_path / "mine.json", H200, {KEYS[1]: named}, date="today")
    monkeypatch.setenv(costs.VARIABLE, str(tmp_path / "mine.json"))
    load_table.cache_clear()
    table = load_table(H200)
    assert [table.model(key) for key in KEYS[:2]] == [cached, named]
    assert table.model(KEYS[2]) == shipped.model(KEYS[2])
    assert load_table("another device").model(KEYS[1]) == derive(KEYS[1])


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(costs.VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=rf"{costs.VARIABLE}: got .*none.json, want a file"):
        load_table(H200)
    for text in ("{", "[]", '{"device": "x", "tiles": [{"kernel": "matmul"}]}'):
        (tmp_path / "none.json").write_text(text)
        with pytest.raises(ValueError, match=r"none.json: got no table of GEMM costs"):
            load_table(H200)


def test_a_cpu_has_derived_constants() -> None:
    assert costs.costs_of(torch.device("cpu")) is costs.DERIVED


def test_plans_follow_the_table() -> None:
    """The tile with the cheapest iterations is taken, and cut or not by what a partial costs."""
    for cheap in hopper.TILES:
        models = {hopper.tile_key(tile): TileCosts(1.0, 1.0, 1.0, 1.0, 1.0) for tile in hopper.TILES}
        models[hopper.tile_key(cheap)] = TileCosts(1e-3, 1e-3, 1e-3, 1e-3, 1e-3)
        assert hopper.plan_matmul(1024, 1024, 8192, False, 132, CostTable("", models)).tile == cheap
    key = hopper_skinny.tile_key(hopper_skinny.SkinnyTile(16, 2))
    for partial, split in ((1.0, True), (1000.0, False)):
        table = CostTable("", {key: TileCosts(1.0, partial, 1.0, partial, 1.0)})
        shares = hopper_skinny.plan_matmul(16, 64, 16384, True, 132, table).shares
        assert (shares.num_workers > 1) == split
    portable = plan.tile_key(plan.HALF_TILES[1], 2)
    for partial, split in ((1.0, True), (1000.0, False)):
        table = CostTable("", {portable: TileCosts(1.0, partial, 1.0, partial, 1.0)})
        shares = plan.plan_matmul(64, 64, 16384, 2, 132, costs=table).shares
        assert (shares.num_workers > 1) == split

"""The grouped GEMM for Hopper on the CPU in `tests.emulator`, its table of row tiles in Triton's interpreter, against float64."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator

import pytest
import torch

from evenshare.device.target import Target
from evenshare.device.workspace import stream_workspace
from evenshare.gemm import hopper_grouped, launch, reference
from evenshare.gemm.epilogue import Epilogue
from evenshare.gemm.kernels import hopper_grouped as kernels
from tests.emulator import Emulated

BF16, FP16 = torch.bfloat16, torch.float16
# Rows of each group: whole tiles and ends of tiles, empty groups at both ends and between, one with all, none at all.
DEALS = ([130, 0, 64, 256, 1], [0, 0, 200, 0], [300], [0, 0], [5, 7, 128])
WIDE, NARROW = hopper_grouped.GroupedTile(256, 3, 0), hopper_grouped.GroupedTile(128, 5, 0)


@pytest.fixture(autouse=True, params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def _place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the kernel runs; tensors are made there."""
    if request.param == "gpu":
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("no Hopper GPU")
        with torch.device("cuda"):
            yield
        return
    if torch.cuda.is_available():
        pytest.skip("the interpreter is chosen at import, and this machine has a GPU")
    monkeypatch.setattr(kernels, "grouped_matmul", Emulated(kernels.grouped_matmul))
    monkeypatch.setattr(Emulated, "seeds", itertools.count(zlib.crc32(request.node.name.encode())))
    yield


def target(num_sms: int = 5) -> Target:
    return Target("triton", torch.get_default_device(), num_sms, (9, 0), False)


def use(monkeypatch: pytest.MonkeyPatch, tile: hopper_grouped.GroupedTile, min_steps: int = 1) -> None:
    """This tile, its cut_steps of what is cut, for any number of rows."""
    monkeypatch.setattr(hopper_grouped, "FEW_ROWS", -1)
    monkeypatch.setattr(hopper_grouped, "choose_tile", lambda *_: tile)
    monkeypatch.setattr(hopper_grouped, "MIN_STEPS_PER_SHARE", min_steps)


def offsets_of(rows: list[int], first: int = 0) -> torch.Tensor:
    return torch.tensor([*itertools.accumulate(rows, initial=first)], dtype=torch.int32)


def product(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, by_tma: bool = True, num_sms: int = 5,
    activation: str | None = None, bias: torch.Tensor | None = None, first_group: int = 0,
) -> torch.Tensor:  # fmt: skip
    n_out = w.shape[2] // 2 if activation == "silu_and_multiply" else w.shape[2]
    wide = torch.full((x.shape[0] + 2, n_out + 8 + -n_out % 8), torch.nan, dtype=x.dtype)
    out = wide[1:-1, :n_out] if by_tma else wide[1:-1, 1 : 1 + n_out]
    assert hopper_grouped.refusal(x, w, offsets.shape[0] - 1, target()) is None
    launch.grouped_matmul(
        x, w, offsets, bias, activation, None, None, x.shape[0], out, target(num_sms), first_group=first_group
    )
    if first_group == 0 and w.shape[0] == offsets.shape[0] - 1:
        assert int((~wide.isnan()).sum()) == out.numel(), "written outside"
    return out


def check(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, activation: str | None = None,
    bias: torch.Tensor | None = None, by_tma: bool = True, num_sms: int = 5,
) -> None:  # fmt: skip
    """Products are exact and sums float32: what is left is one rounding of the output. Rows that are no group's are 0."""
    got = product(x, w, offsets, by_tma, num_sms, activation, bias)
    want = torch.zeros(got.shape, dtype=torch.float64)
    for group, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        of_group = Epilogue(None if bias is None else bias[group].double(), activation)
        want[begin:end] = reference.matmul(x[begin:end].double(), w[group].double(), of_group)
    most = float(want.abs().max()) if want.numel() else 0.0
    assert float((got.double() - want).abs().max()) <= torch.finfo(x.dtype).eps * most
    assert not stream_workspace(0, 0, x.device).counters.any()


def operands(
    num_rows: int, num_groups: int, k: int, n: int, dtype: torch.dtype = FP16
) -> tuple[torch.Tensor, torch.Tensor]:
    """x with padded rows, and Linears' weights, [n, k] each."""
    x = torch.full((num_rows, k + 16 - k % 8), torch.nan, dtype=dtype)[:, :k]
    w = torch.full((num_groups, n, k + 8 - k % 8), torch.nan, dtype=dtype)[:, :, :k]
    return x.copy_(torch.randn(num_rows, k)), w.copy_(torch.randn(num_groups, n, k) / 8).mT


@pytest.mark.parametrize(("tile", "dtype"), [(WIDE, BF16), (NARROW, FP16)], ids=["wide", "narrow"])
@pytest.mark.parametrize("rows", DEALS, ids=str)
def test_every_deal(
    monkeypatch: pytest.MonkeyPatch, rows: list[int], tile: hopper_grouped.GroupedTile, dtype: torch.dtype
) -> None:
    """Rows and columns that end inside a tile; tiles whole, cut, and of several contributors."""
    use(monkeypatch, tile)
    x, w = operands(sum(rows) or 20, len(rows), 136, 264, dtype)
    check(x, w, offsets_of(rows))


@pytest.mark.parametrize("cut_steps", [0, 1 << 20])
@pytest.mark.parametrize("num_sms", [3, 40])
def test_shares(monkeypatch: pytest.MonkeyPatch, num_sms: int, cut_steps: int) -> None:
    """More workers than tiles and fewer; cut always or never. The same bits on the workspace of the run before."""
    use(monkeypatch, NARROW._replace(cut_steps=cut_steps), min_steps=2)
    x, w = operands(270, 3, 392, 136)
    offsets = offsets_of([140, 0, 130])
    check(x, w, offsets, num_sms=num_sms)
    partials = stream_workspace(0, 0, x.device).partials.fill_(torch.nan)
    first = product(x, w, offsets, num_sms=num_sms)
    assert partials.isnan().all() == (cut_steps > 0)
    product(x.flip(0).contiguous(), w, offsets_of([3, 240, 27]), num_sms=num_sms)
    assert torch.equal(product(x, w, offsets, num_sms=num_sms), first)


def test_workers_without_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 tiles of 3 steps, 2 a share, are 12 shares."""
    use(monkeypatch, NARROW, min_steps=2)
    x, w = operands(1024, 2, 192, 40)
    check(x, w, offsets_of([512, 512]), num_sms=16)


@pytest.mark.parametrize("by_tma", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "silu_and_multiply"])
def test_epilogues(monkeypatch: pytest.MonkeyPatch, activation: str, by_tma: bool) -> None:
    """Rows before the first group and behind the last are 0; the bias is each group's."""
    use(monkeypatch, WIDE)
    x, w = operands(300, 3, 72, 208)
    check(x, w, offsets_of([130, 2, 128], first=9), activation, torch.randn(208, 3).t(), by_tma)


def test_some_of_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other groups stay as they are, those of none become 0."""
    use(monkeypatch, NARROW)
    x, w = operands(300, 4, 72, 40)
    offsets = offsets_of([130, 20, 100, 40])
    whole = product(x, w, offsets)
    part = product(x, w[1:3], offsets, first_group=1)
    assert torch.equal(part[130:250], whole[130:250])
    assert part[:130].isnan().all()
    assert part[250:290].isnan().all()
    assert (part[290:] == 0).all()


def test_what_is_left_to_the_portable_kernel() -> None:
    x, w = operands(300, 2, 64, 40)
    cases = {
        "16-bit operands": (x.float(), w.float(), 2),
        "up to 64 rows a group": (x, w, 5),
        "nothing to multiply": (x[:, :0], w[:, :0], 2),
        "x has no rows": (x[:, 1:], w[:, 1:], 2),
        "w has no columns": (x, w.contiguous(), 2),
        "side by side": (x, w[:, :, :8], 2),
    }
    for reason, operands_ in cases.items():
        assert reason in str(hopper_grouped.refusal(*operands_, target()))
    assert hopper_grouped.refusal(x, w, 2, target()) is None
    assert hopper_grouped.refusal(x, w, 2, Target("triton", torch.device("cpu"), 5, (8, 0), False)) is not None


def test_bad_offsets_touch_no_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, NARROW)
    x, w = operands(150, 3, 72, 40)
    for values in ([0, 400, 20, 150], [-9, 30, 10, 1 << 30], [150, 0, 0, 0]):
        product(x, w, torch.tensor(values, dtype=torch.int32))


def test_wide_tiles_where_all_sms_get_some() -> None:
    wide, narrow = (hopper_grouped.choose_tile(m, 8, n, 132) for m, n in ((8192, 28672), (1024, 2048)))
    assert wide._replace(cut_steps=0) == WIDE
    assert narrow._replace(cut_steps=0) == NARROW
    assert min(wide.cut_steps, narrow.cut_steps) > 0

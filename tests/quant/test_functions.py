"""`w4a16_matmul` and `w8a16_matmul` on both backends: shapes, strides, epilogue, determinism and errors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from evenshare.device.target import select_target
from evenshare.quant import QuantizedWeight, launch, packing, prepare, reference, w4a16_matmul, w8a16_matmul
from evenshare.quant import plan as quant_plan
from evenshare.quant.encodings import CODEBOOKS
from evenshare.quant.plan import choose_tile, plan_matmul, plan_split_k
from evenshare.quant.rounding import pack_codes
from evenshare.schedule.plan import END
from evenshare.schedule.uniform import expand
from tests.quant.helpers import FORMS, ZERO_FORMS, assert_product, product, random_permutation, random_weight

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")


@pytest.fixture(autouse=True)
def _split_small_problems(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shares of one k-step, so that tiny shapes are split and merged too."""
    monkeypatch.setattr(quant_plan, "MIN_STEPS_PER_SHARE", 1)
    plan_matmul.cache_clear()
    yield
    plan_matmul.cache_clear()


@pytest.mark.parametrize(("bits", "zero_form"), [(4, form) for form in FORMS] + [(8, form) for form in ZERO_FORMS])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 256, -1])
def test_every_form(device: torch.device, group_size: int, bits: int, zero_form: str) -> None:
    weight = random_weight(40, 328, group_size, zero_form, bits, device=device)
    x = torch.randn(3, 328, device=device)
    assert_product(product(x, weight, backend="triton"), x, weight)


@pytest.mark.parametrize("m", [1, 3, 17, 40, 130])
@pytest.mark.parametrize(("n", "k"), [(40, 72), (1, 1), (130, 33), (7, 300)])
def test_every_shape(device: torch.device, m: int, n: int, k: int) -> None:
    weight = random_weight(n, k, 16, "offsets", device=device)
    x = torch.randn(m, k, device=device)
    assert_product(product(x, weight, backend="triton"), x, weight)


@pytest.mark.parametrize("encoding", list(CODEBOOKS))
def test_every_code_in_every_place(encoding: str, device: torch.device) -> None:
    """All 16 codes in all 8 places of a word, bit for bit, with scales from 2^-20 to 2^20."""
    codes = (torch.arange(128)[None, :] + torch.arange(16)[:, None]) % 16
    scales = torch.exp2(torch.linspace(-20, 20, 16).round())[:, None]
    weight = QuantizedWeight(pack_codes(codes.to(torch.uint8), 4), scales, 128, -1, encoding=encoding).to(device)
    y = product(torch.eye(128, device=device), weight, backend="triton")
    assert torch.equal(y.T, torch.tensor(CODEBOOKS[encoding], device=device)[codes.to(device)] * scales.to(device))


@pytest.mark.parametrize("padding", [0, 1, 56])
@pytest.mark.parametrize(("bits", "zero_form"), [(4, "symmetric"), (4, "offsets"), (8, "zeros"), (4, "e2m1")])
def test_permutations(bits: int, zero_form: str, padding: int, device: torch.device) -> None:
    weight = random_weight(40, 200, 16, zero_form, bits, device=device, permutation=random_permutation(200, padding))
    for m in (1, 20, launch.GATHER_ROWS + 1):
        x = torch.randn(m, 400, device=device)[:, ::2]
        assert_product(product(x, weight, backend="triton"), x, weight)


def test_padding_reads_nothing(device: torch.device) -> None:
    """A NaN in x reaches the rows of its token alone, and a column of W that is missing does not pass it on."""
    permutation = torch.cat((torch.arange(20), torch.full((12,), -1))).int()
    weight = random_weight(8, 21, 16, device=device, permutation=permutation)
    x = torch.randn(3, 21, device=device)
    x[:, 20] = float("nan")
    y = product(x, weight, backend="triton")
    assert y.isfinite().all()
    x[:, 20] = 0
    assert torch.equal(y, product(x, weight, backend="triton"))


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
def test_half(device: torch.device, scale_dtype: torch.dtype) -> None:
    weight = random_weight(40, 200, 32, "zeros", dtype=scale_dtype, device=device)
    x = torch.randn(5, 200, device=device).half()
    assert_product(product(x, weight, backend="triton"), x, weight)


def test_half_sums_pass_its_largest_number_before_the_scale(device: torch.device) -> None:
    # The sum of x times codes is 1.4e6; of x times weights, 1400.
    weight = QuantizedWeight(
        torch.full((8, 256), 0xFF, dtype=torch.uint8),
        torch.full((8, 4), 1e-3),
        512,
        128,
        zeros=torch.zeros(8, 4, dtype=torch.uint8),
    ).to(device)
    x = torch.full((2, 512), 190.0, device=device).half()
    assert_product(product(x, weight, backend="triton"), x, weight)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_epilogue(device: torch.device, backend: str, activation: str) -> None:
    weight = random_weight(40, 300, 32, device=device)
    x = torch.randn(3, 300, device=device)
    bias = torch.randn(80, device=device)[::2]
    y = product(x, weight, bias=bias, activation=activation, backend=backend)
    assert_product(y, x, weight, bias, activation)


@pytest.mark.parametrize("activation", ["silu_and_multiply", "gelu_and_multiply", "gelu_tanh_and_multiply"])
@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize(("m", "n"), [(3, 2), (3, 40), (70, 130), (3, 256), (1, 258)])
def test_gated(m: int, n: int, backend: str, activation: str, device: torch.device) -> None:
    weight = random_weight(n, 200, 32, "offsets", device=device)
    x, bias = torch.randn(m, 200, device=device), torch.randn(n, device=device)
    residual = torch.randn(n // 2, m, device=device).T
    y = product(x, weight, bias=bias, activation=activation, residual=residual, backend=backend)
    # As for a plain product (`assert_product`), for both halves: d(act(g) u) <= 1.2 |dg| |u| + |act(g)| |du|, |act(g)| <= |g|;
    # and some roundings of the activation, the product and the sum.
    want = reference.matmul(x, weight, bias, activation, residual)
    dense = weight.dequantize().double().T
    gate, up = (x.double() @ dense + bias.double()).chunk(2, -1)
    spread = (x.double().abs() @ dense.abs() + bias.double().abs()).chunk(2, -1)
    bound = (200**0.5 / 2 + 2) * (1.2 * spread[0] * up.abs() + gate.abs() * spread[1])
    bound += 4 * (gate.abs() * up.abs() + residual.double().abs() + want.abs())
    assert y.shape == (m, n // 2)
    assert ((y.double() - want).abs() <= torch.finfo(torch.float32).eps * bound).all()


def test_gated_tiles_stay_within_the_padded_columns() -> None:
    """Column tiles of up to 128 columns, half of them of each kind, read no column past the packed weight."""
    for n_out in range(1, 400):
        packed = packing.pack(random_weight(2 * n_out, 16, 16))
        for half in (32, 64):
            assert n_out + -(-n_out // half) * half <= packed.padded_n


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 40)])
def test_residual(shape: tuple[int, ...], backend: str, device: torch.device) -> None:
    weight = random_weight(24, 40, 16, device=device)
    x = torch.randn(shape, device=device)
    plain = product(x, weight, activation="relu", backend=backend)
    wide = torch.randn(*shape[:-1], 24, device=device).double()
    for residual in (wide, wide.half(), wide[..., :1].expand(*shape[:-1], 24)):
        y = product(x, weight, activation="relu", residual=residual, backend=backend)
        assert y.dtype == x.dtype
        bound = torch.finfo(y.dtype).eps * (plain.double().abs() + residual.double().abs())
        assert ((y.double() - plain.double() - residual.double()).abs() <= bound).all()
    out = wide.float()
    want = product(x, weight, residual=out.clone(), backend=backend)
    assert product(x, weight, residual=out, out=out, backend=backend) is out
    assert torch.equal(out, want)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_any_strides(device: torch.device, backend: str) -> None:
    weight = random_weight(24, 40, 16, "offsets", device=device)
    whole = torch.randn(2, 6, 40, device=device)
    views = [
        whole[:, 3:, :],
        whole[0, ::2],
        torch.randn(40, 3, device=device).T,
        torch.randn(3, 1000, device=device)[:, 100:140],
        torch.randn(3, 80, device=device)[:, ::2],
        whole[0, :1].expand(4, 40),
        whole[0, 0],
    ]
    for x in views:
        y = product(x, weight, backend=backend)
        assert y.shape == (*x.shape[:-1], 24)
        assert_product(y, x, weight)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_out_is_written_in_its_own_strides(device: torch.device, backend: str) -> None:
    weight = random_weight(24, 40, 16, device=device)
    x = torch.randn(2, 3, 40, device=device)
    buffer = torch.full((24, 8), 7.0, device=device)
    out = buffer.T[1:7:2]
    assert product(x[0], weight, out=out, backend=backend) is out
    assert_product(out, x[0], weight)
    untouched = buffer.clone()
    untouched.T[1:7:2] = 7.0
    assert (untouched == 7.0).all()
    out3 = torch.empty(2, 3, 48, device=device)[..., ::2]
    assert product(x, weight, out=out3, backend=backend) is out3
    assert_product(out3, x, weight)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_empty(device: torch.device, backend: str) -> None:
    weight = random_weight(24, 40, 16, device=device)
    x = torch.randn(4, 3, 40, device=device)
    assert product(x[0, 0:0], weight, backend=backend).shape == (0, 24)
    assert product(x[:, 0:0], weight, backend=backend).shape == (4, 0, 24)
    assert product(x[0], random_weight(0, 40, 16, device=device), backend=backend).shape == (3, 0)


def test_one_group_of_any_k_equals_minus_one(device: torch.device) -> None:
    weight = random_weight(16, 256, -1, device=device)
    x = torch.randn(2, 256, device=device)
    same = QuantizedWeight(weight.codes, weight.scales, 256, 256)
    assert torch.equal(product(x, weight, backend="triton"), product(x, same, backend="triton"))


def test_launches_are_independent_and_repeat_bit_for_bit(device: torch.device) -> None:
    # Few tiles and a long k: every tile is split, and all launches share one workspace.
    weight = random_weight(40, 1024, 32, "offsets", device=device)
    inputs = [torch.randn(m, 1024, device=device) for m in (3, 3, 33)]
    first = [product(x, weight, backend="triton") for x in inputs]
    for x, y in zip(inputs, first, strict=True):
        assert_product(y, x, weight)
    for _ in range(3):
        for x, y in zip(inputs, first, strict=True):
            assert torch.equal(product(x, weight, backend="triton"), y)


def test_rows_past_the_last_do_not_leak(device: torch.device) -> None:
    weight = random_weight(8, 40, 16, device=device)
    x = torch.full((20, 64), float("nan"), device=device)
    x[:3, :40] = torch.randn(3, 40, device=device)
    assert_product(product(x[:3, :40], weight, backend="triton"), x[:3, :40], weight)


def test_prepare_packs_for_the_kernel(device: torch.device) -> None:
    weight = prepare(random_weight(8, 40, 16, device=device), torch.float32, backend="triton")
    assert list(weight.packed) == ["triton"]


@pytest.mark.parametrize("min_steps", [1, 8])
def test_no_share_is_empty(min_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant_plan, "MIN_STEPS_PER_SHARE", min_steps)
    for m, n, num_steps, num_sms in [
        (1, 64, 1, 132),
        (1, 192, 5, 132),
        (16, 4096, 32, 132),
        (300, 576, 12, 4),
        (17, 8, 3, 1),
    ]:
        tile, plan = plan_matmul(m, n, num_steps, 2, num_sms)
        assert plan.num_tiles == -(-m // tile.block_m) * -(-n // tile.block_n)
        assert 1 <= plan.num_workers <= num_sms * tile.workers_per_sm
        tail = (plan.num_tiles - plan.num_whole) * num_steps
        assert tail == 0 or tail >= plan.num_workers


def test_long_k_and_few_columns_are_split() -> None:
    _, plan = plan_matmul(1, 64, 64, 2, 132)
    assert plan.num_whole == 0
    assert plan.num_workers > 1


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 16])
def test_split_k_cuts_every_tile_into_its_parts(splits: int) -> None:
    tile, plan = plan_split_k(splits, 16, 160, 10, 2, 132)
    assert (plan.num_tiles, tile) == (3, choose_tile(16, 2))
    parts = min(splits, 10)
    assert plan.num_workers == 3 * parts
    schedule = expand(plan)
    cuts = [10 * part // parts for part in range(parts + 1)]
    wanted = [(t, begin, end) for t in range(3) for begin, end in itertools.pairwise(cuts)]
    assert [tuple(row[:3]) for row in schedule.segments.tolist() if row[END]] == wanted
    assert schedule.worker_indptr.tolist() == list(range(3 * parts + 1))  # a program has one part


@pytest.mark.parametrize("splits", [1, 2, 4, 7])
def test_split_k_computes_the_product(splits: int, device: torch.device) -> None:
    weight = random_weight(72, 650, 32, "zeros", device=device)
    x = torch.randn(3, 650, device=device)
    out = torch.full((3, 72), float("nan"), device=device)
    target = select_target(device, "triton")
    launch.portable_matmul(x, weight, None, None, None, out, target, partial(plan_split_k, splits))
    assert_product(out, x, weight)


X = torch.zeros(3, 32)
WEIGHT = random_weight(4, 32, 16)


@pytest.mark.parametrize(
    ("x", "arguments", "error", "message"),
    [
        (X.double(), {}, TypeError, "x: got torch.float64, want float32, float16 or bfloat16"),
        (X[:, :31], {}, ValueError, r"x: got shape \(3, 31\), want \[..., 32\], the k of weight \(4, 32\)"),
        (torch.tensor(1.0), {}, ValueError, r"x: got shape \(\)"),
        (X.to("meta"), {}, ValueError, "x: got device meta, want that of weight, cpu"),
        (X, {"activation": "tanh"}, ValueError, "activation: got 'tanh', want one of None, relu"),
        (X, {"bias": torch.zeros(3)}, ValueError, r"bias: got shape \(3,\), want \[4\]"),
        (X, {"bias": torch.zeros(4, dtype=torch.int32)}, TypeError, "bias: got torch.int32, want a floating-point"),
        (
            X,
            {"activation": "silu_and_multiply", "bias": torch.zeros(2)},
            ValueError,
            r"bias: got shape \(2,\), want \[4\]",
        ),
        (
            X,
            {"activation": "silu_and_multiply", "out": X[:, :4]},
            ValueError,
            r"out: got shape \(3, 4\), want \(3, 2\)",
        ),
        (X, {"residual": torch.zeros(4)}, ValueError, r"residual: got shape \(4,\), want \(3, 4\)"),
        (
            X,
            {"residual": torch.zeros(3, 4).int()},
            TypeError,
            "residual: got torch.int32, want a floating-point tensor",
        ),
        (X, {"out": torch.zeros(1, 4).expand(3, 4)}, ValueError, r"out: got strides \(0, 1\)"),
        (X, {"bias": torch.zeros(4, device="meta")}, ValueError, "bias: got device meta, want that of x, cpu"),
        (X, {"out": torch.zeros(3, 5)}, ValueError, r"out: got shape \(3, 5\), want \(3, 4\)"),
        (X, {"out": torch.zeros(3, 4).half()}, TypeError, "out: got torch.float16, want that of x, torch.float32"),
        (X, {"out": torch.zeros(3, 4, device="meta")}, ValueError, "out: got device meta, want that of x, cpu"),
        (X, {"backend": "cuda"}, ValueError, "backend: got 'cuda', want one of cpu, triton or None"),
    ],
)
def test_refuses(x: torch.Tensor, arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        w4a16_matmul(x, WEIGHT, **arguments)  # type: ignore[arg-type]


def test_a_gated_activation_wants_an_even_n() -> None:
    with pytest.raises(ValueError, match=r"activation: got 'silu_and_multiply' for n = 5, want an even n"):
        w4a16_matmul(X, random_weight(5, 32, 16), activation="silu_and_multiply")


def test_each_function_names_the_other() -> None:
    with pytest.raises(ValueError, match=r"weight: got 8-bit codes, want 4 \(w8a16_matmul takes 8\)"):
        w4a16_matmul(X, random_weight(4, 32, 16, bits=8))
    with pytest.raises(ValueError, match=r"weight: got 4-bit codes, want 8 \(w4a16_matmul takes 4\)"):
        w8a16_matmul(X, WEIGHT)

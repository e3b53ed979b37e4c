"""The product of many tokens: weights dequantised a slab at a time, then the GEMM; on every form against float64."""

from __future__ import annotations

import gc
import itertools
import weakref
import zlib
from types import ModuleType
from typing import Any

import pytest
import torch

from evenshare.device.target import Target, select_target
from evenshare.gemm.kernels import hopper_grouped, hopper_matmul
from evenshare.quant import ExpertWeights, QuantizedWeight, concatenate, dense, launch
from evenshare.quant.reference import matmul as reference_matmul
from tests.emulator import Emulated
from tests.quant.helpers import FORMS, ZERO_FORMS, assert_product, random_permutation, random_weight

HALVES = (torch.float16, torch.float32)  # the interpreter has no bfloat16


def product(x: torch.Tensor, weight: QuantizedWeight, activation: str | None = None, **options: Any) -> torch.Tensor:
    n_out = weight.n // 2 if (activation or "").endswith("multiply") else weight.n
    wide = torch.full((x.shape[0] + 2, n_out + 3), torch.nan, dtype=x.dtype, device=x.device)
    out = wide[1:-1, 1:-2]
    target = select_target(x.device, "triton")
    dense.matmul(x, weight, options.get("bias"), activation, options.get("residual"), out, target)
    assert int((~wide.isnan()).sum()) == out.numel(), "written outside"
    return out


interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is chosen at import, and this machine has a GPU"
)


def emulate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, module: ModuleType, kernel: str) -> None:
    monkeypatch.setattr(module, kernel, Emulated(getattr(module, kernel)))
    monkeypatch.setattr(Emulated, "seeds", itertools.count(zlib.crc32(request.node.name.encode())))


@pytest.mark.parametrize(("bits", "form"), [(4, form) for form in FORMS] + [(8, form) for form in ZERO_FORMS])
@pytest.mark.parametrize("group_size", [16, 64, 256, -1])
def test_dequantised_rows_are_those_of_the_weight(device: torch.device, group_size: int, bits: int, form: str) -> None:
    """Bit for bit (an offset is added with one rounding or two): of each block a slab, k that is no multiple of anything."""
    for k in (328, 45, 4500):
        weight = random_weight(12, k, group_size, form, bits, device=device)
        for dtype in HALVES:
            got = dense.dequantize(weight, 2, 1, 4, dtype)
            want = weight.dequantize(dtype).view(2, 6, k)[:, 1:5].reshape(8, k)
            assert got.stride(0) * got.element_size() % 16 == 0
            if form == "offsets":
                torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
            else:
                assert torch.equal(got, want)


@pytest.mark.parametrize("contiguous", [0, 1])
def test_codes_and_scales_of_any_strides(device: torch.device, contiguous: int) -> None:
    plain = random_weight(9, 96, 32, "zeros", device=device)

    def moved(t: torch.Tensor) -> torch.Tensor:
        return t.t().contiguous().t() if contiguous == 0 else torch.cat((t, t), 1)[:, : t.shape[1]]

    assert plain.zeros is not None
    weight = QuantizedWeight(moved(plain.codes), moved(plain.scales), 96, 32, zeros=moved(plain.zeros))
    assert torch.equal(dense.dequantize(weight, 1, 0, 9, torch.float32), plain.dequantize())


@pytest.mark.parametrize("activation", [None, "gelu", "silu_and_multiply"])
def test_slabs_and_epilogues(device: torch.device, monkeypatch: pytest.MonkeyPatch, activation: str | None) -> None:
    """The last slab is smaller; every slab has its part of bias, gate, up and residual."""
    monkeypatch.setattr(dense, "SLAB_BYTES", 8 << 10)
    monkeypatch.setattr(dense, "SLAB_ROWS", 16)
    weight = random_weight(76, 96, 32, "zeros", device=device)
    x, bias = torch.randn(5, 192, device=device)[:, ::2], torch.randn(152, device=device)[::2]
    blocks = 2 if activation == "silu_and_multiply" else 1
    assert dense.slab_rows(76 // blocks, blocks, 96, 4) < 76 // blocks
    residual = torch.randn(76 // blocks, 5, device=device).t()
    want = reference_matmul(x, weight, bias, activation)
    for added in (None, residual):
        got = product(x, weight, activation, bias=bias, residual=added).double()
        torch.testing.assert_close(got, want if added is None else want + added, rtol=1e-5, atol=1e-4)


def test_permuted_columns(device: torch.device) -> None:
    weight = random_weight(20, 100, 16, "offsets", device=device, permutation=random_permutation(100, 28))
    x = torch.randn(7, 100, device=device)
    assert_product(product(x, weight), x, weight)


def test_float16_holds_weights_of_any_scale(device: torch.device) -> None:
    """A power of two is taken out of the weight: neither do large scales overflow nor small ones lose bits."""
    plain = random_weight(16, 64, 16, "offsets", dtype=torch.float32, device=device)
    assert plain.offsets is not None
    for exponent in (-40, 30):
        scale = 2.0**exponent
        weight = QuantizedWeight(plain.codes, plain.scales * scale, 64, 16, offsets=plain.offsets * scale)
        x = torch.randn(4, 64, device=device).half()
        residual = torch.zeros(4, 16, dtype=torch.float32, device=device)
        out = torch.empty(4, 16, dtype=torch.float32, device=device)
        dense.matmul(x, weight, None, None, residual, out, select_target(device, "triton"))
        want = reference_matmul(x, weight)
        assert float((out.double() - want).abs().max()) <= 2e-3 * float(want.abs().max())
        assert dense.pack(weight, torch.bfloat16) == 1.0
    assert (
        2**14 / 2
        <= float(dense.dequantize(weight, 1, 0, 16, torch.float32, dense.pack(weight, torch.float16)).max())
        < 2**15
    )


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_a_weight_without_a_magnitude_is_left_as_it_is(scale: float) -> None:
    weight = random_weight(4, 32, 16)
    assert dense.pack(QuantizedWeight(weight.codes, torch.full_like(weight.scales, scale), 32, 16), torch.float16) == 1
    assert dense.pack(weight.narrow(0, 0), torch.float16) == 1


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (14336, 4096), (28672, 8192), (1024, 2048)])
def test_pays_from_some_number_of_tokens_on(n: int, k: int) -> None:
    paying = [m for m in range(1, 4096) if dense.pays(m, n, k)]
    assert paying == list(range(paying[0], 4096))
    assert 600 < paying[0] < (900 if n * k >= 1 << 24 else 4096)
    assert not dense.pays(paying[0], n // 16, k // 16)
    assert min(m for m in range(1, 4096) if dense.pays(m, n, k, bits=8)) > paying[0]


def test_slabs_are_bounded_and_nearly_equal() -> None:
    for n, blocks, k, itemsize in itertools.product(
        (1, 300, 4096, 14336, 128256), (1, 2, 16), (64, 4096, 28672), (2, 4)
    ):
        rows = dense.slab_rows(n, blocks, k, itemsize)
        assert 1 <= rows <= n
        slab = blocks * rows * k * itemsize
        assert slab <= dense.SLAB_BYTES or rows == min(n, dense.SLAB_ROWS)
        assert rows == n or rows % dense.SLAB_ROWS == 0
    assert dense.slab_rows(28672, 1, 8192, 2) == 14336
    assert dense.slab_rows(14336, 1, 4096, 2) == 14336


@pytest.mark.parametrize("activation", [None, "silu_and_multiply"])
@pytest.mark.parametrize("experts_at_once", [1, 2, 8])
def test_experts(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, experts_at_once: int, activation: str | None
) -> None:
    """Empty experts at both ends and between, and rows that are nobody's."""
    monkeypatch.setattr(dense, "SLAB_BYTES", experts_at_once * 40 * 100 * 4)
    rows = [0, 18, 3, 0, 0, 9, 0]
    parts = [random_weight(40, 100, 32, "zeros", device=device) for _ in rows]
    weights = ExpertWeights(concatenate(parts), len(rows))
    x, bias = torch.randn(40, 200, device=device)[:, ::2], torch.randn(40, len(rows), device=device).t()
    n_out = 20 if activation else 40
    out = torch.full((n_out, 40), torch.nan, device=device).t()
    bounds = [4, *itertools.accumulate(rows, initial=4)][1:]
    offsets = torch.tensor([bounds, bounds], dtype=torch.int32, device=device).t()[:, 0]
    dense.grouped_matmul(x, weights, offsets, bias, activation, out, select_target(device, "triton"))
    want = torch.zeros(40, n_out, dtype=torch.float64, device=device)
    for (begin, end), part, bias_of in zip(itertools.pairwise(bounds), parts, bias, strict=True):
        want[begin:end] = reference_matmul(x[begin:end], part, bias_of, activation)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4)


def test_experts_that_share_a_permutation(device: torch.device) -> None:
    weight = random_weight(40, 100, 16, "offsets", device=device, permutation=random_permutation(100, 28))
    x, out = torch.randn(7, 100, device=device), torch.empty(7, 20, device=device)
    offsets = torch.tensor([0, 2, 7], dtype=torch.int32, device=device)
    dense.grouped_matmul(x, ExpertWeights(weight, 2), offsets, None, None, out, select_target(device, "triton"))
    want = torch.cat([reference_matmul(x[:2], weight.narrow(0, 20)), reference_matmul(x[2:], weight.narrow(20, 40))])
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4)


def test_one_slab_at_a_time_is_held(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "SLAB_BYTES", 4 << 10)
    monkeypatch.setattr(dense, "SLAB_ROWS", 16)
    weight, x = random_weight(96, 64, 32, device=device), torch.randn(4, 64, device=device)
    made: list[weakref.ref[torch.UntypedStorage]] = []
    plain = dense.dequantize

    def watched(*arguments: Any, **options: Any) -> torch.Tensor:
        gc.collect()  # the interpreter's arguments
        assert all(storage() is None for storage in made)
        slab = plain(*arguments, **options)
        made.append(weakref.ref(slab.untyped_storage()))
        return slab

    monkeypatch.setattr(dense, "dequantize", watched)
    product(x, weight)
    offsets, target = torch.tensor([0, 1, 4], dtype=torch.int32, device=device), select_target(device, "triton")
    dense.grouped_matmul(x, ExpertWeights(weight, 2), offsets, None, None, torch.empty(4, 48, device=device), target)
    assert len(made) == 6 + 2


def test_experts_pay_by_their_mean_of_tokens() -> None:
    assert not dense.pays(4096 * 2, 28672, 4096, num_experts=16)
    assert dense.pays(4096 * 2, 28672, 4096, num_experts=8)
    assert not dense.pays(4096 * 8, 4096, 7168, num_experts=256)


@interpreted
@pytest.mark.parametrize("many", [False, True])
def test_who_multiplies_experts_on_hopper(monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    """`launch.grouped_matmul` asks `pays`, for 16-bit x alone."""
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(dense, "pays", lambda *sizes: asked.append(sizes) or many)
    taken: list[torch.dtype] = []
    monkeypatch.setattr(dense, "grouped_matmul", lambda x, *_: taken.append(x.dtype))
    weights = ExpertWeights(random_weight(40, 64, 16), 2)
    offsets = torch.tensor([0, 2, 9], dtype=torch.int32)
    for dtype in (torch.float16, torch.float32):
        out = torch.empty(9, 20, dtype=dtype)
        target = Target("triton", torch.device("cpu"), 3, (9, 0), False)
        launch.grouped_matmul(torch.randn(9, 64).to(dtype), weights, offsets, None, None, out, target)
    assert asked == [(9, 20, 64, 4, 2)]
    assert taken == [torch.float16] * many


@interpreted
@pytest.mark.parametrize("activation", [None, "silu_and_multiply"])
def test_experts_with_many_tokens_on_hopper(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, activation: str | None
) -> None:
    """Two of three experts at a time, the GEMM emulated; x without aligned rows, and rows that are nobody's."""
    emulate(request, monkeypatch, hopper_grouped, "grouped_matmul")
    monkeypatch.setattr(dense, "pays", lambda m, *_: m > 64)
    monkeypatch.setattr(dense, "SLAB_BYTES", 2 * 72 * 136 * 2)
    weights = ExpertWeights(random_weight(3 * 72, 136, 32, "zeros"), 3)
    x, bias, bounds = torch.randn(270, 139).half()[:, 3:], torch.randn(3, 72), [1, 131, 131, 260]
    n_out = 36 if activation else 72
    out = torch.full((270, n_out), torch.nan, dtype=torch.float16)
    offsets = torch.tensor(bounds, dtype=torch.int32)
    target = Target("triton", torch.device("cpu"), 3, (9, 0), False)
    launch.grouped_matmul(x, weights, offsets, bias, activation, out, target)
    want = torch.zeros(270, n_out, dtype=torch.float64)
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        want[begin:end] = reference_matmul(x[begin:end], weights.experts[i], bias[i], activation)
    rounding = torch.finfo(torch.float16).eps
    assert float((out.double() - want).abs().max()) <= 4 * rounding * float(want.abs().max())
    assert (out[[0, *range(260, 270)]] == 0).all()


@interpreted
@pytest.mark.parametrize("activation", [None, "silu_and_multiply"])
def test_many_tokens_go_to_the_hopper_gemm(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, activation: str | None
) -> None:
    """`launch.matmul` as on a Hopper GPU, its GEMM emulated, in two slabs: x without aligned rows, a bias, a residual in place."""
    emulate(request, monkeypatch, hopper_matmul, "matmul")
    monkeypatch.setattr(dense, "pays", lambda m, *_: m > 64)
    monkeypatch.setattr(dense, "SLAB_BYTES", 40 << 10)
    monkeypatch.setattr(dense, "SLAB_ROWS", 64)
    target = Target("triton", torch.device("cpu"), 3, (9, 0), False)
    weight = random_weight(208, 136, 32, "zeros")
    launch.pack(weight, None, torch.float16, activation, target)
    packed = dict(weight.packed)
    x, bias = torch.randn(70, 139).half()[:, 3:], torch.randn(208)
    n_out = 104 if activation else 208
    out = torch.randn(70, n_out).half()
    residual = out.clone()
    launch.matmul(x, weight, bias, activation, out, out, target)
    want = reference_matmul(x, weight, bias, activation) + residual
    rounding = torch.finfo(torch.float16).eps
    assert float((out.double() - want).abs().max()) <= 4 * rounding * float(want.abs().max())
    assert weight.packed == packed


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `launch`, in slabs, and once more in a CUDA graph."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    monkeypatch.setattr(dense, "SLAB_BYTES", 4 << 20)
    weight = random_weight(2304, 1024, 128, form, dtype=dtype, device="cuda")
    x = torch.randn(2048, 1024, device="cuda").to(dtype) / 16
    target = select_target("cuda")
    out = torch.full((2048, 2304), torch.nan, dtype=dtype, device="cuda")
    launch.pack(weight, None, dtype, None, target)
    torch.cuda.set_sync_debug_mode("error")
    try:
        dense.matmul(x, weight, None, None, None, out, target)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_product(out, x, weight)
    first = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dense.matmul(x, weight, None, None, None, out, target)
    out.zero_()
    graph.replay()
    assert torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "silu_and_multiply"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_on_a_gpu(dtype: torch.dtype, activation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven experts, an empty one, two at a time, and once more in a CUDA graph with other offsets."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    monkeypatch.setattr(dense, "SLAB_BYTES", 2 * 768 * 1024 * 2)
    parts = [random_weight(768, 1024, 128, dtype=dtype, device="cuda") for _ in range(5)]
    weights = ExpertWeights(concatenate(parts), 5)
    x = torch.randn(2048, 1024, device="cuda").to(dtype) / 16
    offsets = torch.tensor([0, 700, 700, 1500, 1501, 2040], dtype=torch.int32, device="cuda")
    out = torch.full((2048, 384 if activation else 768), torch.nan, dtype=dtype, device="cuda")
    target = select_target("cuda")

    def run() -> None:
        dense.grouped_matmul(x, weights, offsets, None, activation, out, target)

    def check() -> None:
        bounds = offsets.tolist()
        for (begin, end), part in zip(itertools.pairwise(bounds), parts, strict=True):
            want = reference_matmul(x[begin:end], part, None, activation)
            budget = 8 * torch.finfo(dtype).eps * float(want.abs().max()) if begin < end else 0.0
            assert ((out[begin:end].double() - want).abs() <= budget).all()
        assert (out[bounds[-1] :] == 0).all()

    run()
    check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    offsets.copy_(torch.tensor([0, 0, 3, 1000, 2000, 2048], dtype=torch.int32))
    out.fill_(torch.nan)
    graph.replay()
    check()

"""What only a GPU shows: bfloat16, the real tiles, many workers at once, streams, graphs, large strides."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from evenshare.gemm import matmul, reference, scaled_matmul
from evenshare.gemm.epilogue import Epilogue
from evenshare.gemm.plan import plan_matmul
from evenshare.gemm.scales import make_scales
from tests.gemm.helpers import assert_product

pytestmark = pytest.mark.gpu
HALF_DTYPES = (torch.float16, torch.bfloat16)


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda", torch.cuda.current_device())


def operands(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)


# One share, one tile cut many ways, fewer tiles than workers, whole waves and a tail; sizes that are no multiple of 16.
SHAPES = [
    (1, 4096, 4096),
    (16, 2560, 8192),
    (8, 8192, 8192),
    (128, 128, 16384),
    (136, 136, 232),
    (256, 3584, 2048),
    (1024, 1024, 1024),
    (3000, 3000, 500),
    (777, 1001, 333),
    (2049, 2047, 65),
]


@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("b_transposed", [False, True])
def test_shapes(shape: tuple[int, int, int], dtype: torch.dtype, b_transposed: bool, cuda: torch.device) -> None:
    a, b = operands(*shape, dtype, cuda)
    if b_transposed:
        b = b.T.contiguous().T
    bias = torch.randn(shape[1], device=cuda)
    assert_product(matmul(a, b, bias=bias, activation="gelu"), a, b, bias, "gelu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_transposed(dtype: torch.dtype, cuda: torch.device) -> None:
    a, b = operands(1000, 520, 300, dtype, cuda)
    a = a.T.contiguous().T
    assert_product(matmul(a, b), a, b)


@pytest.mark.parametrize("offset", [0, 1])
def test_operands_at_odd_addresses(offset: int, cuda: torch.device) -> None:
    a, b = operands(300, 320, 256 + offset, torch.bfloat16, cuda)
    assert_product(matmul(a[:, offset:], b[offset:]), a[:, offset:], b[offset:])


@pytest.mark.parametrize("shape", [(16, 512, 3584), (1, 512, 8192), (128, 128, 16384), (300, 500, 4096)])
def test_repeats_bit_for_bit(shape: tuple[int, int, int], cuda: torch.device) -> None:
    a, b = operands(*shape, torch.bfloat16, cuda)
    properties = torch.cuda.get_device_properties(cuda)
    shares = plan_matmul(*shape, 2, properties.multi_processor_count).shares
    assert shares.num_whole < shares.num_tiles
    want = matmul(a, b)
    different = torch.zeros((), dtype=torch.int64, device=cuda)
    for _ in range(10_000):
        different += (matmul(a, b) != want).sum()
    assert different.item() == 0


def test_alternating_inputs_on_one_workspace(cuda: torch.device) -> None:
    pairs = [operands(128, 256, 8192, torch.bfloat16, cuda) for _ in range(2)]
    want = [matmul(*pair) for pair in pairs]
    different = torch.zeros((), dtype=torch.int64, device=cuda)
    for i in range(500):
        different += (matmul(*pairs[i % 2]) != want[i % 2]).sum()
    assert different.item() == 0


def test_two_streams_at_once(cuda: torch.device) -> None:
    pairs = [operands(128, 256, 8192, torch.bfloat16, cuda) for _ in range(2)]
    want = [matmul(*pair) for pair in pairs]
    streams = [torch.cuda.Stream(cuda) for _ in pairs]
    torch.cuda.synchronize(cuda)
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for stream, pair, result in zip(streams, pairs, results, strict=True):
            with torch.cuda.stream(stream):
                result.append(matmul(*pair))
    torch.cuda.synchronize(cuda)
    for result, one in zip(results, want, strict=True):
        assert all(torch.equal(y, one) for y in result)


def test_in_a_replayed_graph(cuda: torch.device) -> None:
    a, b = operands(128, 128, 16384, torch.bfloat16, cuda)
    out = torch.empty(128, 128, dtype=torch.bfloat16, device=cuda)
    matmul(a, b, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matmul(a, b, out=out)
    for _ in range(20):
        a.copy_(torch.randn_like(a))
        out.fill_(float("nan"))
        graph.replay()
        matmul(a, b)  # a call beside the graph has a workspace of its own
        assert torch.equal(out, matmul(a, b))


def test_no_sync(cuda: torch.device) -> None:
    a, b = operands(128, 128, 8192, torch.bfloat16, cuda)
    matmul(a, b)
    torch.cuda.set_sync_debug_mode("error")
    try:
        matmul(a, b, activation="relu")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_past_31_bits(cuda: torch.device) -> None:
    base = torch.empty(255 * 2**24 + 64, dtype=torch.bfloat16, device=cuda)
    a = base.as_strided((256, 64), (2**24, 1))
    a.copy_(torch.randn(256, 64))
    b = torch.randn(64, 128, device=cuda).bfloat16()
    assert_product(matmul(a, b), a, b)
    assert_product(matmul(b.T, a.T), b.T, a.T)
    out = base.as_strided((256, 128), (2**23, 1))
    small = torch.randn(256, 64, device=cuda).bfloat16()
    assert_product(matmul(small, b, out=out), small, b)


def test_tf32_rounds_operands_and_nothing_else(cuda: torch.device) -> None:
    a, b = torch.randn(300, 700, device=cuda), torch.randn(700, 200, device=cuda)
    y = matmul(a, b, precision="tf32").double()
    want = a.double() @ b.double()
    error = (y - want).abs().max() / (a.double().abs() @ b.double().abs()).max()
    assert error < 2.0**-11
    assert not torch.equal(y, matmul(a, b).double())
    rounded = [(t.view(torch.int32) & -(1 << 13)).view(torch.float32) for t in (a, b)]
    summed = rounded[0].double().abs() @ rounded[1].double().abs()
    # Sums of 700 in another order, which tensor cores cut off rather than round. Rounding the operands would cost 2^-11.
    difference = (matmul(*rounded, precision="tf32").double() - matmul(*rounded).double()).abs().max()
    assert difference < 2.0**-20 * summed.max()


def fp8_operands(m: int, n: int, k: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """a, b with contiguous k, and scales of blocks."""
    a, w = (torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
    blocks = -(-k // 128)
    return a, w.T, torch.rand(m, blocks, device=device) + 0.5, torch.rand(blocks, -(-n // 128), device=device) + 0.5


def fp8_error(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> float:
    """In root mean square, relative to the product's."""
    scales = make_scales(a, b, scale_a, scale_b)
    want = reference.scaled_matmul(a, b, scales.a, scales.b, Epilogue(), torch.float64, torch.float64)
    return float((y.double() - want).norm() / want.norm())


@pytest.mark.parametrize(
    "shape", [(1, 4096, 4096), (16, 512, 3584), (300, 520, 4096), (128, 128, 16384), (2048, 2048, 2048)]
)
@pytest.mark.parametrize("k_major", [True, False])
def test_fp8_sums_are_those_of_float32(shape: tuple[int, int, int], k_major: bool, cuda: torch.device) -> None:
    """Whatever kernel runs. In the tensor cores, sums keep some 14 bits, for 128 of k."""
    a, b, scale_a, scale_b = fp8_operands(*shape, cuda)
    b = b if k_major else b.contiguous()
    assert fp8_error(scaled_matmul(a, b, scale_a, scale_b, out_dtype=torch.float32), a, b, scale_a, scale_b) < 1e-3
    assert fp8_error(scaled_matmul(a, b, scale_a, scale_b), a, b, scale_a, scale_b) < 3e-3


@pytest.mark.parametrize("shape", [(1, 4096, 4096), (16, 512, 3584), (64, 1000, 8192), (64, 128, 16384)])
def test_few_rows_repeat_bit_for_bit(shape: tuple[int, int, int], cuda: torch.device) -> None:
    a, b = operands(*shape, torch.bfloat16, cuda)
    b = b.T.contiguous().T
    want = matmul(a, b, activation="silu")
    different = torch.zeros((), dtype=torch.int64, device=cuda)
    for _ in range(2_000):
        different += (matmul(a, b, activation="silu") != want).sum()
    assert different.item() == 0
    assert_product(matmul(a, b), a, b)


@pytest.mark.parametrize("kind", ["few rows", "fp8"])
def test_other_kernels_in_a_replayed_graph_without_a_sync(kind: str, cuda: torch.device) -> None:
    if kind == "fp8":
        a, *rest = fp8_operands(128, 256, 8192, cuda)
        call = partial(scaled_matmul, a, *rest)
    else:
        a, b = operands(16, 256, 8192, torch.bfloat16, cuda)
        call = partial(matmul, a, b.T.contiguous().T)
    first = call()
    out = torch.empty_like(first)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(out=out)
    for _ in range(5):
        a.copy_(torch.randn(a.shape, device=cuda).to(a.dtype))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, call())


def test_few_rows_of_a_weight_past_31_bits(cuda: torch.device) -> None:
    base = torch.empty(255 * 2**24 + 128, dtype=torch.bfloat16, device=cuda)
    w = base.as_strided((256, 128), (2**24, 1))
    w.copy_(torch.randn(256, 128))
    a = torch.randn(9, 128, device=cuda).bfloat16()
    assert_product(matmul(a, w.T), a, w.T)

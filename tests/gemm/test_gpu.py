"""What only a GPU shows: bfloat16, the real tiles, many workers at once, streams, graphs, large strides."""

from __future__ import annotations

import pytest
import torch

from evenshare.gemm import matmul
from evenshare.gemm.plan import plan_matmul
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


def test_tf32_rounds_operands_and_nothing_else() -> None:
    a, b = torch.randn(300, 700, device="cuda"), torch.randn(700, 200, device="cuda")
    y = matmul(a, b, precision="tf32").double()
    want = a.double() @ b.double()
    error = (y - want).abs().max() / (a.double().abs() @ b.double().abs()).max()
    assert error < 2.0**-11
    assert not torch.equal(y, matmul(a, b).double())
    rounded = [(t.view(torch.int32) & -(1 << 13)).view(torch.float32) for t in (a, b)]
    torch.testing.assert_close(matmul(*rounded, precision="tf32"), matmul(*rounded), rtol=1e-5, atol=1e-4)

"""What only a GPU can show: bfloat16, long inputs, concurrency, graphs, offsets past 2^31."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch

from evenshare.quant import ExpertWeights, grouped_w4a16_matmul, prepare, reference
from tests.quant.helpers import ZERO_FORMS, assert_product, product, random_permutation, random_weight

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")


@pytest.mark.parametrize("zero_form", ZERO_FORMS)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 16), (4, 32), (4, 128), (4, -1), (8, 32)])
def test_bfloat16(bits: int, group_size: int, zero_form: str) -> None:
    weight = random_weight(200, 1000, group_size, zero_form, bits, torch.bfloat16, CUDA)
    for m in (1, 17, 50, 300):
        x = torch.randn(m, 1000, device=CUDA).bfloat16()
        assert_product(product(x, weight), x, weight)


@pytest.mark.parametrize("padding", [None, 0, 24])
@pytest.mark.parametrize(("zero_form", "group_size"), [("e2m1", 16), ("e2m1", 32), ("nf4", 64), ("zeros", 16)])
def test_bfloat16_tables_and_permutations(zero_form: str, group_size: int, padding: int | None) -> None:
    permutation = None if padding is None else random_permutation(1000, padding)
    weight = random_weight(200, 1000, group_size, zero_form, 4, torch.bfloat16, CUDA, permutation)
    for m in (1, 17, 50, 300):
        x = torch.randn(m, 1000, device=CUDA).bfloat16()
        assert_product(product(x, weight), x, weight)


@pytest.mark.parametrize("n", [512, 4096 + 32])
@pytest.mark.parametrize("m", [1, 50, 300])
def test_bfloat16_gate_and_residual(m: int, n: int) -> None:
    """Below twice the error of the same operations on torch's own product, plus one rounding."""
    weight = random_weight(n, 1024, 128, device=CUDA, dtype=torch.bfloat16)
    x, residual = torch.randn(m, 1024, device=CUDA).bfloat16(), torch.randn(m, n // 2, device=CUDA).bfloat16()
    want = reference.matmul(x, weight, None, "silu_and_multiply", residual)
    gate, up = (x @ weight.dequantize(torch.bfloat16).T).chunk(2, 1)
    own_error = (torch.nn.functional.silu(gate) * up + residual).double() - want
    y = product(x, weight, activation="silu_and_multiply", residual=residual.clone())
    rounding = torch.finfo(torch.bfloat16).eps * want.abs().max()
    assert (y.double() - want).abs().max() <= 2 * own_error.abs().max() + rounding
    assert torch.equal(product(x, weight, activation="silu_and_multiply", residual=residual, out=residual), y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_experts_in_a_graph_without_waiting(dtype: torch.dtype) -> None:
    """Each replay deals its rows anew; nothing waits for the device, and each expert's rows are those of its own product."""
    num_experts, rows, n, k = 32, 300, 512, 1024
    weights = prepare(ExpertWeights(random_weight(num_experts * n, k, 128, device=CUDA), num_experts), dtype)
    x, offsets = (
        torch.randn(rows, k, device=CUDA).to(dtype),
        torch.zeros(num_experts + 1, dtype=torch.int32, device=CUDA),
    )
    grouped_w4a16_matmul(x, weights, offsets)  # compiled, and the workspace grown
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_w4a16_matmul(x, weights, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = grouped_w4a16_matmul(x, weights, offsets)
    for number in range(20):
        cuts = (
            torch.randint(0, rows + 1, (num_experts + 1,)).sort().values if number else torch.tensor([0] * 32 + [rows])
        )
        offsets.copy_(cuts)
        graph.replay()
        for expert, weight in enumerate(weights.experts):
            begin, end = int(cuts[expert]), int(cuts[expert + 1])
            if begin < end:
                assert_product(y[begin:end], x[begin:end], weight)
        assert not y[: int(cuts[0])].any()
        assert not y[int(cuts[-1]) :].any()


def test_experts_repeat_bit_for_bit() -> None:
    weights = ExpertWeights(random_weight(8 * 256, 8192, 128, device=CUDA), 8)
    x, offsets = (
        torch.randn(40, 8192, device=CUDA).half(),
        torch.tensor([0, 1, 1, 3, 30, 30, 35, 39, 40]).int().to(CUDA),
    )
    first = grouped_w4a16_matmul(x, weights, offsets)
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(300):
        wrong += (grouped_w4a16_matmul(x, weights, offsets) != first).sum()
    assert wrong.item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m", [1, 16, 32, 64, 128, 2048])
def test_model_shapes(m: int, dtype: torch.dtype) -> None:
    weight = random_weight(4096, 4096, 128, device=CUDA)
    x = torch.randn(m, 4096, device=CUDA).to(dtype)
    assert_product(product(x, weight), x, weight)


@pytest.mark.parametrize(
    ("m", "n", "k", "launches"), [(128, 256, 8192, 500), (16, 2560, 8192, 200), (8, 8192, 8192, 200)]
)
def test_alternating_inputs_on_one_workspace(m: int, n: int, k: int, launches: int) -> None:
    weight = random_weight(n, k, 128, device=CUDA)
    inputs = [torch.randn(m, k, device=CUDA).half() for _ in range(2)]
    first = [product(x, weight) for x in inputs]
    for x, y in zip(inputs, first, strict=True):
        assert_product(y, x, weight)
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    for i in range(launches):
        wrong += (product(inputs[i % 2], weight) != first[i % 2]).sum()
    assert wrong.item() == 0


def test_two_streams_at_once() -> None:
    weight = random_weight(256, 8192, 128, device=CUDA)
    inputs = [torch.randn(m, 8192, device=CUDA).half() for m in (3, 128)]
    first = [product(x, weight) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    wrong = [torch.zeros((), dtype=torch.int64, device=CUDA) for _ in inputs]
    for _ in range(100):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                wrong[i] += (product(inputs[i], weight) != first[i]).sum()
    torch.cuda.synchronize()
    assert [w.item() for w in wrong] == [0, 0]


def test_replayed_graph() -> None:
    weight = random_weight(2560, 8192, 128, "offsets", device=CUDA)
    x = torch.randn(16, 8192, device=CUDA).half()
    product(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product(x, weight)
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, product(x, weight))


def test_capture_wants_a_packed_weight() -> None:
    weight = random_weight(64, 128, 32, device=CUDA)
    x = torch.randn(2, 128, device=CUDA).half()
    with (
        pytest.raises(RuntimeError, match="weight: got one that is not packed"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        product(x, weight)


def test_no_call_waits_for_the_device() -> None:
    weight = prepare(random_weight(512, 1024, 32, "zeros", device=CUDA), torch.float16)
    x = torch.randn(4, 1024, device=CUDA).half()
    bias = torch.randn(512, device=CUDA)
    product(x, weight, bias=bias, activation="silu")  # compiled, and the workspace grown
    torch.cuda.set_sync_debug_mode("error")
    try:
        product(x, weight, bias=bias, activation="silu")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_past_32_bits() -> None:
    weight = random_weight(64, 128, 32, device=CUDA)
    x = torch.empty(256 << 24, dtype=torch.float16, device=CUDA).view(256, 1 << 24)[:, :128]
    x.copy_(torch.randn(256, 128))
    out = torch.empty(256 << 24, dtype=torch.float16, device=CUDA).view(256, 1 << 24)[:, :64]
    assert_product(product(x, weight, out=out), x, weight)


HASHES = """
import torch
from tests.quant.test_gpu import hash_of_products
print(hash_of_products())
"""


def hash_of_products() -> str:
    torch.manual_seed(5)
    digest = hashlib.sha256()
    for m, n, k in [(16, 512, 3584), (1, 512, 8192)]:
        weight = random_weight(n, k, 128, device=CUDA)
        x = torch.randn(m, k).to(CUDA).half()
        results = [product(x, weight).cpu().numpy().tobytes() for _ in range(12)]
        assert len(set(results)) == 1
        digest.update(results[0])
    return digest.hexdigest()


def test_two_processes_agree_bit_for_bit() -> None:
    other = subprocess.run([sys.executable, "-c", HASHES], capture_output=True, text=True, timeout=300, check=True)
    assert other.stdout.split()[-1] == hash_of_products()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_second_gpu() -> None:
    device = torch.device("cuda:1")
    weight = random_weight(64, 256, 32, device=device)
    x = torch.randn(3, 256, device=device)
    y = product(x, weight)
    assert y.device == device
    assert_product(y, x, weight)

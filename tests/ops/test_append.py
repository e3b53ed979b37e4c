"""Appending to a paged cache: every row in its place, nothing else touched, whatever the index tensors say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from evenshare.ops import append_paged_kv_cache

BACKENDS = [("cpu", "cpu"), ("cpu", "triton"), pytest.param(("cuda", "triton"), marks=pytest.mark.gpu)]


@pytest.fixture(params=BACKENDS, ids=str)
def place(request: pytest.FixtureRequest) -> tuple[torch.device, str]:
    device, backend = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    if (device, backend) == ("cpu", "triton") and torch.cuda.is_available():
        pytest.skip("the interpreter is chosen at import, and this machine has a GPU")
    return torch.device(device), backend


def int32(values: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def append_by_loop(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: list[tuple[int, int]],
    table: list[list[int]],
    caches: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """NHD caches, one row at a time; rows without a place are skipped."""
    num_pages, page_size = caches[0].shape[:2]
    for i, (request, position) in enumerate(rows):
        if 0 <= request < len(table) and 0 <= position < len(table[request]) * page_size:
            page = table[request][position // page_size]
            if 0 <= page < num_pages:
                caches[0][page, position % page_size] = k[i]
                caches[1][page, position % page_size] = v[i]


ROWS = [
    (0, 0),
    (2, 7),
    (1, 3),
    (2, 0),
    (0, 4),
    (2, 3),
    (-1, 0),
    (3, 0),
    (0, -1),
    (0, -8),
    (1, 400),
    (1, 8),
    (2, 12),
    (2, 8),
]
TABLE = [[5, 2], [0, -3], [6, 3, 9]]  # a page of request 1 and the last of request 2 do not exist


@pytest.mark.parametrize("form", ["indptr", "block_table"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize(("page_size", "dims"), [(4, (8, 8)), (1, (56, 56)), (3, (300, 16))])
def test_rows_go_to_their_places(
    place: tuple[torch.device, str], page_size: int, dims: tuple[int, int], kv_layout: str, form: str
) -> None:
    device, backend = place
    k, v = (torch.randn(len(ROWS), 2, d, device=device) for d in dims)
    caches = tuple(torch.randn(8, page_size, 2, d, device=device) for d in dims)
    want = tuple(c.clone() for c in caches)
    append_by_loop(k, v, ROWS, TABLE, want)
    assert not torch.equal(want[0], caches[0])
    got = tuple(c if kv_layout == "NHD" else c.transpose(1, 2).contiguous() for c in caches)
    if form == "indptr":
        flat = [page for pages in TABLE for page in pages]
        table = {"kv_indptr": int32([0, 2, 4, 7], device), "kv_indices": int32(flat, device)}
    else:
        table = {"block_table": int32([[5, 2, 99], [0, -3, 99], [6, 3, 9]], device)}
    batch_indices, positions = (int32(x, device) for x in zip(*ROWS, strict=True))
    append_paged_kv_cache(k, v, batch_indices, positions, *got, **table, kv_layout=kv_layout, backend=backend)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g if kv_layout == "NHD" else g.transpose(1, 2), w)


def test_strided_inputs_and_joined_cache(place: tuple[torch.device, str]) -> None:
    """k and v sliced from a fused projection; K and V joined in one tensor [blocks, heads, block, 2 D]; strided index tensors."""
    device, backend = place
    fused = torch.randn(6, 4 + 2 + 2, 16, device=device)
    k, v = fused[::2, 4:6], fused[::2, 6:]
    joined = torch.zeros(5, 2, 4, 32, device=device)
    indices = int32([[0, 0], [1, 2], [1, 6]], device)
    wide = int32([[3, 7, 1, 7], [4, 7, 0, 7]], device)
    append_paged_kv_cache(
        k, v, indices[:, 0], indices[:, 1], joined[..., :16], joined[..., 16:], block_table=wide[:, ::2], kv_layout="HND",
        backend=backend,
    )  # fmt: skip
    want = torch.zeros_like(joined)
    for i, (page, slot) in enumerate([(3, 0), (4, 2), (0, 2)]):
        want[page, :, slot] = torch.cat((k[i], v[i]), -1)
    assert torch.equal(joined, want)


def test_token_table_of_page_size_one(place: tuple[torch.device, str]) -> None:
    """A flat pool of tokens [tokens, heads, dim], its token table as pages of one key."""
    device, backend = place
    pool = torch.zeros(2, 9, 2, 8, device=device)
    k, v = torch.randn(2, 3, 2, 8, device=device)
    append_paged_kv_cache(
        k, v, int32([0, 0, 1], device), int32([0, 1, 2], device), pool[0].unsqueeze(1), pool[1].unsqueeze(1),
        block_table=int32([[8, 4, 0], [1, 2, 6]], device), backend=backend,
    )  # fmt: skip
    assert torch.equal(pool[0][[8, 4, 6]], k)
    assert torch.equal(pool[1][[8, 4, 6]], v)
    assert int((pool != 0).any(-1).sum()) == 12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_bits_are_copied(place: tuple[torch.device, str], dtype: torch.dtype) -> None:
    device, backend = place
    k = torch.tensor([math.nan, math.inf, -0.0, 1e-7, 3.0, -1.0, 0.5, 2.0], device=device).to(dtype).expand(1, 1, 8)
    k_cache, v_cache = torch.zeros(2, 2, 2, 1, 8, dtype=dtype, device=device)
    place_of = (int32([0], device), int32([1], device))
    append_paged_kv_cache(k, k, *place_of, k_cache, v_cache, block_table=int32([[1]], device), backend=backend)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(k_cache[1, 1].view(bits), k[0].contiguous().view(bits))
    assert torch.equal(v_cache[1, 1].view(bits), k[0].contiguous().view(bits))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_codes_are_copied(place: tuple[torch.device, str], dtype: torch.dtype) -> None:
    device, backend = place
    k = torch.randint(0, 256, (3, 2, 16), dtype=torch.uint8, device=device).view(dtype)[..., ::2]
    caches = torch.zeros(2, 4, 2, 2, 8, device=device).to(dtype)
    where = (int32([0, 0, 0], device), int32([0, 3, 5], device))
    append_paged_kv_cache(k, k, *where, *caches, block_table=int32([[3, 1, 0]], device), backend=backend)
    got = caches[0].view(torch.uint8)[[3, 1, 0], [0, 1, 1]]
    assert torch.equal(got, k.contiguous().view(torch.uint8))


def test_int64_indices_are_converted(place: tuple[torch.device, str]) -> None:
    device, backend = place
    k, caches = torch.randn(1, 2, 8, device=device), torch.zeros(2, 3, 4, 2, 8, device=device)
    long = torch.tensor([0], device=device)
    append_paged_kv_cache(k, k, long, long, *caches, block_table=torch.tensor([[2]], device=device), backend=backend)
    assert torch.equal(caches[0, 2, 0], k[0])


@pytest.mark.parametrize(("nnz", "num_pages", "columns"), [(0, 3, 1), (2, 0, 1), (2, 3, 0)])
def test_empty(place: tuple[torch.device, str], nnz: int, num_pages: int, columns: int) -> None:
    device, backend = place
    k, caches = torch.ones(nnz, 2, 8, device=device), torch.zeros(2, num_pages, 4, 2, 8, device=device)
    zero = torch.zeros(nnz, dtype=torch.int32, device=device)
    table = torch.zeros(1, columns, dtype=torch.int32, device=device)
    append_paged_kv_cache(k, k, zero, zero, *caches, block_table=table, backend=backend)
    assert (caches == 0).all()


def test_a_wrong_indptr_writes_nothing_elsewhere(place: tuple[torch.device, str]) -> None:
    device, backend = place
    k, caches = torch.ones(4, 2, 8, device=device), torch.zeros(2, 3, 4, 2, 8, device=device)
    append_paged_kv_cache(
        k, k, int32([0, 1, 2, 3], device), int32([0, 0, 0, 0], device), *caches,
        kv_indptr=int32([0, -2, 50, 1, 2], device), kv_indices=int32([1, 2], device), backend=backend,
    )  # fmt: skip
    # Requests: [0, -2) is empty, [-2, 50) and [50, 1) do not exist, [1, 2) holds page 2.
    assert torch.equal(caches[0].flatten(0, 1).any(-1).any(-1).nonzero().flatten().cpu(), torch.tensor([8]))


def arguments(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "k": torch.zeros(3, 2, 8), "v": torch.zeros(3, 2, 8),
        "batch_indices": torch.zeros(3, dtype=torch.int32), "positions": torch.zeros(3, dtype=torch.int32),
        "k_cache": torch.zeros(4, 16, 2, 8), "v_cache": torch.zeros(4, 16, 2, 8),
        "block_table": torch.zeros(1, 2, dtype=torch.int32),
    }  # fmt: skip
    return good | changes


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"k": torch.zeros(3, 16)}, ValueError, r"k: got shape \(3, 16\)"),
        ({"k": torch.zeros(3, 2, 8).double()}, TypeError, "k: got dtype torch.float64"),
        ({"v": torch.zeros(2, 2, 8)}, ValueError, r"v: got shape \(2, 2, 8\), want \[3, 2, any\]"),
        ({"v": torch.zeros(3, 2, 8).half()}, TypeError, "v_cache: got dtype torch.float32, want torch.float16, as v"),
        (
            {"k_cache": torch.zeros(4, 16, 3, 8)},
            ValueError,
            r"k_cache: got shape \(4, 16, 3, 8\), want \[any, any, 2, 8\] \(NHD\)",
        ),
        (
            {"v_cache": torch.zeros(4, 8, 2, 8)},
            ValueError,
            r"v_cache: got \(4, 8\) pages and page size, want \(4, 16\)",
        ),
        ({"kv_layout": "HND"}, ValueError, r"k_cache: got shape \(4, 16, 2, 8\), want \[any, 2, any, 8\] \(HND\)"),
        ({"kv_layout": "nhd"}, ValueError, "kv_layout: got 'nhd'"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, ValueError, r"positions: got shape \(2,\), want \[3\]"),
        ({"positions": torch.zeros(3)}, TypeError, "positions: got dtype torch.float32, want int32"),
        ({"batch_indices": torch.zeros(3, 1, dtype=torch.int32)}, ValueError, "batch_indices: got shape"),
        ({"block_table": None}, ValueError, "kv_indptr, kv_indices: want both, or block_table"),
        (
            {"kv_indices": torch.zeros(2, dtype=torch.int32)},
            ValueError,
            "block_table: got kv_indptr or kv_indices as well",
        ),
    ],
)
def test_errors_name_the_argument(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    given = arguments(**changes)
    with pytest.raises(error, match=text):
        append_paged_kv_cache(**given)
    assert (given["k_cache"] == 0).all()


@pytest.mark.gpu
def test_offsets_past_32_bits() -> None:
    """Page 1994 of a cache whose pages lie 1,077,120 elements apart: 2.1e9 elements in."""
    stride, page = 1_077_120, 1994
    storage = torch.zeros(stride * page + 16 * 2 * 8, dtype=torch.float16, device="cuda")
    cache = storage.as_strided((page + 1, 16, 2, 8), (stride, 16, 8, 1))
    k = torch.ones(1, 2, 8, dtype=torch.float16, device="cuda")
    place_of = (int32([0], k.device), int32([3], k.device))
    append_paged_kv_cache(k, k, *place_of, cache, cache, block_table=int32([[page]], k.device))
    assert (cache[page, 3] == 1).all()
    assert int(storage.count_nonzero()) == 16


@pytest.mark.gpu
def test_no_sync_and_graph_capture() -> None:
    k, caches = torch.ones(1, 2, 8, device="cuda"), torch.zeros(2, 3, 4, 2, 8, device="cuda")
    request, position, table = (int32(x, k.device) for x in ([0], [1], [[2]]))
    append_paged_kv_cache(k, k, request, position, *caches, block_table=table)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        append_paged_kv_cache(k, k, request, position, *caches, block_table=table)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph):
        append_paged_kv_cache(k, k, request, position, *caches, block_table=table)
    caches.zero_()
    position.fill_(3)
    graph.replay()
    assert (caches[0, 2, 3] == 1).all()
    assert int(caches.count_nonzero()) == 32

"""SegmentGEMMWrapper against a loop over segments in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import evenshare.compat.flashinfer as flashinfer

BACKENDS = [("cpu", "cpu"), ("cpu", "triton"), pytest.param(("cuda", "auto"), marks=pytest.mark.gpu)]


@pytest.fixture(params=BACKENDS, ids=str)
def place(request: pytest.FixtureRequest) -> tuple[torch.device, str]:
    device, backend = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is chosen at import, and this machine has a GPU")
    return torch.device(device), backend


def loop(x: torch.Tensor, w: torch.Tensor, lens: list[int], weight_indices: list[int]) -> torch.Tensor:
    """w: [num_weights, d_in, d_out]; rows of no segment, and those of weights that do not exist, are 0."""
    out = torch.zeros(x.shape[0], w.shape[2], dtype=torch.float64)
    begin = 0
    for length, index in zip(lens, weight_indices, strict=True):
        if 0 <= index < len(w):
            out[begin : begin + length] = x[begin : begin + length].double().cpu() @ w[index].double().cpu()
        begin += length
    return out


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(
        got.double().cpu(), want, rtol=2e-3, atol=2e-3 * float(want.abs().max()) if want.numel() else 0
    )


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("lens", [[3, 0, 5, 1], [0, 0, 0, 0], [0, 0, 40, 0], [17, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("weight_indices", [None, [2, 0, 2, 1], [7, 1, -1, 1]], ids=str)
def test_segments(
    place: tuple[torch.device, str], column_major: bool, lens: list[int], weight_indices: list[int] | None
) -> None:
    device, backend = place
    wrapper = flashinfer.SegmentGEMMWrapper(torch.empty(0, device=device), backend)
    rows = sum(lens) + 2  # two of no segment
    x = torch.randn(rows, 48, device=device).half()
    weights = torch.randn(4 if weight_indices is None else 3, 48, 24, device=device).half()
    want = loop(x, weights, lens, weight_indices or [0, 1, 2, 3])
    given = weights.mT.contiguous() if column_major else weights
    indices = None if weight_indices is None else torch.tensor(weight_indices, device=device)
    lengths = torch.tensor(lens, device=device)
    indptr = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32, device=device)
    for segments in ({"seg_lens": lengths}, {"seg_indptr": indptr}, {"seg_indptr": indptr.long()}):
        assert_near(wrapper.run(x, given, 4, column_major, weight_indices=indices, **segments), want)
    out = torch.full((24, rows), float("nan"), dtype=x.dtype, device=device).T
    assert wrapper.run(x, given, 4, column_major, out, None, indptr, indices) is out
    assert_near(out, want)


def test_no_segments(place: tuple[torch.device, str]) -> None:
    device, backend = place
    wrapper = flashinfer.SegmentGEMMWrapper(torch.empty(0, device=device), backend)
    x, weights = torch.randn(2, 8, device=device), torch.empty(0, 8, 5, device=device)
    indptr = torch.zeros(1, dtype=torch.int32, device=device)
    for rows in (0, 2):
        assert torch.equal(wrapper.run(x[:rows], weights, 0, False, seg_indptr=indptr).cpu(), torch.zeros(rows, 5))
    out = torch.full((2, 5), float("nan"), device=device)
    wrapper.run(x, torch.ones(3, 8, 5, device=device), 0, False, out, seg_lens=indptr[:0], weight_indices=indptr[:0])
    assert (out == 0).all()


X, W, INDPTR = torch.ones(3, 8), torch.ones(2, 8, 5), torch.tensor([0, 1, 3])
wrapper = flashinfer.SegmentGEMMWrapper(torch.empty(0))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: wrapper.run(X, W, 2, False), ValueError, "seg_lens, seg_indptr: got neither"),
        (
            lambda: wrapper.run(X, W, 2, True, seg_indptr=INDPTR),
            ValueError,
            r"weights: got shape \(2, 8, 5\), want .* d_in = 8",
        ),
        (
            lambda: wrapper.run(X, W, 3, False, seg_indptr=INDPTR),
            ValueError,
            r"seg_indptr: got shape \(3,\), want \[4\]",
        ),
        (lambda: wrapper.run(X, W[:1], 2, False, seg_indptr=INDPTR), ValueError, "weights: got 1, want batch_size, 2"),
        (lambda: wrapper.run(X, W, -1, False, seg_indptr=INDPTR), ValueError, "batch_size: got -1"),
        (
            lambda: wrapper.run(X, W, 2, False, seg_indptr=INDPTR.float()),
            TypeError,
            "seg_indptr: got dtype torch.float32",
        ),
        (
            lambda: wrapper.run(X, W, 2, False, seg_indptr=INDPTR, weight_indices=INDPTR),
            ValueError,
            r"weight_indices: got shape \(3,\), want \[2\]",
        ),
        (lambda: wrapper.run(X[0], W, 2, False, seg_indptr=INDPTR), ValueError, r"x: got shape \(8,\)"),
        (lambda: wrapper.run(X, W[0], 2, False, seg_indptr=INDPTR), ValueError, r"weights: got shape \(8, 5\)"),
        (lambda: wrapper.run(X.tolist(), W, 2, False, seg_indptr=INDPTR), TypeError, "x: got list"),
    ],
)
def test_errors_name_the_argument(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_bf16_products() -> None:
    a, b, bias = torch.randn(3, 8).bfloat16(), torch.randn(5, 8).bfloat16().T, torch.randn(5).bfloat16()
    torch.testing.assert_close(flashinfer.mm_bf16(a, b, bias), torch.addmm(bias, a, b))
    assert flashinfer.mm_bf16(a, b, out_dtype=torch.float32).dtype == torch.float32
    A, B = torch.randn(2, 3, 8).bfloat16(), torch.randn(2, 5, 8).bfloat16().mT
    torch.testing.assert_close(flashinfer.bmm_bf16(A, B), A @ B)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bmm_fp8(dtype: torch.dtype) -> None:
    A = torch.randn(3, 4, 32).to(torch.float8_e4m3fn)
    B = torch.randn(3, 6, 32).to(torch.float8_e5m2).mT
    scales = torch.tensor(0.5), torch.tensor(0.25)
    want = A.double() @ B.double() * 0.125
    out = torch.full((4, 6, 3), float("nan"), dtype=dtype).permute(2, 0, 1)
    assert flashinfer.bmm_fp8(A, B, *scales, dtype, out) is out
    torch.testing.assert_close(out.double(), want, rtol=2**-7, atol=1e-2)
    assert torch.equal(flashinfer.bmm_fp8(A, B, *scales, dtype), out)
    with pytest.raises(ValueError, match=r"B: got shape \(3, 32, 6\), want \[2, 32, n\]"):
        flashinfer.bmm_fp8(A[:2], B, *scales, dtype)
    with pytest.raises(TypeError, match="out: got dtype torch"):
        flashinfer.bmm_fp8(A, B, *scales, dtype, out.float())

"""FlashInfer's products: segments of rows, each with a matrix of its own, over `evenshare.gemm.grouped_matmul`."""

from __future__ import annotations

import torch

from evenshare.compat.flashinfer._arguments import engine_backend
from evenshare.compat.flashinfer._missing import missing
from evenshare.device.checks import check_is_tensor
from evenshare.gemm import grouped_matmul, matmul, scaled_matmul
from evenshare.ops.rope import token_requests
from evenshare.ops.rows import check_like

INDEX_DTYPES = (torch.int32, torch.int64)


class SegmentGEMMWrapper:
    """y[i] = x[i] W[s], row i being of segment s: LoRA adapters, experts. One launch, whose programs share all work evenly.

    float_workspace_buffer: not used, of any size. backend: evenshare's own, "cpu" or "triton"; other names are ignored.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        self._backend = engine_backend(backend)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Nothing: no workspace is used."""

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        batch_size: int,
        weight_column_major: bool,
        out: torch.Tensor | None = None,
        seg_lens: torch.Tensor | None = None,
        seg_indptr: torch.Tensor | None = None,
        weight_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The rows of x, segment by segment, times the segments' weights.

        x: [n, d_in]; weights: [num_weights, d_out, d_in] if weight_column_major, else [num_weights, d_in, d_out]; float32, float16
        or bfloat16, any strides. out: [n, d_out] like x. All index tensors int32 or int64 on the device of x, where the host never
        reads them. seg_lens: [batch_size], rows of each segment, 0 for an empty one; or seg_indptr: [batch_size + 1], their prefix
        sums. weight_indices: [batch_size], each segment's weights; None: segment s has weights[s].

        Returns out. Rows of no segment, and of one whose weights do not exist, become 0. Weights are never copied: with
        weight_indices, rows are put in the order of their weights, so that segments which share them are multiplied as one.

        Raises TypeError or ValueError naming the argument, before any work.
        """
        check_is_tensor(x=x, weights=weights)
        if x.dim() != 2:
            raise ValueError(f"x: got shape {tuple(x.shape)}, want [n, d_in]")
        if weights.dim() != 3:
            raise ValueError(f"weights: got shape {tuple(weights.shape)}, want three dimensions")
        w = weights.mT if weight_column_major else weights
        if w.shape[1] != x.shape[1]:
            layout = "[num_weights, d_out, d_in]" if weight_column_major else "[num_weights, d_in, d_out]"
            raise ValueError(f"weights: got shape {tuple(weights.shape)}, want {layout} with d_in = {x.shape[1]}, as x")
        indptr = self._indptr(x, batch_size, seg_lens, seg_indptr)
        if weight_indices is not None:
            _check_index("weight_indices", weight_indices, x, batch_size)
        elif w.shape[0] != batch_size:
            raise ValueError(f"weights: got {w.shape[0]}, want batch_size, {batch_size}, or weight_indices")
        if out is not None:
            check_like("out", out, "x", x, (x.shape[0], w.shape[2]))
        if batch_size == 0 or w.shape[0] == 0:
            y = x.new_zeros(x.shape[0], w.shape[2])
            return y if out is None else out.copy_(y)
        if weight_indices is None:
            return grouped_matmul(x, w, indptr.int(), out=out, backend=self._backend)
        offsets, rows = _by_weight(indptr, weight_indices, w.shape[0], x.shape[0])
        out = None if out is None else out.zero_()
        return grouped_matmul(x, w, offsets, gather=rows, scatter=rows, out=out, backend=self._backend)

    forward = run

    @staticmethod
    def _indptr(
        x: torch.Tensor, batch_size: int, seg_lens: torch.Tensor | None, seg_indptr: torch.Tensor | None
    ) -> torch.Tensor:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 0:
            raise ValueError(f"batch_size: got {batch_size!r}, want a whole number, 0 or above")
        if seg_indptr is None:
            if seg_lens is None:
                raise ValueError("seg_lens, seg_indptr: got neither, want one of them")
            _check_index("seg_lens", seg_lens, x, batch_size)
            return torch.nn.functional.pad(seg_lens.cumsum(0), (1, 0))
        _check_index("seg_indptr", seg_indptr, x, batch_size + 1)
        return seg_indptr


def _check_index(name: str, index: torch.Tensor, x: torch.Tensor, length: int) -> None:
    check_is_tensor(**{name: index})
    if index.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: got dtype {index.dtype}, want torch.int32 or torch.int64")
    if index.shape != (length,):
        raise ValueError(f"{name}: got shape {tuple(index.shape)}, want [{length}]")
    if index.device != x.device:
        raise ValueError(f"{name}: got device {index.device}, want {x.device}, as x")


def _by_weight(
    indptr: torch.Tensor, weight_indices: torch.Tensor, num_weights: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(offsets int32 [num_weights + 1] of each weight's rows, in rows int32 [num_rows]): rows in the order of their weights."""
    segment, _ = token_requests(indptr, num_rows)
    weight = weight_indices[segment.clamp(min=0).long()]
    weight = weight.where((segment >= 0) & (weight >= 0), -1)
    ordered, rows = weight.sort(stable=True)  # type: ignore[call-overload]
    numbers = torch.arange(num_weights + 1, dtype=ordered.dtype, device=ordered.device)
    return torch.searchsorted(ordered, numbers, out_int32=True), rows.int()


def mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> torch.Tensor:
    """a [m, k] b [k, n] + bias, bfloat16, any strides (a Linear's weight is passed as `weight.T`)."""
    return matmul(a, b, bias=bias, out=out, out_dtype=out_dtype, backend=engine_backend(backend))


def bmm_bf16(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> torch.Tensor:
    """A [batch, m, k] B [batch, k, n], bfloat16, any strides; one launch."""
    return matmul(A, B, out=out, out_dtype=out_dtype, backend=engine_backend(backend))


def bmm_fp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """(A_scale A [batch, m, k]) (B_scale B [batch, k, n]) of `dtype`, for fp8 A and B, any strides; a launch for each of the batch.

    A_scale, B_scale: float32 of one element. out: [batch, m, n] of `dtype`.
    """
    check_is_tensor(A=A, B=B)
    if A.dim() != 3:
        raise ValueError(f"A: got shape {tuple(A.shape)}, want [batch, m, k]")
    if B.dim() != 3 or B.shape[:2] != (A.shape[0], A.shape[2]):
        raise ValueError(f"B: got shape {tuple(B.shape)}, want [{A.shape[0]}, {A.shape[2]}, n]")
    shape = (*A.shape[:2], B.shape[2])
    if out is None:
        out = A.new_empty(shape, dtype=dtype)
    else:
        check_like("out", out, "A", A, shape, (dtype,))
    for a, b, y in zip(A, B, out, strict=True):
        scaled_matmul(a, b, A_scale, B_scale, out=y, out_dtype=dtype, backend=engine_backend(backend))
    return out


NAMES = (
    "mm_fp4",
    "mm_fp8",
    "gemm_fp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise",
    "grouped_mm_bf16",
    "group_gemm_mxfp4_nt_groupwise",
    "tgv_gemm_sm100",
    "prepare_bf16_fp4_weights",
    "mm_bf16_fp4",
)

__getattr__ = missing(__name__, NAMES, "evenshare.matmul and evenshare.w4a16_matmul are the products here")

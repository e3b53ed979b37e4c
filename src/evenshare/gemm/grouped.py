"""The product of groups of rows, each with a matrix of its own: mixtures of experts, segments of LoRA adapters."""

from __future__ import annotations

import itertools

import torch

from evenshare.device.checks import check_epilogue, check_is_tensor
from evenshare.device.target import select_target
from evenshare.gemm import reference
from evenshare.gemm.epilogue import Epilogue
from evenshare.gemm.functions import DTYPES


def grouped_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    gather: torch.Tensor | None = None,
    scatter: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """out[scatter[i]] = activation(x[gather[i]] w[g] + bias[g]) for every row i of group g, offsets[g] <= i < offsets[g + 1].

    x: float32, float16 or bfloat16 [num_rows, k], any strides.
    w: [num_groups, k, n], dtype and device of x, any strides (weights of Linears are passed as `weights.mT`).
    offsets: int32 [num_groups + 1], not decreasing, on the device of x, where the host never reads it. Groups may be empty.
    bias: [num_groups, n], any float dtype and strides.
    activation: as for `matmul`.
    gather: int32 [m], rows of x; None: row i is x[i], and m is num_rows. A row may be used often; one outside x counts as zeros.
    scatter: int32 [m], rows of out, each at most once; None: row i goes to out[i]. One outside out goes nowhere.
    out: [num_out_rows, n_out], dtype and device of x, any strides without overlap; returned. Must not share memory with x or w.
        Without scatter it has m rows, and those before offsets[0] and from offsets[num_groups] on become 0; with scatter, rows
        that nobody names stay as they are, and if `out` is left out it has m rows of zeros to begin with.
    backend: None (by device), "cpu" or "triton".

    Returns out. On a GPU it is one launch: its programs count the tiles of every group and share the k-steps of all of them evenly,
    however unevenly the rows are dealt (arXiv 2301.03598). Sums are float32, results repeat bit for bit.

    Raises TypeError for a wrong dtype and ValueError for a wrong shape, device, activation or backend, before any work, and on the
    CPU for offsets that decrease or leave the rows. On a GPU such offsets give rows without meaning, and touch no other memory.

    >>> import torch
    >>> from evenshare.gemm import grouped_matmul
    >>> offsets = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)
    >>> grouped_matmul(torch.randn(9, 128), torch.randn(4, 128, 64), offsets, activation="silu_and_multiply").shape
    torch.Size([9, 32])
    """
    _check_operands(x, w)
    num_groups, _, n = w.shape
    m = x.shape[0]
    if gather is not None:
        _check_index("gather", gather, x, None)
        m = gather.shape[0]
    if scatter is not None:
        _check_index("scatter", scatter, x, m)
    num_out_rows = out.shape[0] if isinstance(out, torch.Tensor) and out.ndim == 2 and scatter is not None else m
    n_out = check_epilogue(x.new_empty(num_out_rows, 0), "x", n, None, activation, None, out)
    _check_bias(bias, x, num_groups, n)
    _check_offsets(offsets, x, num_groups, m)
    target = select_target(x.device, backend)
    if out is None:
        out = x.new_empty(m, n_out) if scatter is None else x.new_zeros(m, n_out)
    if out.numel() == 0 or m == 0:
        return out
    if target.backend == "cpu":
        _loop(x, w, offsets.tolist(), bias, activation, gather, scatter, out)
    else:
        from evenshare.gemm import launch

        launch.grouped_matmul(x, w, offsets, bias, activation, gather, scatter, m, out, target)
    return out


def _loop(
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: list[int],
    bias: torch.Tensor | None,
    activation: str | None,
    gather: torch.Tensor | None,
    scatter: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    if scatter is None:
        out[: offsets[0]] = 0
        out[offsets[-1] :] = 0
    for group, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if begin == end:
            continue
        if gather is None:
            rows = x[begin:end]
        else:
            index = gather[begin:end].long()
            inside = (index >= 0) & (index < x.shape[0])
            rows = x.new_zeros(end - begin, x.shape[1])
            rows[inside] = x[index[inside]]
        y = reference.matmul(rows, w[group], Epilogue(None if bias is None else bias[group], activation))
        if scatter is None:
            out[begin:end] = y
        else:
            index = scatter[begin:end].long()
            inside = (index >= 0) & (index < out.shape[0])
            out[index[inside]] = y[inside]


def _check_operands(x: torch.Tensor, w: torch.Tensor) -> None:
    check_is_tensor(x=x, w=w)
    if x.dtype not in DTYPES:
        raise TypeError(f"x: got {x.dtype}, want float32, float16 or bfloat16")
    if w.dtype != x.dtype:
        raise TypeError(f"w: got {w.dtype}, want that of x, {x.dtype}")
    if x.ndim != 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, want [num_rows, k]")
    if w.ndim != 3 or w.shape[1] != x.shape[1] or w.shape[0] == 0:
        raise ValueError(f"w: got shape {tuple(w.shape)}, want [num_groups, {x.shape[1]}, n], one group at least")
    if w.device != x.device:
        raise ValueError(f"w: got device {w.device}, want that of x, {x.device}")


def _check_index(name: str, index: torch.Tensor, x: torch.Tensor, want: int | None) -> None:
    check_is_tensor(**{name: index})
    if index.dtype != torch.int32:
        raise TypeError(f"{name}: got {index.dtype}, want torch.int32")
    if index.ndim != 1 or (want is not None and index.shape[0] != want):
        raise ValueError(f"{name}: got shape {tuple(index.shape)}, want [{'m' if want is None else want}]")
    if index.device != x.device:
        raise ValueError(f"{name}: got device {index.device}, want that of x, {x.device}")


def _check_bias(bias: torch.Tensor | None, x: torch.Tensor, num_groups: int, n: int) -> None:
    if bias is None:
        return
    check_is_tensor(bias=bias)
    if not bias.is_floating_point():
        raise TypeError(f"bias: got {bias.dtype}, want a floating-point tensor")
    if bias.shape != (num_groups, n):
        raise ValueError(f"bias: got shape {tuple(bias.shape)}, want [{num_groups}, {n}]")
    if bias.device != x.device:
        raise ValueError(f"bias: got device {bias.device}, want that of x, {x.device}")


def _check_offsets(offsets: torch.Tensor, x: torch.Tensor, num_groups: int, m: int) -> None:
    check_is_tensor(offsets=offsets)
    if offsets.dtype != torch.int32:
        raise TypeError(f"offsets: got {offsets.dtype}, want torch.int32")
    if offsets.shape != (num_groups + 1,):
        raise ValueError(f"offsets: got shape {tuple(offsets.shape)}, want [{num_groups + 1}], one more than groups")
    if offsets.device != x.device:
        raise ValueError(f"offsets: got device {offsets.device}, want that of x, {x.device}")
    if offsets.device.type == "cpu":
        steps = torch.diff(offsets, prepend=offsets.new_zeros(1), append=offsets.new_full((1,), m))
        if bool((steps < 0).any()):
            raise ValueError(f"offsets: got {offsets.tolist()}, want them not to decrease, from 0 to {m} rows")

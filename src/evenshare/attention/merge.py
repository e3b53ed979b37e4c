"""Merge attention states: partial results over disjoint sets of keys become the result over their union."""

from __future__ import annotations

import math

import torch
import triton

from evenshare.attention.kernels import merge as merge_kernels
from evenshare.attention.problem import DTYPES
from evenshare.device.checks import check_is_tensor
from evenshare.device.target import select_target

# Elements that one program holds per state: 4 warps of 32 lanes, 16 bytes each in bf16. The interpreter wants few programs.
BLOCK_ELEMENTS = 1024
INTERPRETER_BLOCK_ELEMENTS = 1 << 14
MAX_BLOCK_D = 256


def merge_state(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    base: float = math.e,
    *,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine two attention states of the same queries over disjoint sets of keys (FlashInfer, section 2.2).

    o_a, o_b: [n, H, D], float32, float16 or bfloat16, any strides. lse_a, lse_b: float32 [n, H], logarithms to `base` > 1.
    out: like o_a; lse_out: like lse_a; both may be the tensors of state a, which are then updated in place.

    Returns (o [n, H, D], lse [n, H]). A state with lse = -inf contributes nothing, even if its o is NaN;
    two such states give (0, -inf). Sums are in fp32. Raises ValueError or TypeError naming the argument.

    >>> zero, minus_infinity = torch.zeros(1, 1, 4), torch.full((1, 1), -math.inf)
    >>> merge_state(torch.ones(1, 1, 4), torch.zeros(1, 1), zero, minus_infinity)
    (tensor([[[1., 1., 1., 1.]]]), tensor([[0.]]))
    """
    _check_state("o_a", o_a, "lse_a", lse_a, 3)
    _check_like("o_b", o_b, "o_a", o_a, o_a.shape)
    _check_like("lse_b", lse_b, "lse_a", lse_a, lse_a.shape)
    log2_base = _log2_base(base)
    out, lse_out = _outputs(o_a, lse_a, o_a.shape, out, lse_out)
    target = select_target(o_a.device, backend)
    if target.backend == "cpu":
        _merge(torch.stack((o_a, o_b), 1), torch.stack((lse_a, lse_b), 1), log2_base, out, lse_out)
    elif lse_out.numel():
        grid, constants = _geometry(out, target.interpreted)
        with torch.cuda.device_of(out):
            merge_kernels.merge_state[grid](
                o_a, lse_a, o_b, lse_b, out, lse_out, lse_out.numel(), out.shape[1], log2_base,
                *o_a.stride(), *lse_a.stride(), *o_b.stride(), *lse_b.stride(), *out.stride(), *lse_out.stride(), **constants,
            )  # fmt: skip
    return out, lse_out


def merge_states(
    o: torch.Tensor,
    lse: torch.Tensor,
    base: float = math.e,
    *,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine L attention states of the same queries over disjoint sets of keys; see `merge_state`.

    o: [n, L, H, D], float32, float16 or bfloat16; lse: float32 [n, L, H], logarithms to `base` > 1; any strides, any L >= 0.
    out: [n, H, D] of o's dtype; lse_out: float32 [n, H]; neither may overlap the inputs.

    Returns (o [n, H, D], lse [n, H]); (0, -inf) where no state has a key, so also for L = 0.
    Raises ValueError or TypeError naming the argument.
    """
    _check_state("o", o, "lse", lse, 4)
    log2_base = _log2_base(base)
    num_tokens, num_states, num_heads, head_dim = o.shape
    out, lse_out = _outputs(o, lse, (num_tokens, num_heads, head_dim), out, lse_out)
    target = select_target(o.device, backend)
    if target.backend == "cpu":
        _merge(o, lse, log2_base, out, lse_out)
    elif lse_out.numel():
        grid, constants = _geometry(out, target.interpreted)
        with torch.cuda.device_of(out):
            merge_kernels.merge_states[grid](
                o, lse, out, lse_out, lse_out.numel(), num_heads, num_states, log2_base,
                *o.stride(), *lse.stride(), *out.stride(), *lse_out.stride(), **constants,
            )  # fmt: skip
    return out, lse_out


def _merge(o: torch.Tensor, lse: torch.Tensor, log2_base: float, out: torch.Tensor, lse_out: torch.Tensor) -> None:
    """The torch backend: o [n, L, H, D], lse [n, L, H]."""
    if lse.shape[1] == 0:
        out.zero_()
        lse_out.fill_(-math.inf)
        return
    lse2 = lse * log2_base
    peak = lse2.amax(1)
    empty = peak == -math.inf
    weights = torch.exp2(lse2 - peak.masked_fill(empty, 0.0).unsqueeze(1))
    total = weights.sum(1).masked_fill_(empty, 1.0)
    used = o.float().masked_fill((lse == -math.inf).unsqueeze(-1), 0.0)
    out.copy_((used * weights.unsqueeze(-1)).sum(1) / total.unsqueeze(-1))
    lse_out.copy_((peak + total.log2()) / log2_base)


def _geometry(out: torch.Tensor, interpreted: bool) -> tuple[tuple[int], dict[str, int]]:
    block_d = min(max(triton.next_power_of_2(out.shape[2]), 16), MAX_BLOCK_D)
    block_m = max((INTERPRETER_BLOCK_ELEMENTS if interpreted else BLOCK_ELEMENTS) // block_d, 1)
    num_rows = out.shape[0] * out.shape[1]
    return (triton.cdiv(num_rows, block_m),), {"HEAD_DIM": out.shape[2], "BLOCK_M": block_m, "BLOCK_D": block_d}


def _log2_base(base: float) -> float:
    if not (base > 1 and math.isfinite(base)):
        raise ValueError(f"base: got {base}, want a finite number above 1")
    return math.log2(base)


def _check_state(o_name: str, o: torch.Tensor, lse_name: str, lse: torch.Tensor, dims: int) -> None:
    check_is_tensor(**{o_name: o, lse_name: lse})
    if o.dtype not in DTYPES:
        raise TypeError(f"{o_name}: got dtype {o.dtype}, want one of {', '.join(map(str, DTYPES))}")
    if o.dim() != dims:
        raise ValueError(f"{o_name}: got shape {tuple(o.shape)}, want {dims} dimensions")
    if lse.dtype != torch.float32:
        raise TypeError(f"{lse_name}: got dtype {lse.dtype}, want torch.float32")
    if lse.shape != o.shape[:-1]:
        raise ValueError(
            f"{lse_name}: got shape {tuple(lse.shape)}, want {tuple(o.shape[:-1])}, as {o_name} without its last dimension"
        )
    if lse.device != o.device:
        raise ValueError(f"{lse_name}: got device {lse.device}, want {o.device}, as {o_name}")


def _check_like(
    name: str, tensor: torch.Tensor, model_name: str, model: torch.Tensor, shape: torch.Size | tuple[int, ...]
) -> None:
    check_is_tensor(**{name: tensor})
    if tensor.dtype != model.dtype:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, want {model.dtype}, as {model_name}")
    if tensor.shape != shape:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want {tuple(shape)}")
    if tensor.device != model.device:
        raise ValueError(f"{name}: got device {tensor.device}, want {model.device}, as {model_name}")


def _outputs(
    o: torch.Tensor,
    lse: torch.Tensor,
    shape: torch.Size | tuple[int, ...],
    out: torch.Tensor | None,
    lse_out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if out is None:
        out = torch.empty(shape, dtype=o.dtype, device=o.device)
    else:
        _check_like("out", out, "o", o, shape)
    if lse_out is None:
        lse_out = torch.empty(shape[:-1], dtype=torch.float32, device=o.device)
    else:
        _check_like("lse_out", lse_out, "lse", lse, shape[:-1])
    return out, lse_out

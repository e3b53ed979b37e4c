"""Linear layers, 4-, 8- or 16-bit, whose weights are split over ranks: by rows of W (column-parallel) or columns (row-parallel).

Names are the field's (Megatron-LM, arXiv 1909.08053), where the weight is W transposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from evenshare.distributed.ranks import Group, find_ranks, reduce_scatter
from evenshare.distributed.shares import even_share, take_inputs, take_outputs
from evenshare.gemm import matmul
from evenshare.quant import QuantLinear, w4a16_matmul, w8a16_matmul

REDUCTIONS = ("all", "tokens")


class ColumnParallelLinear(nn.Module):
    """activation(x W'ᵀ + b'), W' this rank's rows of W: every rank has all of x and gets a share of the outputs.

    linear: the whole layer, or one whose weight is a DTensor with Shard(0), whose local part is taken as it is.
    parts: how many fused layers of one size W is, each of which is split: 2 for [gate | up].
    unit: outputs that stay together: a head's, or a group of the row-parallel layer behind.
    outputs: the rows of W, instead of an even share: of fused q, k and v, say (`HeadShare.rows`).
    activation: as in `w4a16_matmul`. gather_output: every rank gets all outputs; with one part and no activation.

    forward: x [..., k] -> [..., n'] (n' / 2 if the activation is gated), or [..., n] with gather_output.
    """

    def __init__(
        self,
        linear: nn.Linear | QuantLinear,
        *,
        parts: int = 1,
        unit: int = 1,
        outputs: Sequence[range] | None = None,
        activation: str | None = None,
        gather_output: bool = False,
        group: Group = None,
    ) -> None:
        super().__init__()
        self.ranks = ranks = find_ranks(group)
        n, _ = _shape(linear)
        if n % parts:
            raise ValueError(f"parts: got {parts} for a weight of {n} rows, want a number that divides them")
        if gather_output and (parts > 1 or outputs is not None or activation is not None):
            raise ValueError(
                "gather_output: got True with parts, outputs or an activation, want a plain layer's even share"
            )
        if outputs is None:
            share = even_share(n // parts, ranks.rank, ranks.size, unit)
            outputs = [range(i * n // parts + share.start, i * n // parts + share.stop) for i in range(parts)]
        bias = None if linear.bias is None else take_outputs(_whole(linear.bias), outputs)
        self.local = _replace(linear, 0, outputs, bias)
        self.activation = activation
        self.counts = [len(even_share(n, r, ranks.size, unit)) for r in range(ranks.size)] if gather_output else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _product(self.local, x, self.local.bias, self.activation)
        if self.counts is None:
            return y
        rows = y.flatten(0, -2)
        padded = rows.new_zeros(rows.shape[0], max(self.counts))
        padded[:, : rows.shape[1]] = rows
        found = self.ranks.gather(padded, "outputs of a linear layer").unflatten(0, (self.ranks.size, -1))
        whole = torch.cat([part[:, :count] for part, count in zip(found, self.counts, strict=True)], 1)
        return whole.unflatten(0, x.shape[:-1])


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x' W'ᵀ, + b + residual, W' this rank's columns of W: a rank has a share of x and adds to all outputs.

    linear: the whole layer, or one whose weight is a DTensor with Shard(1).
    unit: inputs that stay together, as of the layer before; a multiple of a quantised weight's group size keeps groups whole.
    inputs: the columns of W, instead of an even share: those of a rank's heads, say (`HeadShare.rows`).
    reduce: "all", every rank gets the sum; "tokens", an even share of its rows.
    num_chunks: the rows of x go in so many chunks, one being reduced while the next is computed; for prefill.

    forward: x [..., k'], residual [..., n] or None -> [..., n] on every rank; with reduce="tokens" x [m, k'] ->
    [m / num_ranks, n], and residual is such a share too.

    Rank 0 adds bias and residual in the epilogue of its product, in float32, so once; a share's residual is added behind the sum.
    """

    def __init__(
        self,
        linear: nn.Linear | QuantLinear,
        *,
        unit: int = 1,
        inputs: range | None = None,
        reduce: str = "all",
        num_chunks: int = 1,
        group: Group = None,
    ) -> None:
        super().__init__()
        if reduce not in REDUCTIONS:
            raise ValueError(f"reduce: got {reduce!r}, want one of {', '.join(REDUCTIONS)}")
        if num_chunks < 1 or (num_chunks > 1 and reduce == "tokens"):
            raise ValueError(f"num_chunks: got {num_chunks} with reduce={reduce!r}, want 1, or more with reduce='all'")
        self.ranks = ranks = find_ranks(group)
        self.reduce, self.num_chunks = reduce, num_chunks
        share = even_share(_shape(linear)[1], ranks.rank, ranks.size, unit) if inputs is None else inputs
        bias = linear.bias if ranks.rank == 0 else None
        self.local = _replace(linear, 1, [share], None if bias is None else _whole(bias))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        n, shared = _shape(self.local)[0], self.reduce == "tokens"
        if shared and (x.dim() != 2 or x.shape[0] % self.ranks.size):
            want = f"[m, k] with m a multiple of the {self.ranks.size} ranks"
            raise ValueError(f"x: got shape {tuple(x.shape)}, want {want}")
        # On every rank, also those that leave the residual to another: one that raised alone would let the others wait.
        shape = (x.shape[0] // self.ranks.size, n) if shared else (*x.shape[:-1], n)
        if residual is not None and residual.shape != shape:
            raise ValueError(f"residual: got shape {tuple(residual.shape)}, want {shape}")
        return self._scatter(x, residual) if shared else self._sum(x, residual)

    def _sum(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        rows = x.flatten(0, -2)
        y = rows.new_empty(rows.shape[0], _shape(self.local)[0])
        first = residual if self.ranks.rank == 0 else None
        works = []
        with self.ranks.talking("sum of a row-parallel layer"):
            for part in _chunks(rows.shape[0], self.num_chunks):
                own = None if first is None else first.flatten(0, -2)[part]
                _product(self.local, rows[part], self.local.bias, None, own, y[part])
                works.append(dist.all_reduce(y[part], group=self.ranks.group, async_op=True))
            for work in works:
                work.wait()
        return y.unflatten(0, x.shape[:-1])

    def _scatter(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        y = _product(self.local, x, self.local.bias, None)
        out = y.new_empty(y.shape[0] // self.ranks.size, y.shape[1])
        with self.ranks.talking("sum of a row-parallel layer"):
            reduce_scatter(out, y, group=self.ranks.group)
        return out if residual is None else out.add_(residual)


def parallelize(model: nn.Module, plan: Mapping[str, str], *, unit: int = 1, group: Group = None) -> nn.Module:
    """Replace linear layers of `model` in place by their column- and row-parallel forms; returns the model.

    plan: shell pattern of a module's name -> "colwise", "colwise_gather_output" or "rowwise", as in transformers'
    `base_model_tp_plan`; the first pattern that fits.
    unit: of every cut, so that shares of neighbouring layers agree: 1, or what divides all sizes cut, as a group size does.
    Raises ValueError for another style or a pattern that fits no nn.Linear or QuantLinear.
    """
    styles: dict[str, Any] = {
        "colwise": ColumnParallelLinear,
        "colwise_gather_output": partial(ColumnParallelLinear, gather_output=True),
        "rowwise": RowParallelLinear,
    }
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | QuantLinear)}
    used = set()
    for name, linear in linears.items():
        pattern = next((pattern for pattern in plan if fnmatchcase(name, pattern)), None)
        if pattern is not None:
            used.add(pattern)
            if plan[pattern] not in styles:
                raise ValueError(f"plan[{pattern!r}]: got {plan[pattern]!r}, want one of {', '.join(styles)}")
            model.set_submodule(name, styles[plan[pattern]](linear, unit=unit, group=group))
    if unused := set(plan) - used:
        raise ValueError(f"plan: got {', '.join(sorted(unused))}, want patterns that fit a linear layer of the model")
    return model


def _shape(linear: nn.Module) -> tuple[int, int]:
    """(n, k) of the whole weight; TypeError for what is no linear layer."""
    if isinstance(linear, QuantLinear):
        return linear.quantized.shape
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"linear: got {type(linear).__name__}, want an nn.Linear or a QuantLinear")
    return linear.out_features, linear.in_features


def _replace(
    linear: nn.Linear | QuantLinear, dim: int, shares: Sequence[range], bias: torch.Tensor | None
) -> nn.Linear | QuantLinear:
    """The layer of this rank's share of the weight: rows (dim 0) or columns (dim 1)."""
    if isinstance(linear, QuantLinear):
        weight = linear.quantized
        return QuantLinear(
            take_outputs(weight, shares) if dim == 0 else take_inputs(weight, shares[0]), bias, backend=linear.backend
        )
    whole = linear.weight.detach()
    if isinstance(whole, DTensor):
        if whole.placements != (Shard(dim),):
            raise ValueError(f"linear.weight: got a DTensor with {whole.placements}, want (Shard(dim={dim}),)")
        part = whole.to_local()
        want = sum(map(len, shares))
        if part.shape[dim] != want:
            raise ValueError(
                f"linear.weight: got a DTensor with {part.shape[dim]} here, want the rank's share of {want}"
            )
    else:
        part = take_outputs(whole, shares) if dim == 0 else take_inputs(whole, shares[0])
    made = nn.Linear(part.shape[1], part.shape[0], bias is not None, device="meta")
    made.weight = nn.Parameter(part.contiguous(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return made


def _whole(bias: torch.Tensor) -> torch.Tensor:
    return bias.full_tensor() if isinstance(bias, DTensor) else bias


def _product(
    linear: nn.Linear | QuantLinear,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if isinstance(linear, QuantLinear):
        function = w4a16_matmul if linear.bits == 4 else w8a16_matmul
        return function(
            x, linear.quantized, bias=bias, activation=activation, residual=residual, out=out, backend=linear.backend
        )
    return matmul(x, linear.weight.T, bias=bias, activation=activation, residual=residual, out=out)


def _chunks(num_rows: int, num_chunks: int) -> list[slice]:
    """Even shares of the rows, at least one of them."""
    num_chunks = min(num_chunks, max(num_rows, 1))
    shares = [even_share(num_rows, i, num_chunks) for i in range(num_chunks)]
    return [slice(share.start, share.stop) for share in shares]

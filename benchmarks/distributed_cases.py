"""The cases of `benchmarks.distributed`: each builds its work for a group of ranks, and times one rank's share alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from benchmarks.batches import indptr
from benchmarks.peers import relative_error
from evenshare import QuantizedWeight, merge_state, merge_states, plan_attention, w4a16_matmul
from evenshare.attention import AttentionPlan
from evenshare.distributed import (
    ColumnParallelLinear,
    HeadShare,
    RoundRobin,
    RowParallelLinear,
    even_share,
    plan_context_attention,
    plan_ring_attention,
    share_heads,
    take_inputs,
    take_outputs,
)
from evenshare.distributed.scaling import Link, context_us, ring_us, tensor_us
from evenshare.ops import rms_norm
from evenshare.quant import QuantLinear

GROUP_SIZE = 128  # weights of a scale
Call = Callable[[], torch.Tensor]
Clock = Callable[[Call], float]  # microseconds


class Case(Protocol):
    @property
    def title(self) -> str: ...

    def supports(self, num_ranks: int) -> bool:
        """Whether it can be dealt to so many."""
        ...

    def build(self, group: dist.ProcessGroup, device: torch.device) -> tuple[Call, Callable[[torch.Tensor], float]]:
        """(this rank's call, relative error of what it returns)."""
        ...

    def time_share(self, num_ranks: int, device: torch.device, clock: Clock) -> tuple[float, ...]:
        """Microseconds of one rank's parts, measured alone, as `predict` wants them."""
        ...

    def predict(self, times: tuple[float, ...], num_ranks: int, link: Link) -> float:
        """Microseconds on so many ranks."""
        ...


@dataclass(frozen=True)
class Heads:
    num_qo: int
    num_kv: int
    dim: int
    dtype: torch.dtype

    @property
    def plan(self) -> dict[str, object]:
        return {"num_qo_heads": self.num_qo, "num_kv_heads": self.num_kv, "head_dim": self.dim, "dtype": self.dtype}

    def queries(self, n: int, device: torch.device) -> torch.Tensor:
        return torch.randn(n, self.num_qo, self.dim, device=device).to(self.dtype)

    def keys(self, *leading: int, device: torch.device) -> torch.Tensor:
        return torch.randn(*leading, self.num_kv, self.dim, device=device).to(self.dtype)


@dataclass(frozen=True)
class Decode:
    """One new token over keys that are spread by pages, by turns."""

    num_keys: int
    heads: Heads
    page_size: int = 64

    @property
    def title(self) -> str:
        return f"context-parallel decode, {self.num_keys} keys, {self.heads.num_qo}/{self.heads.num_kv} heads"

    def supports(self, num_ranks: int) -> bool:
        return self.num_keys % (num_ranks * self.page_size) == 0

    def _cache(self, num_ranks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pages = self.num_keys // num_ranks // self.page_size
        k, v = (self.heads.keys(pages, self.page_size, device=device) for _ in range(2))
        return k, v, torch.randperm(pages, device=device).int()[None]

    def build(self, group: dist.ProcessGroup, device: torch.device) -> tuple[Call, Callable[[torch.Tensor], float]]:
        size = dist.get_world_size(group)
        q = self.heads.queries(1, device)
        dist.broadcast(q, group_src=0, group=group)
        torch.manual_seed(dist.get_rank(group))
        k, v, table = self._cache(size, device)
        plan = plan_context_attention(
            placement=RoundRobin(self.page_size, size),
            block_table=table,
            kv_lens=torch.tensor([self.num_keys], device=device, dtype=torch.int32),
            group=group,
            **self.heads.plan,
        )
        return partial(plan.run, q, k, v), partial(self._error, group, q, k.flatten(0, 1), v.flatten(0, 1))

    def _error(
        self, group: dist.ProcessGroup, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> float:
        """Against states of the ranks in float64, a KV head at a time."""
        parts = []
        for head, queries in enumerate(q[0].unflatten(0, (self.heads.num_kv, -1)).double()):
            scores = queries @ k[:, head].double().T * self.heads.dim**-0.5
            lse = scores.logsumexp(1, keepdim=True)
            parts.append(torch.cat(((scores - lse).exp() @ v[:, head].double(), lse), 1))
        own = torch.cat(parts)
        states = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(states, own, group=group)
        every = torch.stack(states)
        weights = every[..., -1:].softmax(0)
        return relative_error(out[0], (weights * every[..., :-1]).sum(0))

    def time_share(self, num_ranks: int, device: torch.device, clock: Clock) -> tuple[float, ...]:
        k, v, table = self._cache(num_ranks, device)
        q = self.heads.queries(1, device)
        lens = torch.tensor([self.num_keys // num_ranks], dtype=torch.int32, device=device)
        plan = plan_attention(
            block_table=table, kv_lens=lens, page_size=self.page_size, causal=False, **self.heads.plan
        )
        o = self.heads.queries(num_ranks, device)[None]
        lse = torch.randn(1, num_ranks, self.heads.num_qo, device=device)
        merge = clock(lambda: merge_states(o, lse)[0]) if num_ranks > 1 else 0.0
        return (clock(lambda: plan.run(q, k, v, return_lse=True)[0]) + merge,)

    def predict(self, times: tuple[float, ...], num_ranks: int, link: Link) -> float:
        result = self.heads.num_qo * (self.heads.dim * self.heads.dtype.itemsize + 4)
        return context_us(times[0], result, result, num_ranks, link)


@dataclass(frozen=True)
class Prefill:
    """One causal prompt round the ring."""

    num_tokens: int
    heads: Heads

    @property
    def title(self) -> str:
        return f"ring prefill, {self.num_tokens} tokens, {self.heads.num_qo}/{self.heads.num_kv} heads"

    def supports(self, num_ranks: int) -> bool:
        return self.num_tokens % (2 * num_ranks) == 0

    def build(self, group: dist.ProcessGroup, device: torch.device) -> tuple[Call, Callable[[torch.Tensor], float]]:
        torch.manual_seed(dist.get_rank(group))
        plan = plan_ring_attention(
            qo_indptr=indptr([self.num_tokens]), min_chunk=1, group=group, device=device, **self.heads.plan
        )
        q = self.heads.queries(plan.num_tokens, device)
        k, v = (self.heads.keys(plan.num_tokens, device=device) for _ in range(2))

        def error(out: torch.Tensor) -> float:
            """Of the first head of a few rows of this rank."""
            keys, values = (plan.gather(x[:, :1])[:, 0].double() for x in (k, v))
            rows = torch.tensor([0, plan.num_tokens // 2, plan.num_tokens - 1], device=device)
            scores = q[rows, 0].double() @ keys.T * self.heads.dim**-0.5
            hidden = torch.arange(self.num_tokens, device=device) > plan.positions[rows, None]
            return relative_error(out[rows, 0], scores.masked_fill(hidden, -torch.inf).softmax(1) @ values)

        return partial(plan.run, q, k, v), error

    def time_share(self, num_ranks: int, device: torch.device, clock: Clock) -> tuple[float, ...]:
        n = self.num_tokens // num_ranks
        q = self.heads.queries(n, device)
        k, v = (self.heads.keys(n, device=device) for _ in range(2))

        def plan(num_keys: int, causal: bool) -> AttentionPlan:
            pieces = {"qo_indptr": indptr([n]), "kv_indptr": indptr([num_keys])}
            return plan_attention(causal=causal, device=device, **pieces, **self.heads.plan)

        own, other = plan(n, True), plan(n // 2, False)
        o, lse = own.run(q, k, v, return_lse=True)
        o = o.float()

        def step() -> torch.Tensor:
            o_step, lse_step = other.run(q, k, v, return_lse=True)
            return merge_state(o, lse, o_step.float(), lse_step, out=o, lse_out=lse)[0]

        return clock(lambda: own.run(q, k, v, return_lse=True)[0]), clock(step)

    def predict(self, times: tuple[float, ...], num_ranks: int, link: Link) -> float:
        kv_bytes = 2 * self.num_tokens // num_ranks * self.heads.num_kv * self.heads.dim * self.heads.dtype.itemsize
        return ring_us(times[0], times[1], kv_bytes, num_ranks, link)


@dataclass(frozen=True)
class Layer:
    """A decoder layer's step with 4-bit weights: `batch` new tokens, each over `num_keys` keys."""

    heads: Heads
    hidden: int
    intermediate: int
    batch: int
    num_keys: int
    page_size: int = 64

    @property
    def title(self) -> str:
        return f"tensor-parallel layer, {self.hidden} x {self.intermediate}, {self.batch} x {self.num_keys} keys"

    def supports(self, num_ranks: int) -> bool:
        heads, units = self.heads, self.intermediate // GROUP_SIZE
        fits = num_ranks <= heads.num_kv or (num_ranks % heads.num_kv == 0 and num_ranks <= heads.num_qo)
        return fits and num_ranks <= units

    @property
    def _sizes(self) -> dict[str, tuple[int, int]]:
        width = self.heads.dim * (self.heads.num_qo + 2 * self.heads.num_kv)
        return {
            "qkv": (width, self.hidden),
            "o": (self.hidden, self.heads.num_qo * self.heads.dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    def _weights(self, device: torch.device) -> dict[str, QuantizedWeight]:
        torch.manual_seed(0)
        found = {}
        for name, (n, k) in self._sizes.items():
            codes = torch.randint(256, (n, k // 2), dtype=torch.uint8, device=device)
            scales = (torch.rand(n, k // GROUP_SIZE, device=device) / (4 * k**0.5)).to(self.heads.dtype)
            found[name] = QuantizedWeight(codes, scales, k, GROUP_SIZE)
        return found

    def _shares(self, rank: int, num_ranks: int) -> tuple[HeadShare, list[range], range]:
        """(heads, rows of the fused q, k and v, inputs of the projection down)."""
        heads = self.heads
        share = share_heads(heads.num_qo, heads.num_kv, rank, num_ranks)
        kv = share.rows(heads.dim, of="kv")
        begins = heads.num_qo * heads.dim, (heads.num_qo + heads.num_kv) * heads.dim
        rows = [share.rows(heads.dim, of="qo"), *(range(begin + kv.start, begin + kv.stop) for begin in begins)]
        return share, rows, even_share(self.intermediate, rank, num_ranks, GROUP_SIZE)

    def _step(self, share: HeadShare, project: dict[str, Callable[..., torch.Tensor]], device: torch.device) -> Call:
        """Norm, attention, norm, gated MLP; residuals go through the row-parallel products."""
        heads, dtype = self.heads, self.heads.dtype
        torch.manual_seed(1)
        x = torch.randn(self.batch, self.hidden, device=device).to(dtype)
        pages = self.num_keys // self.page_size
        k, v = (heads.keys(self.batch * pages, self.page_size, device=device) for _ in range(2))
        k, v = (cache[:, :, share.kv.start : share.kv.stop] for cache in (k, v))
        plan = plan_attention(
            block_table=torch.randperm(self.batch * pages, device=device).int().view(self.batch, pages),
            kv_lens=torch.full((self.batch,), self.num_keys, dtype=torch.int32, device=device),
            page_size=self.page_size,
            num_qo_heads=len(share.qo),
            num_kv_heads=len(share.kv),
            head_dim=heads.dim,
            dtype=dtype,
        )
        weight = torch.ones(self.hidden, dtype=dtype, device=device)
        own = len(share.qo) * heads.dim

        def step() -> torch.Tensor:
            q = project["qkv"](rms_norm(x, weight))[:, :own].unflatten(1, (-1, heads.dim))
            y = project["o"](plan.run(q, k, v).flatten(1), x)
            return project["down"](project["gate_up"](rms_norm(y, weight)), y)

        return step

    def _alone(self, rank: int, num_ranks: int, device: torch.device) -> Call:
        """One rank's step without the sums."""
        share, rows, inner = self._shares(rank, num_ranks)
        weights = self._weights(device)
        gate_up = [inner, range(self.intermediate + inner.start, self.intermediate + inner.stop)]
        parts = {
            "qkv": take_outputs(weights["qkv"], rows),
            "o": take_inputs(weights["o"], rows[0]),
            "gate_up": take_outputs(weights["gate_up"], gate_up),
            "down": take_inputs(weights["down"], inner),
        }

        def product(name: str, y: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
            activation = "silu_and_multiply" if name == "gate_up" else None
            return w4a16_matmul(y, parts[name], activation=activation, residual=residual)

        return self._step(share, {name: partial(product, name) for name in parts}, device)

    def build(self, group: dist.ProcessGroup, device: torch.device) -> tuple[Call, Callable[[torch.Tensor], float]]:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        share, rows, inner = self._shares(rank, size)
        linears = {name: QuantLinear(weight) for name, weight in self._weights(device).items()}
        project: dict[str, Callable[..., torch.Tensor]] = {
            "qkv": ColumnParallelLinear(linears["qkv"], outputs=rows, group=group),
            "o": RowParallelLinear(linears["o"], inputs=rows[0], group=group),
            "gate_up": ColumnParallelLinear(
                linears["gate_up"], parts=2, unit=GROUP_SIZE, activation="silu_and_multiply", group=group
            ),
            "down": RowParallelLinear(linears["down"], inputs=inner, group=group),
        }
        want = self._alone(0, 1, device)()
        return self._step(share, project, device), lambda out: relative_error(out, want)

    def time_share(self, num_ranks: int, device: torch.device, clock: Clock) -> tuple[float, ...]:
        dearest = max(range(num_ranks), key=lambda rank: len(self._shares(rank, num_ranks)[2]))
        return (clock(self._alone(dearest, num_ranks, device)),)

    def predict(self, times: tuple[float, ...], num_ranks: int, link: Link) -> float:
        return tensor_us(times[0], self.batch * self.hidden * self.heads.dtype.itemsize, 2, num_ranks, link)


BF16 = torch.bfloat16
LARGE = Heads(64, 8, 128, BF16)
CASES: list[Case] = [
    Decode(1 << 20, LARGE),
    Prefill(1 << 17, Heads(32, 8, 128, BF16)),
    *(Layer(LARGE, 8192, 28672, batch, 4096) for batch in (1, 16, 64)),  # sizes of a model of 70 billion weights
]
# What a dry run on CPUs computes.
SMALL = Heads(8, 2, 32, torch.float32)
DRY_CASES: list[Case] = [Decode(4096, SMALL, 16), Prefill(512, SMALL), Layer(SMALL, 256, 1024, 4, 64, 16)]

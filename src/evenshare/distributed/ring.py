"""Prefill over several ranks: every rank holds some tokens' queries, keys and values, and computes those queries' attention.

Keys go round the ring of ranks while attention runs (Ring Attention, arXiv 2310.01889): in step s a rank attends to the keys of
the rank s before it, sends them on, and receives the next ones. In the zig-zag layout a step's work is one of three pieces, with a
plain causal mask or none, of the same cost on all ranks:

    own keys             causal, since queries and keys are both in logical order
    of a rank before     all queries see the owner's first chunk whole, and nothing of its second
    of a rank behind     queries of the second chunk see both of the owner's chunks whole, those of the first nothing

With a window only the keys just before a rank's first token matter. Chunks are neighbours then, the ranks before send those keys,
and attention is that of a plain ragged batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from evenshare.attention import AttentionPlan, merge_state, plan_attention
from evenshare.device.checks import check_is_tensor
from evenshare.distributed.layout import TokenLayout, lay_out
from evenshare.distributed.ranks import Group, Ranks, find_ranks

MIN_CHUNK = 128  # tokens: a row tile of the prefill kernels; below that a cut makes tiles emptier, not fewer
Planner = Callable[..., AttentionPlan]


class RingPlan:
    """A prefill batch's attention on several ranks; made by `plan_ring_attention`."""

    def __init__(
        self,
        ranks: Ranks,
        layout: TokenLayout,
        window_left: int,
        causal: bool,
        device: torch.device | str,
        plan: Planner,
    ) -> None:
        self.ranks = ranks
        self.layout = layout
        self.num_tokens = layout.count(ranks.rank)
        self.tokens = layout.tokens(ranks.rank).to(device)
        self.positions = layout.positions(ranks.rank).to(device)
        self._halo: _Halo | None = None
        if window_left >= 0:
            self._halo = _Halo(layout, ranks, window_left, device)
            self._steps = [self._halo.plan(partial(plan, causal=True, window_left=window_left))]
        else:
            self._steps = _plan_steps(layout, ranks, causal, plan)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False) -> Any:
        """q [num_tokens, Hq, D], k [num_tokens, Hkv, D], v [num_tokens, Hkv, Dv]: this rank's tokens, in the order of `tokens`.

        Returns out [num_tokens, Hq, Dv], or (out, lse [num_tokens, Hq]). Raises `PeerError` if another rank is gone.
        """
        check_is_tensor(q=q, k=k, v=v)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.dim() != 3 or tensor.shape[0] != self.num_tokens:
                raise ValueError(
                    f"{name}: got shape {tuple(tensor.shape)}, want [{self.num_tokens}, heads, dim], the rank's tokens"
                )
        if self._halo is not None:
            k, v = self._halo.extend(k, v)
            return self._steps[0].run(q, k, v, return_lse=return_lse)
        out, lse = self._go_round(q, k, v)
        return (out, lse) if return_lse else out

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor [all tokens, ...] of the whole batch."""
        return x.index_select(0, self.tokens)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The whole batch's tensor [all tokens, ...] of every rank's rows; a collective."""
        counts = [self.layout.count(rank) for rank in range(self.ranks.size)]
        padded = x.new_zeros(max(counts), *x.shape[1:])
        padded[: len(x)] = x
        rows = self.ranks.gather(padded, "rows of a batch").unflatten(0, (self.ranks.size, -1))
        whole = x.new_empty(sum(counts), *x.shape[1:])
        for rank, count in enumerate(counts):
            whole[self.layout.tokens(rank).to(x.device)] = rows[rank, :count]
        return whole

    def _go_round(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States of all steps, merged in float32 in the order of steps."""
        held = [k.contiguous(), v.contiguous()]
        o = lse = None
        for step, plan in enumerate(self._steps):
            last = step == len(self._steps) - 1
            with self.ranks.talking("keys on their way round the ring"):
                coming, works = (held, []) if last else self._pass_on(held, step)
            if o is None or lse is None:
                o, lse = plan.run(q, *held, return_lse=True)
                o = o if last else o.float()
            else:
                o_step, lse_step = plan.run(q, *held, return_lse=True)
                merge_state(o, lse, o_step.float(), lse_step, math.e, out=o, lse_out=lse)
            with self.ranks.talking("keys on their way round the ring"):
                for work in works:
                    work.wait()
            held = coming
        assert o is not None and lse is not None
        return o.to(plan.problem.dtype), lse

    def _pass_on(self, held: list[torch.Tensor], step: int) -> tuple[list[torch.Tensor], list[dist.Work]]:
        """Begin to send what is held to the next rank and to receive what the one before holds: (what comes, what to wait for)."""
        rank, size = self.ranks.rank, self.ranks.size
        count = self.layout.count((rank - step - 1) % size)
        coming = [x.new_empty(count, *x.shape[1:]) for x in held]
        ops = []
        for sent, received in zip(held, coming, strict=True):
            for op, x, peer in ((dist.isend, sent, rank + 1), (dist.irecv, received, rank - 1)):
                if x.numel():
                    ops.append(dist.P2POp(op, x.view(torch.uint8), group=self.ranks.group, group_peer=peer % size))
        return coming, dist.batch_isend_irecv(ops) if ops else []


def _plan_steps(layout: TokenLayout, ranks: Ranks, causal: bool, plan: Planner) -> list[AttentionPlan]:
    """A plan for each step; steps of the same lengths share theirs, and its workspace."""
    rank, size = ranks.rank, ranks.size
    own = layout.lens[rank]
    plans: dict[Any, AttentionPlan] = {}
    steps = []
    for step in range(size):
        owner = (rank - step) % size
        qo_lens, kv_lens = own, layout.lens[owner].clone()
        if not causal or owner == rank:
            qo_lens, kv_lens = qo_lens.sum(1), kv_lens.sum(1)
        elif owner < rank:  # the second chunk's keys, which must be passed over, are those of a request without rows
            qo_lens = torch.stack((own.sum(1), torch.zeros_like(own[:, 0])), 1)
        else:
            kv_lens = torch.stack((torch.zeros_like(kv_lens[:, 0]), kv_lens.sum(1)), 1)
        masked = causal and owner == rank
        key = masked, *qo_lens.flatten().tolist(), *kv_lens.flatten().tolist()
        if key not in plans:
            plans[key] = plan(qo_indptr=_indptr(qo_lens), kv_indptr=_indptr(kv_lens), causal=masked)
        steps.append(plans[key])
    return steps


class _Halo:
    """The keys before a rank's own that a window reaches: who sends which of them to whom, and where they go."""

    def __init__(self, layout: TokenLayout, ranks: Ranks, window_left: int, device: torch.device | str) -> None:
        self.ranks = ranks
        begin, end = layout.begin[:, :, 0], layout.end[:, :, 0]
        wanted = (begin - window_left).clamp(min=0)  # from there on, by rank and request
        wanted = torch.where(end > begin, wanted, begin)
        rank, size = ranks.rank, ranks.size
        lens = end - begin
        starts = lens.cumsum(1) - lens  # of requests among a rank's tokens

        def overlap(source: int, target: int) -> tuple[torch.Tensor, torch.Tensor]:
            """[B], [B]: what `source` has and `target` wants before its own."""
            low = torch.maximum(begin[source], wanted[target])
            high = torch.minimum(end[source], begin[target]).maximum(low)
            return low, high

        self.send_counts: list[int] = []
        self.receive_counts: list[int] = []
        sent: list[torch.Tensor] = []
        received: list[torch.Tensor] = []  # request and position as one number, to sort by
        stride = int(end.max()) + 1 if end.numel() else 1
        for peer in range(size):
            low, high = overlap(rank, peer)
            sent.append(_ranges(starts[rank] + low - begin[rank], high - low))
            self.send_counts.append(int((high - low).sum()))
            low, high = overlap(peer, rank)
            received.append(_ranges(low + torch.arange(len(low)) * stride, high - low))
            self.receive_counts.append(int((high - low).sum()))
        own = _ranges(begin[rank] + torch.arange(len(lens[rank])) * stride, lens[rank])
        self.sent = torch.cat(sent).to(device)
        self.order = torch.cat((*received, own)).argsort().to(device)
        self.qo_lens = lens[rank]
        self.kv_lens = end[rank] - torch.minimum(wanted[rank], begin[rank])

    def plan(self, plan: Planner) -> AttentionPlan:
        return plan(qo_indptr=_indptr(self.qo_lens), kv_indptr=_indptr(self.kv_lens))

    def extend(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's keys and values with those before them, request by request."""
        keys = torch.cat((k, v), -1)
        rows = keys.index_select(0, self.sent)
        found = rows.new_empty(sum(self.receive_counts), *rows.shape[1:])
        with self.ranks.talking("keys of a window"):
            dist.all_to_all_single(
                found.view(torch.uint8),
                rows.view(torch.uint8),
                self.receive_counts,
                self.send_counts,
                group=self.ranks.group,
            )
        whole = torch.cat((found, keys)).index_select(0, self.order)
        return whole[..., : k.shape[2]], whole[..., k.shape[2] :]


def _ranges(begin: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """The numbers begin[i], begin[i] + 1, ... (lens[i] of them), for every i."""
    return torch.arange(int(lens.sum())) + (begin - (lens.cumsum(0) - lens)).repeat_interleave(lens)


def _indptr(lens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lens.flatten().cumsum(0), (1, 0)).int()


def plan_ring_attention(
    *,
    qo_indptr: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    causal: bool = True,
    window_left: int = -1,
    min_chunk: int = MIN_CHUNK,
    group: Group = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> RingPlan:
    """Attention of whole prompts whose tokens are dealt to the ranks of `group`, keys included (context parallelism for prefill).

    qo_indptr: integers [B + 1] on the host, the same on all ranks: request r has the tokens [qo_indptr[r], qo_indptr[r + 1]) of the
    whole batch. `RingPlan.tokens` says which of them this rank is to hold, `RingPlan.positions` where they are in their requests.
    causal, window_left: as in `attention`; a window wants causal.
    min_chunk: requests that would be cut into chunks of fewer tokens stay whole, on the least loaded rank.
    device: where q, k, v are; None: the current GPU, or the CPU for a group on gloo.
    options: of `plan_attention`: head_dim_v, sm_scale, logits_soft_cap, dtype, policy, backend, debug.

    Results repeat bit for bit. Raises ValueError or TypeError naming the argument.
    """
    ranks = find_ranks(group)
    check_is_tensor(qo_indptr=qo_indptr)
    if qo_indptr.device.type != "cpu" or qo_indptr.dim() != 1 or not len(qo_indptr):
        raise ValueError(
            f"qo_indptr: got shape {tuple(qo_indptr.shape)} on {qo_indptr.device}, want [B + 1] on the host"
        )
    if (qo_indptr[1:] < qo_indptr[:-1]).any() or int(qo_indptr[0]) != 0:
        raise ValueError(f"qo_indptr: got {qo_indptr.tolist()}, want 0 and then a non-decreasing sequence")
    if window_left < -1 or (window_left >= 0 and not causal):
        raise ValueError(
            f"window_left: got {window_left} with causal={causal}, want -1 (off), or 0 and more with causal=True"
        )
    if min_chunk < 1:
        raise ValueError(f"min_chunk: got {min_chunk}, want 1 or more")
    if device is None:
        device = "cpu" if dist.get_backend(ranks.group) == "gloo" else torch.device("cuda", torch.cuda.current_device())
    layout = lay_out(
        qo_indptr.long(),
        ranks.size,
        zigzag=causal and window_left < 0,
        row_cost=window_left + 1 if window_left >= 0 else int(qo_indptr[-1]),
        min_chunk=min_chunk,
    )
    plan = partial(
        plan_attention,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        device=device,
        **options,
    )
    return RingPlan(ranks, layout, window_left, causal, device, plan)

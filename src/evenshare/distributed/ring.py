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

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from evenshare.attention import AttentionPlan, merge_state, plan_attention
from evenshare.device.checks import check_is_tensor
from evenshare.distributed.exchange import KeyMove
from evenshare.distributed.halo import Halo
from evenshare.distributed.layout import TokenLayout, indptr_of, lay_out
from evenshare.distributed.placement import Placement
from evenshare.distributed.ranks import Group, Ranks, find_ranks
from evenshare.distributed.states import check_options

MIN_CHUNK = 128  # tokens: a row tile of the prefill kernels; below that a cut makes tiles emptier, not fewer
ABOUT = "keys on their way round the ring"
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
        self._halo: Halo | None = None
        if window_left >= 0:
            self._halo = halo = Halo(layout, ranks, window_left, device)
            lens = {"qo_indptr": indptr_of(halo.qo_lens), "kv_indptr": indptr_of(halo.kv_lens)}
            self._steps = [plan(causal=True, window_left=window_left, **lens)]
        else:
            self._steps = _plan_steps(layout, ranks, causal, plan)
            shared = layout.shared(ranks.rank)
            self._shared = None if shared.all() else shared.nonzero()[:, 0].to(device)
            self._counts = [int(layout.shared(rank).sum()) for rank in range(ranks.size)]

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

    def move_to(self, placement: Placement) -> KeyMove:
        """Plan how keys get from this layout to the ranks that keep them for decode: placement, with tensors on the host."""
        if placement.num_ranks != self.ranks.size:
            raise ValueError(f"placement: got one for {placement.num_ranks} ranks, want the group's {self.ranks.size}")
        return KeyMove(self.ranks, self.layout, placement, self.tokens.device)

    def _go_round(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States of all steps, merged in float32 in the order of steps."""
        own, *others = self._steps
        if not others:
            return own.run(q, k, v, return_lse=True)
        held = [x.contiguous() if self._shared is None else x[self._shared] for x in (k, v)]
        coming, works = self._pass_on(held, 0)
        o, lse = own.run(q, k, v, return_lse=True)
        o = o.float()
        for step, plan in enumerate(others, 1):
            with self.ranks.talking(ABOUT):
                for work in works:
                    work.wait()
            held = coming  # not before: what is sent must live until then
            if step < len(others):
                coming, works = self._pass_on(held, step)
            o_step, lse_step = plan.run(q, *held, return_lse=True)
            merge_state(o, lse, o_step.float(), lse_step, out=o, lse_out=lse)
        return o.to(own.problem.dtype), lse

    def _pass_on(self, held: list[torch.Tensor], step: int) -> tuple[list[torch.Tensor], list[dist.Work]]:
        """Begin to send what is held to the next rank and to receive what the one before holds: (what comes, what to wait for)."""
        rank, size = self.ranks.rank, self.ranks.size
        count = self._counts[(rank - step - 1) % size]
        coming = [x.new_empty(count, *x.shape[1:]) for x in held]
        ops = []
        for sent, received in zip(held, coming, strict=True):
            for op, x, peer in ((dist.isend, sent, rank + 1), (dist.irecv, received, rank - 1)):
                ops.append(dist.P2POp(op, x.view(torch.uint8), group=self.ranks.group, group_peer=peer % size))
        with self.ranks.talking(ABOUT):
            return coming, dist.batch_isend_irecv(ops)


def _plan_steps(layout: TokenLayout, ranks: Ranks, causal: bool, plan: Planner) -> list[AttentionPlan]:
    """A plan for each step; steps of the same lengths share theirs, and its workspace. Only keys of cut requests travel."""
    rank, size = ranks.rank, ranks.size
    own = layout.lens[rank]
    plans: dict[Any, AttentionPlan] = {}
    steps = []
    for step in range(size if layout.cut.any() else 1):
        owner = (rank - step) % size
        qo_lens, kv_lens = own, layout.lens[owner] * (layout.cut[:, None] | (owner == rank))
        if not causal or owner == rank:
            qo_lens, kv_lens = qo_lens.sum(1), kv_lens.sum(1)
        elif owner < rank:  # the second chunk's keys, which must be passed over, are those of a request without rows
            qo_lens = torch.stack((own.sum(1), torch.zeros_like(own[:, 0])), 1)
        else:
            kv_lens = torch.stack((torch.zeros_like(kv_lens[:, 0]), kv_lens.sum(1)), 1)
        masked = causal and owner == rank
        key = masked, *qo_lens.flatten().tolist(), *kv_lens.flatten().tolist()
        if key not in plans:
            plans[key] = plan(qo_indptr=indptr_of(qo_lens), kv_indptr=indptr_of(kv_lens), causal=masked)
        steps.append(plans[key])
    return steps


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
    options: of `plan_attention`: head_dim_v, sm_scale, logits_soft_cap, dtype, policy, planner, backend, debug.

    Results repeat bit for bit. Raises ValueError or TypeError naming the argument.
    """
    check_options(options)
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

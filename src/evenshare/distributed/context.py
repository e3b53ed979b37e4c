"""Context-parallel attention over pages: every rank keeps some of a request's keys, all ranks hold the same queries.

Masks depend on logical positions, and a rank's keys are not neighbours. But they are in logical order, so whatever a row sees of
them is one range of their list, found in closed form (`Placement.count`). That leaves two local attentions, both without a mask:

- keys that all rows of a request see: one request of all its rows over a prefix of the rank's pages. For decode that is everything.
- what rows see apart: the keys among a request's own new tokens, or a window's. Each row is a request of its own over a list of
  single keys (pages of one key: a view of the cache). These lists are short, a request's new tokens or a window.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from evenshare.attention import AttentionPlan, merge_state, plan_attention
from evenshare.device.checks import check_is_tensor
from evenshare.distributed.placement import Placement
from evenshare.distributed.ranks import Group, Ranks, find_ranks
from evenshare.distributed.states import OUTPUTS, check_options, combine, new_states


class ContextPlan:
    """A step's attention over keys on several ranks; made by `plan_context_attention`."""

    def __init__(
        self,
        ranks: Ranks,
        placement: Placement,
        metadata: dict[str, Any],
        max_q_len: int,
        max_q_rows: int,
        window_left: int,
        output: str,
        kv_layout: str,
        plan: Callable[..., AttentionPlan],
    ) -> None:
        self.ranks = ranks
        self.output = output
        self._placement = placement
        self._table: torch.Tensor = metadata["block_table"]
        self._kv_lens: torch.Tensor = metadata["kv_lens"]
        self._qo_indptr: torch.Tensor | None = metadata["qo_indptr"]
        self._max_q_rows = max_q_rows
        self._window_left = window_left
        self._heads_first = kv_layout == "HND"
        self._plan = plan
        self._shared: AttentionPlan | None = None
        self._rows: AttentionPlan | None = None
        self._ratio = 0  # of the cache that the rows' lists were made for; 0: they are to be made again
        # Keys that a row sees apart from others, at most.
        apart = window_left + 1 if window_left >= 0 else max(max_q_len - 1, 0)
        self._width = min(placement.max_count(apart), self._table.shape[1] * placement.page_size)
        if window_left < 0:
            self._shared_lens = self._count_shared()
            self._shared = plan(
                qo_indptr=self._qo_indptr,
                block_table=self._table,
                kv_lens=self._shared_lens,
                page_size=placement.page_size,
                kv_layout=kv_layout,
                max_q_rows=max_q_rows,
            )

    def update(self) -> None:
        """Plan again after lengths, offsets or the page table changed in place. Never syncs if they are on a GPU."""
        if self._shared is not None:
            self._shared_lens.copy_(self._count_shared())
            self._shared.update()
        self._ratio = 0

    def own_positions(self, position: torch.Tensor, request: torch.Tensor) -> torch.Tensor:
        """Where this rank is to write keys at `position` of `request` (integers [n]): positions for `append_paged_kv_cache`, -1
        for keys of other ranks, which it skips."""
        owner, local = self._placement.locate(position, request)
        return torch.where(owner == self.ranks.rank, local, -1)

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        return_lse: bool = False,
        **scales: Any,
    ) -> Any:
        """q [total_q, Hq, D], the same on all ranks; k_cache, v_cache: this rank's pages, new keys already written; scales: as in
        `AttentionPlan.run`.

        Returns out, or (out, lse): [total_q, Hq, Dv] and float32 [total_q, Hq] for output "all"; a rank's heads or tokens for
        "heads" and "tokens" (see `plan_context_attention`). A row without keys on any rank has out = 0, lse = -inf.
        Raises `PeerError` if another rank is gone.
        """
        check_is_tensor(q=q, k_cache=k_cache, v_cache=v_cache)
        rows = None
        if self._width:
            k_rows, ratio = self._single_keys("k_cache", k_cache)
            v_rows, other = self._single_keys("v_cache", v_cache)
            if ratio != other:
                raise ValueError(f"v_cache: got pages {other} keys apart, want {ratio}, as those of k_cache")
            rows = self._plan_rows(ratio)
        plan = self._shared or rows
        assert plan is not None
        sizes = q.shape[0], plan.problem.num_qo_heads, plan.problem.head_dim_v
        states = new_states(*sizes, plan.problem.dtype, q.device, self.ranks, self.output)
        if self._shared is not None:
            self._shared.run(q, k_cache, v_cache, out=states.o, lse=states.lse, **scales)
        if rows is not None:
            if self._shared is None:
                rows.run(q, k_rows, v_rows, out=states.o, lse=states.lse, **scales)
            else:
                o, lse = rows.run(q, k_rows, v_rows, return_lse=True, **scales)
                merge_state(states.o, states.lse, o, lse, out=states.o, lse_out=states.lse)
        out, lse = combine(states, self.ranks, self.output)
        return (out, lse) if return_lse else out

    def check(self) -> None:
        """Raise RuntimeError if planning or a run met impossible metadata on this rank. Syncs, unlike all else."""
        for plan in (self._shared, self._rows):
            if plan is not None:
                plan.check()

    def _count_shared(self) -> torch.Tensor:
        """int32 [B]: of this rank's keys, those before every row of their request or at the first one's own position."""
        end = self._kv_lens
        if self._qo_indptr is not None:
            qo_lens = self._qo_indptr[1:] - self._qo_indptr[:-1]
            end = end - (qo_lens - 1).clamp(min=0)
        return self._placement.count(end, self.ranks.rank).to(torch.int32)

    def _list_rows(self, ratio: int) -> dict[str, torch.Tensor]:
        """Metadata of rows as requests over pages of one key: what each sees apart from the shared keys."""
        device, page_size = self._kv_lens.device, self._placement.page_size
        row = torch.arange(self._max_q_rows, device=device)
        row_indptr = torch.arange(self._max_q_rows + 1, device=device)
        if self._qo_indptr is None:
            request, position = row, self._kv_lens.long() - 1
            first = position
        else:
            indptr = self._qo_indptr.long()
            row_indptr = row_indptr.minimum(indptr[-1])  # rows past the last request are nobody's
            request = (torch.searchsorted(indptr, row, right=True) - 1).clamp(0, max(len(self._kv_lens) - 1, 0))
            first = (self._kv_lens - (indptr[1:] - indptr[:-1]))[request]
            position = first + row - indptr[request]
        begin = first + 1 if self._window_left < 0 else position - self._window_left
        low, high = (self._placement.count(end, self.ranks.rank, request) for end in (begin, position + 1))
        index = low[:, None] + torch.arange(self._width, device=device)
        column = (index // page_size).clamp(max=self._table.shape[1] - 1)
        key = self._table[request[:, None], column].long() * ratio + index % page_size
        return {
            "qo_indptr": row_indptr.int(),
            "block_table": torch.where(index < high[:, None], key, 0).int(),
            "kv_lens": (high - low).clamp(0, self._width).int(),
        }

    def _plan_rows(self, ratio: int) -> AttentionPlan:
        """The rows' plan for a cache whose pages are `ratio` keys apart; made by the first run after an update."""
        if self._rows is None:
            self._rows_metadata = self._list_rows(ratio)
            self._rows = self._plan(**self._rows_metadata, page_size=1, max_q_rows=self._max_q_rows)
        elif self._ratio != ratio:
            for name, tensor in self._list_rows(ratio).items():
                self._rows_metadata[name].copy_(tensor)
            self._rows.update()
        self._ratio = ratio
        return self._rows

    def _single_keys(self, name: str, cache: torch.Tensor) -> tuple[torch.Tensor, int]:
        """(the cache as pages of one key [.., 1, Hkv, D], those from a page to the next): a view, whatever lies between pages."""
        pages = cache.transpose(1, 2) if self._heads_first else cache
        (count, page_size, num_heads, dim), strides = pages.shape, pages.stride()
        if page_size == 1 or count == 0:
            return pages.reshape(-1, 1, num_heads, dim), page_size
        ratio, rest = (page_size, 0) if count == 1 else divmod(strides[0], strides[1])
        if rest:
            raise ValueError(
                f"{name}: got strides {cache.stride()}, want pages whose stride is a multiple of a key's, "
                "for windows and more than one new token"
            )
        shape = ((count - 1) * ratio + page_size, 1, num_heads, dim)
        return pages.as_strided(shape, (strides[1], *strides[1:])), ratio


def plan_context_attention(
    *,
    placement: Placement,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    qo_indptr: torch.Tensor | None = None,
    window_left: int = -1,
    output: str = "all",
    kv_layout: str = "NHD",
    max_q_len: int | None = None,
    max_q_rows: int | None = None,
    group: Group = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> ContextPlan:
    """Causal attention of a batch whose keys are spread over the ranks of `group` (context parallelism), for decode and append.

    placement: who has which pages, `RoundRobin` or `PageRanges` (`deal_pages`), its tensors where kv_lens is.
    block_table: integers [B, max_pages], this rank's pages of each request in logical order; it may have no columns.
    kv_lens: integers [B], keys of each request on all ranks together, its new tokens included.
    qo_indptr: as in `plan_attention`; the same on all ranks, like kv_lens.
    window_left: keys to the left that a row sees, inclusive; -1: all.
    output: "all", every rank gets the whole result; "heads", heads rank * H / num_ranks on, as a row-sharded output projection
    wants them; "tokens", tokens rank * ceil(n / num_ranks) on, zeros past the last one.
    max_q_len, max_q_rows: query tokens of a request and of all, at most; wanted if qo_indptr is on a GPU.
    group: a process group, a device mesh of one dimension, or None, all processes.
    options: of `plan_attention`: head_dim_v, sm_scale, logits_soft_cap, dtype, kv_dtype, q_dtype, policy, planner, backend, debug.

    Every rank plans its own share in even shares for its GPU, computes (o, lse), and states are merged across ranks in the order of
    ranks, in float32: results repeat bit for bit. Raises ValueError or TypeError naming the argument.
    """
    check_options(options, ("kv_dtype", "q_dtype"))
    ranks = find_ranks(group)
    if placement.num_ranks != ranks.size:
        raise ValueError(f"placement: got one for {placement.num_ranks} ranks, want the group's {ranks.size}")
    if output not in OUTPUTS:
        raise ValueError(f"output: got {output!r}, want one of {', '.join(OUTPUTS)}")
    if output == "heads" and num_qo_heads % ranks.size:
        raise ValueError(
            f"num_qo_heads: got {num_qo_heads} for output 'heads', want a multiple of the {ranks.size} ranks"
        )
    if window_left < -1:
        raise ValueError(f"window_left: got {window_left}, want -1 (off) or a count of keys >= 0")
    check_is_tensor(block_table=block_table, kv_lens=kv_lens)
    if kv_lens.dim() != 1 or block_table.dim() != 2 or block_table.shape[0] != kv_lens.shape[0]:
        shapes = f"{tuple(block_table.shape)} and {tuple(kv_lens.shape)}"
        raise ValueError(f"block_table, kv_lens: got shapes {shapes}, want [B, max_pages] and [B]")
    if qo_indptr is None:
        max_q_len, max_q_rows = 1, kv_lens.shape[0]
    elif qo_indptr.device.type == "cpu":
        max_q_len = max_q_len or max((qo_indptr[1:] - qo_indptr[:-1]).tolist(), default=1)
        max_q_rows = max_q_rows or int(qo_indptr[-1])
    elif max_q_len is None or max_q_rows is None:
        raise ValueError("max_q_len, max_q_rows: got None, want bounds on the query tokens when qo_indptr is on a GPU")
    if block_table.shape[1] == 0:  # a rank without any page
        block_table = block_table.new_zeros(block_table.shape[0], 1)
    plan = partial(
        plan_attention,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        causal=False,
        device=kv_lens.device if device is None else device,
        **options,
    )
    metadata = {"block_table": block_table, "kv_lens": kv_lens, "qo_indptr": qo_indptr}
    return ContextPlan(ranks, placement, metadata, max_q_len, max_q_rows, window_left, output, kv_layout, plan)

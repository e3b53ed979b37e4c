"""Attention over levels of one paged cache: what many requests share is read once for all of them (FlashInfer, section 3.1.2).

Every level gives each query token some of its keys; the states (o, lse) of the levels merge. Levels that want the same tile run as
one batch, in one launch: level l of L has the rows from l * max_q_rows on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evenshare.attention.merge import merge_states
from evenshare.attention.plan import AttentionPlan, plan_attention
from evenshare.attention.problem import FP8, Problem, default_scale
from evenshare.attention.tiles import choose_tile
from evenshare.device.checks import check_is_tensor
from evenshare.device.target import Target, select_target


@dataclass(frozen=True, eq=False)
class CascadeLevel:
    """Groups of query tokens, each with a page list of its own, in either form of `plan_attention`.

    qo_indptr [G + 1]: group g has the query tokens [qo_indptr[g], qo_indptr[g + 1]), all of the batch's tokens in all; None: one
    each. block_table [G, max_pages] and kv_lens [G]; or kv_indptr [G + 1], kv_indices, last_page_len [G].
    """

    qo_indptr: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    last_page_len: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Groups."""
        if self.kv_lens is not None:
            return self.kv_lens.shape[0]
        return 0 if self.kv_indptr is None else self.kv_indptr.shape[0] - 1

    def check(self, number: int) -> None:
        """Raise unless there is a page table; its shapes are checked by the plan."""
        given = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        check_is_tensor(**{f"levels[{number}].{name}": tensor for name, tensor in given.items()})
        if "block_table" not in given and "kv_indices" not in given:
            raise ValueError(
                f"levels[{number}]: got {', '.join(given) or 'nothing'}, want block_table and kv_lens, "
                "or kv_indptr, kv_indices and last_page_len"
            )


@dataclass(frozen=True)
class _Launch:
    """Levels that run as one batch, by number, and their plan."""

    numbers: tuple[int, ...]
    plan: AttentionPlan


class CascadePlan:
    """The levels dealt to workers; made by `plan_cascade`. It owns its states and workspaces: use it on one stream at a time."""

    def __init__(
        self,
        problem: Problem,
        levels: Sequence[CascadeLevel],
        target: Target,
        max_q_rows: int,
        base: float,
        options: dict[str, Any],
    ) -> None:
        """options: arguments of `plan_attention` that all levels share."""
        self.problem, self.target, self.max_q_rows = problem, target, max_q_rows
        self._base, self._levels = base, list(levels)
        launches: dict[Any, list[int]] = {}
        for number, level in enumerate(levels):
            launches.setdefault(self._kind(number, level), []).append(number)
        self._launches = [
            _Launch(
                tuple(numbers),
                plan_attention(
                    **self._metadata(numbers), **options, causal=self._causal(numbers[-1]), base=base,
                    max_q_rows=max_q_rows * len(numbers), device=target.device, backend=target.backend,
                ),
            )
            for numbers in launches.values()
        ]  # fmt: skip
        shape = (len(levels), max_q_rows, problem.num_qo_heads)
        most = max(len(numbers) for numbers in launches.values())
        if len(levels) > 1:
            self._o = torch.empty((*shape, problem.head_dim_v), dtype=problem.dtype, device=target.device)
            self._lse = torch.empty(shape, dtype=torch.float32, device=target.device)
        if most > 1:
            self._q = torch.zeros(
                (most, *shape[1:], problem.head_dim), dtype=problem.q_dtype or problem.dtype, device=target.device
            )

    def _causal(self, number: int) -> bool:
        """Only the last level's keys are beside their queries; a lone query sees them all."""
        last = number == len(self._levels) - 1
        return self.problem.causal and last and self._levels[number].qo_indptr is not None

    def _kind(self, number: int, level: CascadeLevel) -> Any:
        """Equal for levels that can run as one batch."""
        if level.block_table is None:
            return number
        tile = choose_tile(
            self.problem, self.max_q_rows / max(level.size, 1), self.target.capability, self.target.interpreted
        )
        return tile, self._causal(number), level.block_table.device

    def _metadata(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Of one level its own; of several, one batch, in which a request without keys has the rows between two levels."""
        levels = [self._levels[number] for number in numbers]
        if len(levels) == 1:
            return dict(vars(levels[0]))
        width = max(level.block_table.shape[1] for level in levels if level.block_table is not None)
        tables, lens, rows = [], [], []
        for place, level in enumerate(levels):
            assert level.block_table is not None
            assert level.kv_lens is not None
            qo_indptr = level.qo_indptr
            if qo_indptr is None:
                qo_indptr = torch.arange(level.size + 1, device=level.kv_lens.device)
            table = torch.nn.functional.pad(level.block_table, (0, width - level.block_table.shape[1]))
            between = place < len(levels) - 1
            tables.append(torch.nn.functional.pad(table, (0, 0, 0, int(between))))
            lens.append(torch.nn.functional.pad(level.kv_lens, (0, int(between))))
            rows.append(qo_indptr + place * self.max_q_rows)
        return {"qo_indptr": torch.cat(rows), "block_table": torch.cat(tables), "kv_lens": torch.cat(lens)}

    def update(self, levels: Sequence[CascadeLevel] | None = None) -> None:
        """Plan again, for these levels or for those planned last, whose values may have changed in place.

        With metadata on the device this never syncs, and a CUDA graph can capture it. Raises ValueError if the number of levels or
        of groups, or the form of a level, is not what was planned first.
        """
        if levels is not None:
            shapes = [
                [None if t is None else t.shape for t in vars(level).values()] for level in (*levels, *self._levels)
            ]
            if shapes[: len(levels)] != shapes[len(levels) :]:
                raise ValueError(f"levels: got shapes {shapes[: len(levels)]}, want {shapes[len(levels) :]}")
            self._levels = list(levels)
        for launch in self._launches:
            launch.plan.update(**self._metadata(launch.numbers))

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        **scales: Any,
    ) -> Any:
        """Arguments (q_scale, k_scale and v_scale too) and results of `AttentionPlan.run`, for at most max_q_rows tokens."""
        check_is_tensor(q=q)
        if q.dim() != 3 or q.shape[0] > self.max_q_rows:
            raise ValueError(
                f"q: got shape {tuple(q.shape)}, want [tokens, heads, head_dim] of at most {self.max_q_rows} tokens"
            )
        if len(self._levels) == 1:
            outputs: dict[str, Any] = {"out": out, "lse": lse, "return_lse": return_lse}
            return self._launches[0].plan.run(q, k_cache, v_cache, **outputs, **scales)
        tokens = q.shape[0]
        first = 0
        for launch in self._launches:
            number = len(launch.numbers)
            states = self._o[first : first + number], self._lse[first : first + number]
            first += number
            if number == 1:
                rows, states = q, (states[0][0, :tokens], states[1][0, :tokens])
            else:
                self._q[:number, :tokens] = q
                rows, states = self._q[:number].flatten(0, 1), (states[0].flatten(0, 1), states[1].flatten(0, 1))
            launch.plan.run(rows, k_cache, v_cache, out=states[0], lse=states[1], **scales)
        o, level_lse = self._o[:, :tokens].transpose(0, 1), self._lse[:, :tokens].transpose(0, 1)
        out, merged = merge_states(o, level_lse, self._base, out=out, lse_out=lse, backend=self.target.backend)
        return (out, merged) if return_lse or lse is not None else out

    @property
    def num_launches(self) -> int:
        """Attention launches of a run, beside that which merges."""
        return len(self._launches)

    def check(self) -> None:
        """Raise RuntimeError if the planner or a kernel met impossible metadata. The only call that syncs."""
        for launch in self._launches:
            launch.plan.check()


def plan_cascade(
    levels: Sequence[CascadeLevel],
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    head_dim_v: int | None = None,
    kv_layout: str = "NHD",
    causal: bool = True,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    q_dtype: torch.dtype | None = None,
    base: float = math.e,
    max_q_rows: int | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
) -> CascadePlan:
    """Plan attention over any number of levels of one paged cache, from what most requests share to what each has alone.

    causal: the last level's keys end with the queries, bottom-right aligned; those of the others come before all of their queries.
    max_q_rows: capacity in query tokens; None: those of the last level's qo_indptr, which is then on the host, or None.
    The other arguments are those of `plan_attention`, all tokens in each level's groups in the same order.

    Raises ValueError or TypeError naming the argument, what was got and what is wanted.

    >>> shared = CascadeLevel(torch.tensor([0, 2]), torch.tensor([[0, 1]]), torch.tensor([32]))
    >>> own = CascadeLevel(None, torch.tensor([[2], [3]]), torch.tensor([5, 9]))
    >>> plan = plan_cascade([shared, own], num_qo_heads=4, num_kv_heads=2, head_dim=8, page_size=16, dtype=torch.float32)
    >>> cache = torch.randn(4, 16, 2, 8)
    >>> plan.run(torch.randn(2, 4, 8), cache, cache).shape
    torch.Size([2, 4, 8])
    """
    if not levels or not all(isinstance(level, CascadeLevel) for level in levels):
        raise TypeError(f"levels: got {levels!r:.100}, want a CascadeLevel or more in a list")
    for number, level in enumerate(levels):
        level.check(number)
    last = levels[-1]
    if max_q_rows is None:
        if last.qo_indptr is not None and last.qo_indptr.device.type != "cpu":
            raise ValueError("max_q_rows: got None, want a bound on the query tokens when qo_indptr is on a GPU")
        max_q_rows = last.size if last.qo_indptr is None else int(last.qo_indptr[-1])
    for number, level in enumerate(levels):
        indptr = level.qo_indptr
        if indptr is not None and indptr.device.type == "cpu" and indptr.numel() and int(indptr[-1]) > max_q_rows:
            raise ValueError(f"levels[{number}].qo_indptr: got {int(indptr[-1])} tokens, want at most {max_q_rows}")
    anchor = last.kv_lens if last.kv_lens is not None else last.kv_indptr
    assert anchor is not None
    target = select_target(anchor.device if device is None else device, backend)
    sizes: dict[str, Any] = {
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "page_size": page_size,
    }
    dtypes: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "q_dtype": q_dtype}
    problem = Problem(
        **sizes,
        **dtypes,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        causal=causal,
        logits_soft_cap=logits_soft_cap or 0.0,
        sm_scale=default_scale(head_dim) if sm_scale is None else sm_scale,
    )
    options = {**sizes, **dtypes, "head_dim_v": problem.head_dim_v, "kv_layout": kv_layout}
    options |= {"logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}
    return CascadePlan(problem, levels, target, max_q_rows, base, options)


def cascade_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    levels: Sequence[CascadeLevel],
    *,
    kv_layout: str = "NHD",
    causal: bool = True,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    return_lse: bool = False,
    base: float = math.e,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
) -> Any:
    """Attention of a batch whose requests share some of their keys, without a plan of one's own: see `plan_cascade`.

    q: [tokens, Hq, D]. k_cache, v_cache: as of `paged_attention`; of float8_e4m3fn beside a 16-bit q, with k_scale and v_scale.
    Returns out [tokens, Hq, Dv], or (out, lse [tokens, Hq]) if `return_lse` or `lse` is given.
    """
    for name, tensor, dims in (("q", q, 3), ("k_cache", k_cache, 4), ("v_cache", v_cache, 4)):
        check_is_tensor(**{name: tensor})
        if tensor.dim() != dims:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want {dims} dimensions")
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: got {kv_layout!r}, want 'NHD' or 'HND'")
    page_dim, head_dim = (1, 2) if kv_layout == "NHD" else (2, 1)
    plan = plan_cascade(
        levels,
        num_qo_heads=q.shape[1],
        num_kv_heads=k_cache.shape[head_dim],
        head_dim=q.shape[2],
        head_dim_v=v_cache.shape[3],
        page_size=k_cache.shape[page_dim],
        kv_layout=kv_layout,
        causal=causal,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        dtype=q.dtype,
        kv_dtype=FP8 if k_cache.dtype == FP8 else None,
        base=base,
        max_q_rows=q.shape[0],
        device=q.device,
        backend=backend,
    )
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    return plan.run(q, k_cache, v_cache, out=out, lse=lse, return_lse=return_lse, **scales)

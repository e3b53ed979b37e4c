"""What is behind the wrappers: FlashInfer's plan and run on `plan_attention`.

evenshare's plan fixes a problem and a capacity; FlashInfer's wrappers are planned for anything, and learn some of it only in run().
An `Engine` therefore holds the metadata, and keeps a few plans, by problem and rounded capacity, which it plans again for each new
batch: at plan() if the host knows how many query rows there are, else at the first run(), whose q says so. Nothing ever syncs.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch

from evenshare.attention import AttentionPlan, plan_attention
from evenshare.attention.metadata import check_host_values, make_batch
from evenshare.attention.problem import FP8
from evenshare.attention.tiles import next_power_of_2
from evenshare.attention.variants import Variant
from evenshare.compat.flashinfer._arguments import E5M2, Scale, is_one, refuse, times, warn_once
from evenshare.ops.rope import apply_rope, token_requests

MAX_PLANS = 8  # a prefill's workspace is some 20 MB
MAX_VARIANTS = 64


@dataclass(frozen=True)
class Options:
    """What a plan is made for, beside the batch."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int  # 0: ragged keys
    causal: bool
    window_left: int
    logits_soft_cap: float
    sm_scale: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    variant: Variant | None = None
    policy: str | None = None
    rope: tuple[float, float] | None = None  # (scale, theta): q and k are rotated before the product


def split_policy(fixed_split_size: int | None, disable_split_kv: bool) -> str | None:
    """The policy whose bits do not depend on the rest of the batch, if one of these asks for that."""
    if disable_split_kv:
        return "data_parallel"
    return "batch_invariant" if fixed_split_size is not None and fixed_split_size > 0 else None


class Engine:
    """One wrapper's metadata and plans, on one device."""

    def __init__(
        self, device: torch.device, kv_layout: str = "NHD", fixed_batch: int | None = None, backend: str | None = None
    ) -> None:
        self.device, self.kv_layout, self.backend = device, kv_layout, backend
        self.fixed_batch = fixed_batch  # of a CUDA graph, whose arrays must stay where they are
        self.max_rows: int | None = None  # likewise
        self.options: Options | None = None
        self._generation = 0
        self._current: tuple[Options, int, AttentionPlan] | None = None  # what run() mostly wants
        self._plans: OrderedDict[Any, tuple[AttentionPlan, int]] = OrderedDict()
        self._sinks: OrderedDict[Any, Variant] = OrderedDict()

    def plan(
        self,
        options: Options,
        num_rows: int | None,
        *,
        qo_indptr: torch.Tensor | None,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor | None = None,
        last_page_len: torch.Tensor | None = None,
    ) -> None:
        """Take a new batch. num_rows: its query rows, where the host knows them."""
        if options.rope is not None and FP8 in (options.q_dtype, options.kv_dtype):
            refuse("pos_encoding_mode", "ROPE_LLAMA", f"'NONE' beside {FP8} (apply_rope_* before appending)")
        self.check_rows(num_rows)
        kv_indptr, kv_indices, last_page_len = checked_on_host(
            qo_indptr, kv_indptr, kv_indices, last_page_len, options.page_size
        )
        metadata = {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "last_page_len": last_page_len,
        }
        batch = kv_indptr.shape[0] - 1
        moved = {name: None if t is None else t.to(self.device, non_blocking=True) for name, t in metadata.items()}
        for name, t in moved.items():
            # Until the first run() plans them, values must not change under us.
            if num_rows is None and t is not None and name != "kv_indices" and self.fixed_batch is None:
                moved[name] = t.clone()
        self._kv_bound = kv_indices.shape[0] * max(options.page_size, 1) if kv_indices is not None else None
        if kv_indices is None and kv_indptr.device.type == "cpu":
            self._kv_bound = int(kv_indptr[-1])
        self._gathered = None
        if options.rope is not None and moved["kv_indices"] is not None:
            self._gathered = moved["kv_indices"]
            moved["kv_indices"] = torch.arange(self._gathered.shape[0], dtype=torch.int32, device=self.device)
        self.options, self.metadata, self.num_rows, self.batch = options, moved, num_rows, batch
        self._generation += 1
        self._current = None
        if num_rows is not None and (options.policy != "batch_invariant" or self._kv_bound is not None):
            self._planned(options, num_rows, 0)

    def check_rows(self, num_rows: int | None) -> None:
        """Raise if a CUDA graph's arrays do not hold as many query rows."""
        if self.max_rows is not None and num_rows is not None and num_rows > self.max_rows:
            raise ValueError(
                f"qo_indptr: got {num_rows} query rows, want at most the {self.max_rows} of the first plan in CUDA graph mode"
            )

    def _planned(self, options: Options, num_rows: int, num_keys: int) -> AttentionPlan:
        """The plan of these options, planned for the current batch."""
        if (
            self._current is not None
            and options is self._current[0]
            and (self.num_rows is not None or num_rows == self._current[1])
        ):
            return self._current[2]
        max_batch, max_rows = next_power_of_2(self.batch), next_power_of_2(num_rows)
        if self.fixed_batch is not None:
            if self.max_rows is None:
                self.max_rows = num_rows
            max_batch, max_rows = self.fixed_batch, self.max_rows
        max_kv_len = 0
        if options.policy == "batch_invariant":
            max_kv_len = next_power_of_2(num_keys if self._kv_bound is None else self._kv_bound)
        key = (options, max_batch, max_rows, max_kv_len)
        plan, generation = self._plans.get(key, (None, 0))
        if plan is None:
            fp8_q = options.q_dtype == FP8
            plan = plan_attention(
                num_qo_heads=options.num_qo_heads,
                num_kv_heads=options.num_kv_heads,
                head_dim=options.head_dim,
                head_dim_v=options.head_dim_v,
                **self.metadata,
                page_size=options.page_size or None,
                kv_layout=self.kv_layout if options.page_size else "NHD",
                causal=options.causal,
                window_left=options.window_left,
                logits_soft_cap=options.logits_soft_cap,
                sm_scale=options.sm_scale,
                variant=options.variant,
                dtype=options.o_dtype if fp8_q else options.q_dtype,
                q_dtype=FP8 if fp8_q else None,
                kv_dtype=FP8 if options.kv_dtype == FP8 else None,
                base=2.0,
                max_batch=max_batch,
                max_q_rows=max_rows,
                max_kv_len=max_kv_len,
                policy=options.policy,
                device=self.device,
                backend=self.backend,
            )
            if len(self._plans) >= MAX_PLANS and self.fixed_batch is None:  # a captured graph may use any of them
                self._plans.popitem(last=False)
        elif generation != self._generation:
            plan.update(**self.metadata)
        self._plans[key] = plan, self._generation
        self._plans.move_to_end(key)
        if options is self.options:
            self._current = options, num_rows, plan
        return plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        window_left: int | None = None,
        logits_soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Any:
        """Attention of the planned batch: out, or (out, lse)."""
        options = self.options
        if options is None:
            raise RuntimeError("run: got no plan, want plan() first")
        if window_left is not None:
            options = replace(options, window_left=max(window_left, -1))
        if logits_soft_cap:
            options = replace(options, logits_soft_cap=logits_soft_cap)
        if sinks is not None:
            options = replace(options, variant=self._with_sinks(sinks, options.variant))
        if k.dtype == E5M2 or v.dtype == E5M2:
            warn_once(
                f"{E5M2} keys and values are widened before every run: want {FP8}, which the kernels read as it is"
            )
            k, v = k.to(options.q_dtype), v.to(options.q_dtype)  # exact
        if options.kv_dtype == E5M2:
            options = replace(options, kv_dtype=options.q_dtype)
        if q.dtype == FP8 and isinstance(q_scale, torch.Tensor) and q_scale.numel() not in (1, options.num_kv_heads):
            # A scale of each query head: the product with k_scale is none of each KV head.
            q, q_scale = (q.to(torch.float32) * q_scale.view(-1, 1)).to(options.o_dtype), None
            options = replace(options, q_dtype=options.o_dtype)
        scales: dict[str, Scale] = {}
        after: Scale = None  # what the output is multiplied by
        if options.kv_dtype == FP8:
            if options.q_dtype == FP8:
                scales["q_scale"] = _scale_tensor(q_scale)
            else:
                k_scale = times(q_scale, k_scale)
            scales |= {"k_scale": _scale_tensor(k_scale), "v_scale": _scale_tensor(v_scale)}
        else:
            for scale in (q_scale, k_scale):
                if isinstance(scale, torch.Tensor):
                    q = (q * scale).to(q.dtype)
                elif not is_one(scale):
                    assert scale is not None
                    options = replace(options, sm_scale=options.sm_scale * scale)
            after = None if is_one(v_scale) else v_scale
        if options.rope is not None:
            q, k, v = self._rotated(options, q, k, v)
        plan = self._planned(options, q.shape[0] if self.num_rows is None else self.num_rows, k.shape[0])
        converts = options.o_dtype != plan.problem.dtype
        if converts and out is not None and out.dtype != options.o_dtype:
            raise TypeError(f"out: got dtype {out.dtype}, want {options.o_dtype}, the o_data_type of plan()")
        result = plan.run(
            q, k, v, **scales, out=None if converts else out, lse=lse if return_lse else None, return_lse=return_lse
        )
        value, lse = result if return_lse else (result, None)
        if after is not None:
            value.mul_(after)
        if converts:
            value = value.to(options.o_dtype) if out is None else out.copy_(value)
        return (value, lse) if return_lse else value

    def _with_sinks(self, sinks: torch.Tensor, variant: Variant | None) -> Variant:
        """A variant is made once for each tensor: that traces it."""
        key = (sinks.data_ptr(), sinks.dtype, tuple(sinks.shape), variant)
        found = self._sinks.get(key)
        if found is None:
            parts = {} if variant is None else {"score_mod": variant.score_mod, "mask_mod": variant.mask_mod}
            found = self._sinks[key] = Variant(sinks=sinks, **parts)
            if len(self._sinks) > MAX_VARIANTS:
                self._sinks.popitem(last=False)
        return found

    def lengths(self, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(qo_lens, kv_lens), int32 [B] on the device."""
        kv_indptr, last, qo_indptr = (self.metadata[name] for name in ("kv_indptr", "last_page_len", "qo_indptr"))
        assert kv_indptr is not None
        entries = kv_indptr.diff()
        kv_lens = entries if last is None else torch.where(entries > 0, (entries - 1) * page_size + last, 0)
        return torch.ones_like(kv_lens) if qo_indptr is None else qo_indptr.diff(), kv_lens

    def _rotated(
        self, options: Options, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ROPE_LLAMA: q, k and v with q and k turned by their positions. Keys are copied, pages by request."""
        assert options.rope is not None
        scale, theta = options.rope
        rope = {"rope_scale": scale, "rope_theta": theta, "backend": self.backend}
        qo_lens, kv_lens = self.lengths(options.page_size)
        kv_indptr, qo_indptr = self.metadata["kv_indptr"], self.metadata["qo_indptr"]
        assert kv_indptr is not None
        if qo_indptr is None:
            qo_indptr = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device)
        if self.batch == 0:
            return q, k, v
        request, place = token_requests(qo_indptr, q.shape[0])
        at = request.clamp(min=0)
        q_positions = torch.where(request < 0, 0, place + kv_lens[at] - qo_lens[at])
        if self._gathered is not None:
            warn_once(
                "pos_encoding_mode ROPE_LLAMA copies the paged keys at every run: want apply_rope_* before appending"
            )
            if self.kv_layout == "HND":
                k, v = k.transpose(1, 2), v.transpose(1, 2)
            pages = self._gathered.clamp(0, k.shape[0] - 1)
            _, page = token_requests(kv_indptr, pages.shape[0])
            slots = torch.arange(options.page_size, dtype=torch.int32, device=self.device)
            positions = (page[:, None] * options.page_size + slots).flatten()
            k, v = k.index_select(0, pages), v.index_select(0, pages)
            flat = k.flatten(0, 1)
            q, flat = _rotate(q, flat, q_positions, positions, rope)
            k = flat.view(k.shape)
            if self.kv_layout == "HND":
                k, v = k.transpose(1, 2), v.transpose(1, 2)
            return q, k, v
        _, positions = token_requests(kv_indptr, k.shape[0])
        q, k = _rotate(q, k, q_positions, positions, rope)
        return q, k, v


def checked_on_host(
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor | None,
    last_page_len: torch.Tensor | None,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(kv_indptr, kv_indices, last_page_len) for the engine. Raises ValueError for impossible values, where the host has them."""
    if any(t is not None and t.device.type != "cpu" for t in (qo_indptr, kv_indptr, last_page_len)):
        return kv_indptr, kv_indices, last_page_len
    if not _is_plausible(qo_indptr, kv_indptr, kv_indices, last_page_len, page_size):
        if kv_indices is not None and last_page_len is not None:
            kv_indptr, kv_indices, last_page_len = _without_empty_pages(kv_indptr, kv_indices, last_page_len, page_size)
        batch = make_batch(
            qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, last_page_len=last_page_len,
            block_table=None, kv_lens=None,
        )  # fmt: skip
        check_host_values(batch, page_size)  # it says what is wrong
    return kv_indptr, kv_indices, last_page_len


def _is_plausible(
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor | None,
    last_page_len: torch.Tensor | None,
    page_size: int,
) -> bool:
    """Whether host metadata is possible. NumPy takes 10 us for 128 requests where torch takes 70, and every step plans."""
    counts = []
    for indptr in (kv_indptr, qo_indptr):
        if indptr is not None:
            values = indptr.numpy()
            count = values[1:] - values[:-1]
            if len(values) == 0 or values[0] < 0 or (len(count) and count.min() < 0):
                return False
            counts.append(count)
    if len(counts) == 2 and len(counts[0]) != len(counts[1]):
        return False
    if kv_indices is None or last_page_len is None:
        return True
    last = last_page_len.numpy()
    if last.shape != counts[0].shape or kv_indptr.numpy()[-1] > kv_indices.shape[0]:
        return False
    return bool((((last >= 1) & (last <= page_size)) | (counts[0] == 0)).all())


def _without_empty_pages(
    kv_indptr: torch.Tensor, kv_indices: torch.Tensor, last_page_len: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A last page of no key, which FlashInfer's arithmetic allows, is taken off, where the host knows of it.

    Where the device alone knows, such a request is taken as empty.
    """
    entries = kv_indptr.diff()
    if last_page_len.shape != entries.shape:
        return kv_indptr, kv_indices, last_page_len  # an error that others name
    dropped = (entries > 0) & (last_page_len == 0)
    if not bool(dropped.any()):
        return kv_indptr, kv_indices, last_page_len
    kept = torch.ones(int(kv_indptr[-1]), dtype=torch.bool)
    kept[(kv_indptr[1:].long() - 1)[dropped]] = False
    kept[: int(kv_indptr[0])] = False
    indptr = torch.zeros_like(kv_indptr)
    torch.cumsum(entries - dropped.int(), 0, dtype=torch.int32, out=indptr[1:])
    indices = kv_indices.index_select(0, kept.nonzero().flatten().to(kv_indices.device, non_blocking=True))
    return indptr, indices, torch.where(dropped, page_size, last_page_len)


def _rotate(
    q: torch.Tensor, k: torch.Tensor, q_positions: torch.Tensor, k_positions: torch.Tensor, rope: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    rotated_q, _ = apply_rope(q, q[:, :0], q_positions, **rope)
    rotated_k, _ = apply_rope(k, k[:, :0], k_positions, **rope)
    return rotated_q, rotated_k


def _scale_tensor(scale: Scale) -> Scale:
    """float32, and of one dimension: FlashInfer's scales may be [1, 1, ...]."""
    if not isinstance(scale, torch.Tensor):
        return scale
    return scale.to(torch.float32).flatten() if scale.dim() > 1 or scale.dtype != torch.float32 else scale

"""A batch dealt to workers: what all plans of attention over ragged and paged keys share."""

from __future__ import annotations

import torch

from evenshare.attention.executors import Capacity, DealtTiles, HostLengths
from evenshare.attention.metadata import Batch, check_host_values, make_batch, move, request_bounds
from evenshare.attention.problem import Problem, lse_scale
from evenshare.device.target import Target, select_target
from evenshare.schedule.plan import Status
from evenshare.schedule.policies import Policy

STATUS_TEXTS = {
    Status.SEGMENTS_OVERFLOW: "more segments than the plan's capacity: nothing was computed",
    Status.TILES_OVERFLOW: "more query rows than the plan's max_q_rows: rows of the last requests were not computed",
    Status.BAD_LENGTHS: "an indptr that decreases or an impossible length: those requests were taken as empty",
    Status.BAD_INDEX: "a page or key index outside the cache: the rows that needed it are zero",
}


class BatchPlan:
    """Metadata, and the executor that deals the batch. A subclass runs it."""

    _executor: HostLengths | DealtTiles

    def __init__(
        self,
        problem: Problem,
        batch: Batch,
        capacity: Capacity,
        target: Target,
        executor: HostLengths | DealtTiles,
        *,
        base: float,
        debug: bool = False,
        metadata: dict[str, torch.Tensor | None] | None = None,
    ) -> None:
        # The caller's own tensors: `batch` may hold int32 copies of them, which do not follow changes in place.
        self._metadata = metadata or {}
        self.problem = problem
        self.capacity = capacity
        self.target = target
        self.base = base
        self.debug = debug
        self._lse_scale = lse_scale(base)
        self._executor = executor
        self._plan(batch)

    def update(
        self,
        *,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        last_page_len: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
    ) -> None:
        """Plan again from the tensors given; those left out are the ones planned last, whose values may have changed in place.

        With device metadata this only launches kernels: no sync, and a CUDA graph can capture it.
        Raises ValueError if the batch exceeds the capacity or the form changes, or if host metadata is impossible.
        """
        old = self._batch
        given = {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "last_page_len": last_page_len,
            "block_table": block_table,
            "kv_lens": kv_lens,
        }
        metadata = self._metadata | {name: tensor for name, tensor in given.items() if tensor is not None}
        batch = make_batch(**metadata)
        if batch.form != old.form:
            raise ValueError(f"metadata: got the {batch.form} form, want {old.form} as planned first")
        if batch.device != old.device:
            raise ValueError(f"metadata: got device {batch.device}, want {old.device} as planned first")
        if batch.size > self.capacity.max_batch:
            raise ValueError(
                f"batch: got {batch.size} requests, want at most the plan's max_batch {self.capacity.max_batch}"
            )
        self._plan(batch)
        self._metadata = metadata

    def _plan(self, batch: Batch) -> None:
        on_host = batch.device.type == "cpu"
        if batch.kv_indices is not None and batch.kv_indices.device not in (batch.device, self.target.device):
            raise ValueError(
                f"kv_indices or block_table: got device {batch.kv_indices.device}, want {self.target.device} or that of the lengths"
            )
        if on_host or self.debug:
            check_host_values(move(batch, "cpu"), self.problem.page_size)
        self._executor.plan(batch)
        # Query and key tokens that run() needs at least, where the host knows them; 0: the kernels clamp instead.
        num_q_tokens = num_kv_tokens = 0
        if on_host and batch.form != "dense":
            num_q_tokens = batch.size if batch.qo_indptr is None else int(batch.qo_indptr[-1])
            if batch.form == "ragged" and batch.kv_indptr is not None:
                num_kv_tokens = int(batch.kv_indptr[-1])
        self._extents = (num_q_tokens, num_kv_tokens, batch.table_width, batch.num_indices)
        self._batch = batch

    @property
    def status(self) -> torch.Tensor:
        """int32 [1] on the device: bits of `schedule.plan.Status` that planning and the runs since then have set."""
        words = self._executor.status_words
        if not words:
            return torch.zeros(1, dtype=torch.int32)
        return words[0] if len(words) == 1 else words[0] | words[1]

    def check(self) -> None:
        """Raise RuntimeError if the planner or a kernel met impossible metadata. The only call that syncs."""
        bits = int(self.status.item())
        found = [text for bit, text in STATUS_TEXTS.items() if bits & bit]
        if found:
            raise RuntimeError("attention plan: " + "; ".join(found))


def planner_of(batch: Batch, planner: str | None) -> str:
    """Where the batch is planned: None is where its metadata is. Raises ValueError for host planning of a batch on a GPU."""
    if planner not in (None, "host", "device"):
        raise ValueError(f"planner: got {planner!r}, want 'host', 'device' or None")
    on_host = batch.device.type == "cpu"
    if planner == "host" and not on_host:
        raise ValueError("planner: got 'host' for metadata on a GPU, want 'device' or None (host planning would sync)")
    return planner or ("host" if on_host else "device")


def choose_target(batch: Batch, device: torch.device | str | None, backend: str | None, policy: str | None) -> Target:
    """Where tensors are: on `device`, or beside the metadata. Raises ValueError, also for an unknown policy."""
    if policy is not None:
        Policy(policy)  # an unknown name is refused here, whichever backend runs
    target = select_target(batch.device if device is None else device, backend)
    if batch.device.type != "cpu" and batch.device != target.device:
        raise ValueError(
            f"metadata: got device {batch.device}, want {target.device}" + " or cpu" * (target.device.type != "cpu")
        )
    return target


def choose_capacity(
    batch: Batch,
    page_size: int,
    policy: str | None,
    max_batch: int | None,
    max_q_rows: int | None,
    max_kv_len: int | None,
) -> Capacity:
    """The bounds given, and those of this batch in place of None. Host metadata is checked. Raises ValueError."""
    on_host = batch.device.type == "cpu"
    if on_host:
        check_host_values(batch, page_size)
    if max_q_rows is None:
        if batch.qo_indptr is None:
            max_q_rows = max(batch.size, max_batch or 0)
        elif on_host:
            max_q_rows = int(batch.qo_indptr[-1])
        else:
            raise ValueError("max_q_rows: got None, want a bound on the query tokens when qo_indptr is on a GPU")
    if max_kv_len is None:
        if on_host:
            kv_lens = request_bounds(batch, page_size)[3]
            max_kv_len = int(kv_lens.max()) if batch.size else 0
        elif policy == "batch_invariant":
            raise ValueError("max_kv_len: got None, want a bound on the keys of a request for policy 'batch_invariant'")
        else:
            max_kv_len = 0
    capacity = Capacity(batch.size if max_batch is None else max_batch, max_q_rows, max_kv_len)
    if capacity.max_batch < batch.size:
        raise ValueError(f"max_batch: got {max_batch}, want at least the {batch.size} requests of this batch")
    return capacity

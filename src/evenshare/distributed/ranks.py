"""The ranks that share a piece of work, and what is said when one of them is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renames them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Group = dist.ProcessGroup | DeviceMesh | None


class PeerError(RuntimeError):
    """A collective failed: a peer died, or did not answer within the group's timeout. The group is of no more use."""


@dataclass(frozen=True)
class Ranks:
    """A process group, and this process's place in it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @contextmanager
    def talking(self, about: str) -> Iterator[None]:
        """Raise what a collective inside raises as a `PeerError` that says what failed, and where."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"{about}: rank {self.rank} of {self.size} ({dist.get_backend(self.group)}) lost a peer, or waited longer than the "
                f"process group's timeout: {error}"
            ) from error

    def gather(self, tensor: torch.Tensor, about: str) -> torch.Tensor:
        """[n, ...] of every rank, contiguous -> [num_ranks * n, ...], in the order of ranks."""
        found = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        with self.talking(about):
            if found.numel():
                _all_gather(found, tensor, group=self.group)
        return found

    def exchange(self, tensor: torch.Tensor, about: str) -> torch.Tensor:
        """Contiguous [num_ranks * n, ...], n rows for every rank -> as many, n of every rank, in the order of ranks."""
        found = torch.empty_like(tensor)
        with self.talking(about):
            if found.numel():
                dist.all_to_all_single(found, tensor, group=self.group)
        return found


def find_ranks(group: Group) -> Ranks:
    """group: a process group, a device mesh of one dimension, or None, all processes.

    Raises RuntimeError if torch.distributed is not initialised, ValueError for a mesh of more dimensions or a group without
    this process.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or "its dimensions"
            raise ValueError(f"group: got a device mesh of {group.ndim} dimensions, want one of {names}: mesh[name]")
        group = group.get_group()
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "group: torch.distributed is not initialised, want torchrun and dist.init_process_group before"
            )
        group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: got a process group without this process, want one that it is a member of")
    return Ranks(group, rank, dist.get_world_size(group))

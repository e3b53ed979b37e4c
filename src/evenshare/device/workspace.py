"""Scratch memory for partial results and the counters of the merge.

Two launches that may overlap must not share scratch: a workspace belongs to one plan, or to one (device, stream);
a CUDA graph under capture gets a workspace of its own, owned by the graph's memory pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Workspace:
    partials: torch.Tensor  # float32 [num_elements], never initialised
    counters: torch.Tensor  # int32 [num_counters], zero between launches: the last arriver resets its own


def new_workspace(num_elements: int, num_counters: int, device: torch.device) -> Workspace:
    """Allocate scratch for `num_elements` fp32 values and `num_counters` counters."""
    partials = torch.empty(max(num_elements, 1), dtype=torch.float32, device=device)
    counters = torch.zeros(max(num_counters, 1), dtype=torch.int32, device=device)
    return Workspace(partials, counters)


_shared: dict[tuple[torch.device, int], Workspace] = {}


def stream_workspace(num_elements: int, num_counters: int, device: torch.device) -> Workspace:
    """The workspace of the current stream, grown when needed: for calls that have no plan.

    Launches on one stream run one after the other, so they share. Growing drops the old memory to torch's
    stream-ordered allocator, which keeps it valid for the launches already queued on this stream.
    """
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return new_workspace(num_elements, num_counters, device)
        stream = torch.cuda.current_stream(device).cuda_stream
    else:
        stream = 0
    key = (device, stream)
    found = _shared.get(key)
    if found is None or found.partials.numel() < num_elements or found.counters.numel() < num_counters:
        old_elements, old_counters = (found.partials.numel(), found.counters.numel()) if found else (0, 0)
        found = new_workspace(max(num_elements, old_elements), max(num_counters, old_counters), device)
        _shared[key] = found
    return found

"""Scratch memory: shared by the calls of a stream, grown when needed, counters zero."""

from __future__ import annotations

import pytest
import torch

from evenshare.device.workspace import new_workspace, stream_workspace


def test_sizes_and_dtypes(device: torch.device) -> None:
    workspace = new_workspace(10, 3, device)
    assert workspace.partials.shape == (10,)
    assert workspace.partials.dtype == torch.float32
    assert workspace.counters.tolist() == [0, 0, 0]
    assert workspace.counters.dtype == torch.int32


def test_empty_needs_give_valid_pointers(device: torch.device) -> None:
    workspace = new_workspace(0, 0, device)
    assert workspace.partials.data_ptr() != 0
    assert workspace.counters.data_ptr() != 0


def test_a_stream_shares_until_more_is_needed(device: torch.device) -> None:
    first = stream_workspace(1 << 20, 5000, device)
    assert stream_workspace(1, 1, device) is first
    more_partials = stream_workspace(first.partials.numel() + 1, 1, device)
    assert more_partials is not first
    assert more_partials.counters.numel() == first.counters.numel()
    more_counters = stream_workspace(1, first.counters.numel() + 1, device)
    assert more_counters.partials.numel() == more_partials.partials.numel()
    assert not more_counters.counters.any()


@pytest.mark.gpu
def test_streams_do_not_share() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    here = stream_workspace(1, 1, device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        there = stream_workspace(1, 1, device)
    assert here.partials.data_ptr() != there.partials.data_ptr()
    assert here.counters.data_ptr() != there.counters.data_ptr()

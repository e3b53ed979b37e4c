"""The Hopper kernels in `tests.emulator`, behind the public functions."""

from __future__ import annotations

import itertools
import zlib

import pytest
import torch

from evenshare.attention import executors, tiles
from evenshare.attention.kernels import hopper_decode, hopper_decode_fp8, hopper_prefill
from tests.attention.helpers import Place
from tests.emulator import Emulated


def emulate_hopper(monkeypatch: pytest.MonkeyPatch, name: str) -> Place:
    """CPU tensors that run as on a Hopper GPU of four SMs; `name` seeds the order of what happens at once."""
    monkeypatch.setattr(Emulated, "seeds", itertools.count(zlib.crc32(name.encode())))
    monkeypatch.setattr(executors, "choose_tile", lambda problem, mean, *_: tiles.choose_tile(problem, mean, (9, 0)))
    for module, kernel in ((hopper_prefill, "prefill"), (hopper_decode, "decode"), (hopper_decode_fp8, "decode")):
        monkeypatch.setattr(module, kernel, Emulated(getattr(module, kernel)))
    return Place(torch.device("cpu"), "triton", (torch.float16, torch.bfloat16))

"""What is no tensor, no weight or no number is named before anything else happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import evenshare

Q, CACHE = torch.randn(3, 4, 8), torch.randn(5, 4, 2, 8)
TABLE, LENS = torch.zeros(3, 2, dtype=torch.int32), torch.tensor([5, 3, 0], dtype=torch.int32)
WEIGHT = evenshare.quantize(torch.randn(16, 64), group_size=32)
INDEX = torch.zeros(3, dtype=torch.int32)


def paged(**changed: Any) -> Any:
    arguments = {"q": Q, "k_cache": CACHE, "v_cache": CACHE, "block_table": TABLE, "kv_lens": LENS} | changed
    return evenshare.paged_attention(**arguments)


def append(**changed: Any) -> Any:
    rows = torch.randn(3, 2, 8)
    arguments = {
        "k": rows,
        "v": rows,
        "batch_indices": INDEX,
        "positions": INDEX,
        "k_cache": CACHE,
        "v_cache": CACHE,
    } | changed
    return evenshare.append_paged_kv_cache(**arguments, block_table=TABLE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paged(q=[1]), "q: got list, want a tensor"),
        (lambda: paged(q=Q.numpy()), "q: got ndarray, want a tensor"),
        (lambda: paged(kv_lens=[1]), "kv_lens: got list"),
        (lambda: paged(out="x"), "out: got str, want a tensor"),
        (lambda: paged(window_left=1.5), "window_left: got 1.5, want an int"),
        (lambda: paged(window_left=None), "window_left: got None, want an int"),
        (lambda: paged(sm_scale="a"), "sm_scale: got 'a', want a number or None"),
        (lambda: paged(logits_soft_cap="a"), "logits_soft_cap: got 'a', want a number or None"),
        (lambda: evenshare.attention(Q[None], 3, Q[None]), "k: got int, want a tensor"),
        (lambda: evenshare.merge_state(Q, Q[..., 0], Q, [1]), "lse_b: got list, want a tensor"),
        (lambda: append(v=[1]), "v: got list, want a tensor"),
        (lambda: append(k=None), "k: got NoneType, want a tensor"),
        (lambda: append(positions=np.zeros(3)), "positions: got ndarray, want a tensor"),
        (lambda: evenshare.matmul([1], Q[0]), "a: got list, want a tensor"),
        (lambda: evenshare.matmul(Q[0], Q[0].T, bias=1.0), "bias: got float, want a tensor"),
        (lambda: evenshare.w4a16_matmul([1], WEIGHT), "x: got list, want a tensor"),
        (lambda: evenshare.w4a16_matmul(torch.randn(2, 64), Q), "weight: got Tensor, want a QuantizedWeight"),
    ],
)
def test_the_argument_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()

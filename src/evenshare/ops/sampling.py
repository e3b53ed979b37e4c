"""Sampling of tokens: softmax with a temperature, top-k, top-p and min-p filters; nothing is sorted."""

from __future__ import annotations

import torch

from evenshare.device.target import select_target
from evenshare.ops import sampling_reference as reference
from evenshare.ops.rows import check_like
from evenshare.ops.sampling_arguments import (
    Setting,
    as_rows,
    check_indices,
    check_rows,
    check_setting,
    random_state,
)

FILTER_ORDERS = ("joint", "top_k_first")


def softmax(
    logits: torch.Tensor,
    temperature: Setting = None,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """softmax(logits / temperature) of each row.

    logits: [rows, vocab], float32, float16 or bfloat16, any strides. temperature: a number, or float32 [rows]; 0 is greedy: it
    counts as 1e-6. out: float32 [rows, vocab], any strides; None: a new one.

    Returns out, computed in float32; infinite logits share the row, which is NaN if all are -inf. Raises ValueError or TypeError
    naming the argument, before any write.

    >>> softmax(torch.tensor([[0.0, 1.0]]), 0.5)
    tensor([[0.1192, 0.8808]])
    """
    check_rows("logits", logits)
    temperature = check_setting("temperature", temperature, logits, logits.shape[0])
    out = _output(out, "logits", logits, torch.float32)
    target = select_target(logits.device, backend)
    if out.numel() == 0:
        return out
    if target.backend == "cpu":
        out.copy_(reference.softmax(logits, as_rows(temperature, logits.device, 1.0)))
    else:
        from evenshare.ops import sampling_launch

        sampling_launch.softmax(logits, temperature, out)
    return out


def sample_from_probs(
    probs: torch.Tensor,
    *,
    top_k: Setting = None,
    top_p: Setting = None,
    min_p: Setting = None,
    filter_order: str = "joint",
    indices: torch.Tensor | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    return_valid: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A token of each row, drawn by the probabilities that the filters keep.

    probs: [rows, vocab], float32, float16 or bfloat16, any strides; they need not add up to 1, and what is negative counts as 0.
    top_k: keeps the tokens that fewer than top_k exceed, so all that are equal to the k-th; int, or int32 or int64 [rows].
    top_p: keeps those that less than top_p of the row's mass exceeds; min_p: those of min_p times the largest probability or more;
        numbers in [0, 1], or float32 [rows]. The likeliest token is always kept; values on the device are not checked.
    filter_order: "joint", each filter judges the whole row; "top_k_first": top_p is of the mass that top_k keeps.
    indices: int32 or int64 [n], the row that each output samples; None: output i samples row i.
    seed, offset: int, or int64 tensors of one element on the device (which a CUDA graph may replay with new values). Equal ones
        give equal tokens, on every backend but for rounding. Without a seed both are drawn from `generator`, or torch's own.
    return_valid: also return bool [n].

    Returns int32 [n], or of the dtype of indices. A row that has NaN, or nothing to draw, gives token 0 and is not valid, nor is an
    index of no row on a GPU. Never syncs. Raises ValueError or TypeError naming the argument, before any work.

    Random numbers race: the token of the largest p / E, E exponential by Philox, wins among those kept (arXiv 1611.01144).

    >>> sample_from_probs(torch.tensor([[0.1, 0.0, 0.9], [0.0, 1.0, 0.0]]), top_k=1, seed=0)
    tensor([2, 1], dtype=torch.int32)
    """
    check_rows("probs", probs)
    settings = (None, top_k, top_p, min_p)
    return _sample("probs", probs, settings, filter_order, indices, seed, offset, generator, return_valid, backend)


def sample_from_logits(
    logits: torch.Tensor,
    temperature: Setting = None,
    *,
    top_k: Setting = None,
    top_p: Setting = None,
    min_p: Setting = None,
    filter_order: str = "joint",
    indices: torch.Tensor | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    return_valid: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`sample_from_probs` of softmax(logits / temperature), which is not written anywhere.

    logits: [rows, vocab], float32, float16 or bfloat16, any strides; -inf is never drawn. temperature: as for `softmax`, of the
    outputs: a number, or float32 [n].

    >>> sample_from_logits(torch.tensor([[1.0, 9.0, 2.0]]), 0.0, seed=0)
    tensor([1], dtype=torch.int32)
    """
    check_rows("logits", logits)
    settings = (temperature, top_k, top_p, min_p)
    return _sample("logits", logits, settings, filter_order, indices, seed, offset, generator, return_valid, backend)


def _sample(
    name: str,
    x: torch.Tensor,
    settings: tuple[Setting, Setting, Setting, Setting],
    filter_order: str,
    indices: torch.Tensor | None,
    seed: int | torch.Tensor | None,
    offset: int | torch.Tensor | None,
    generator: torch.Generator | None,
    return_valid: bool,
    backend: str | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if filter_order not in FILTER_ORDERS:
        raise ValueError(f"filter_order: got {filter_order!r}, want one of {', '.join(FILTER_ORDERS)}")
    check_indices(indices, name, x)
    n = x.shape[0] if indices is None else indices.shape[0]
    temperature, top_k, top_p, min_p = (
        check_setting(of, setting, x, n)
        for of, setting in zip(("temperature", "top_k", "top_p", "min_p"), settings, strict=True)
    )
    if x.shape[1] == 0 and n > 0:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, want one token or more")
    target = select_target(x.device, backend)
    key, counter = random_state(seed, offset, generator, x.device)
    out = torch.empty(n, dtype=torch.int32 if indices is None else indices.dtype, device=x.device)
    valid = torch.empty(n, dtype=torch.bool, device=x.device) if return_valid else None
    from_logits = name == "logits"
    top_k_first = filter_order == "top_k_first"
    if n == 0:
        pass
    elif target.backend == "cpu":
        rows = x if indices is None else x[indices.long()]
        if from_logits:
            rows = reference.scaled(rows, as_rows(temperature, x.device, 1.0))
        k, p, least = (None if f is None else as_rows(f, x.device, 0.0) for f in (top_k, top_p, min_p))
        tokens, drawn = reference.sample(rows, from_logits, k, p, least, top_k_first, key, counter)
        out.copy_(tokens)
        if valid is not None:
            valid.copy_(drawn)
    else:
        from evenshare.ops import sampling_launch

        sampling_launch.sample(
            x, out, valid, indices, temperature, top_k, top_p, min_p, top_k_first, from_logits, key, counter
        )
    return out if valid is None else (out, valid)


def renormalize_probs(
    probs: torch.Tensor,
    *,
    top_k: Setting = None,
    top_p: Setting = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The probabilities that top_k, and of these top_p, keeps, divided by their sum; the others become 0.

    probs, top_k, top_p: as for `sample_from_probs`. out: of probs' dtype, any strides, and may be probs.

    Returns out, computed in float32 and rounded once. A row of zeros stays one, a row with NaN becomes NaN where anything is kept.
    Raises ValueError or TypeError naming the argument, before any write.

    >>> renormalize_probs(torch.tensor([[0.5, 0.25, 0.125, 0.125]]), top_k=2)
    tensor([[0.6667, 0.3333, 0.0000, 0.0000]])
    """
    check_rows("probs", probs)
    return _keep("probs", probs, top_k, top_p, out, backend)


def mask_logits(
    logits: torch.Tensor, top_k: Setting, *, out: torch.Tensor | None = None, backend: str | None = None
) -> torch.Tensor:
    """The logits that fewer than top_k exceed, as they are; the others become -inf. As `renormalize_probs` otherwise.

    >>> mask_logits(torch.tensor([[1.0, 3.0, 2.0]]), 2)
    tensor([[-inf, 3., 2.]])
    """
    check_rows("logits", logits)
    return _keep("logits", logits, top_k, None, out, backend)


def _keep(
    name: str, x: torch.Tensor, top_k: Setting, top_p: Setting, out: torch.Tensor | None, backend: str | None
) -> torch.Tensor:
    top_k, top_p = check_setting("top_k", top_k, x, x.shape[0]), check_setting("top_p", top_p, x, x.shape[0])
    out = _output(out, name, x, x.dtype)
    target = select_target(x.device, backend)
    if out.numel() == 0:
        return out
    if target.backend == "cpu":
        k, p = (None if f is None else as_rows(f, x.device, 0.0) for f in (top_k, top_p))
        out.copy_(reference.renormalize(x, k, p) if name == "probs" else reference.mask(x, k))
    else:
        from evenshare.ops import sampling_launch

        sampling_launch.keep(x, top_k, top_p, name == "logits", out)
    return out


def _output(out: torch.Tensor | None, name: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if out is None:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    check_like("out", out, name, x, x.shape, (dtype,))
    return out

"""Speculative sampling: which draft tokens a target's distribution takes, and the token behind them."""

from __future__ import annotations

import torch

from evenshare.device.target import select_target
from evenshare.ops import sampling_reference as reference
from evenshare.ops.rows import check_float, check_like
from evenshare.ops.sampling_arguments import INDEX_DTYPES, random_state


def speculative_sample(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    *,
    num_accepted: torch.Tensor | None = None,
    num_emitted: torch.Tensor | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Judge a chain of n draft tokens per row, so that what is emitted follows the target's distribution (arXiv 2211.17192).

    draft_probs: [rows, n, vocab]; target_probs: [rows, n + 1, vocab], float32, float16 or bfloat16, any strides. draft_token_ids:
    int32 or int64 [rows, n]; an id outside the vocabulary is refused. num_accepted, num_emitted: int32 [rows], added to in place.

    A draft is accepted if u * draft < target, u uniform; those before the first one that is not are emitted, then one token of
    max(target - draft, 0) there, or of the target behind the last draft.

    Returns (tokens int32 [rows, n + 1], -1 behind the last one; num_accepted: drafts that pass, each for itself; num_emitted:
    drafts emitted). seed, offset, generator: as for `sample_from_probs`. Raises ValueError or TypeError naming the argument.

    >>> certain = torch.eye(4)[None]
    >>> speculative_sample(certain[:, :2], torch.tensor([[0, 1]]), certain[:, [0, 3, 2]])[0]
    tensor([[ 0,  3, -1]], dtype=torch.int32)
    """
    check_float("draft_probs", draft_probs)
    if draft_probs.dim() != 3 or draft_probs.shape[2] == 0:
        raise ValueError(f"draft_probs: got shape {tuple(draft_probs.shape)}, want [rows, n, vocab]")
    rows, n, width = draft_probs.shape
    check_like("target_probs", target_probs, "draft_probs", draft_probs, (rows, n + 1, width))
    check_like("draft_token_ids", draft_token_ids, "draft_probs", draft_probs, (rows, n), INDEX_DTYPES)
    num_accepted = _counts("num_accepted", num_accepted, draft_probs)
    num_emitted = _counts("num_emitted", num_emitted, draft_probs)
    target = select_target(draft_probs.device, backend)
    key, counter = random_state(seed, offset, generator, draft_probs.device)
    out = torch.empty(rows, n + 1, dtype=torch.int32, device=draft_probs.device)
    if rows == 0:
        pass
    elif target.backend == "cpu":
        tokens, accepted, emitted = reference.verify_chain(draft_probs, draft_token_ids, target_probs, key, counter)
        out.copy_(tokens)
        num_accepted += accepted
        num_emitted += emitted
    else:
        from evenshare.ops import sampling_launch

        sampling_launch.verify_chain(
            draft_probs, draft_token_ids, target_probs, out, num_accepted, num_emitted, key, counter
        )
    return out, num_accepted, num_emitted


def _counts(name: str, given: torch.Tensor | None, draft_probs: torch.Tensor) -> torch.Tensor:
    if given is None:
        return torch.zeros(draft_probs.shape[0], dtype=torch.int32, device=draft_probs.device)
    check_like(name, given, "draft_probs", draft_probs, draft_probs.shape[:1], (torch.int32,))
    return given

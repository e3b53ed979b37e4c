"""FlashInfer's sampling."""

from __future__ import annotations

import torch

from evenshare import ops

Setting = torch.Tensor | float
Number = int | torch.Tensor | None
Samples = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def softmax(logits: torch.Tensor, temperature: Setting | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """softmax(logits / temperature), float32; temperature: a number, or [batch]."""
    return ops.softmax(logits, _float(temperature))


def sampling_from_logits(
    logits: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Number = None,
    offset: Number = None,
    return_valid: bool = False,
) -> Samples:
    """A token by softmax(logits); see `evenshare.ops.sample_from_logits`. Always deterministic. check_nan waits for the device."""
    _check_nan("logits", logits, check_nan)
    return ops.sample_from_logits(
        logits, indices=indices, generator=generator, seed=seed, offset=offset, return_valid=return_valid
    )


def sampling_from_probs(
    probs: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Number = None,
    offset: Number = None,
    return_valid: bool = False,
) -> Samples:
    """A token by probs; see `evenshare.ops.sample_from_probs`."""
    return _sample(probs, indices, generator, check_nan, seed, offset, return_valid)


def top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_p: Setting,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Number = None,
    offset: Number = None,
    return_valid: bool = False,
) -> Samples:
    """A token of those that less than top_p of the mass exceeds."""
    top_p = _by_row(top_p, probs, indices)
    return _sample(probs, indices, generator, check_nan, seed, offset, return_valid, top_p=top_p)


def top_k_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Number = None,
    offset: Number = None,
    return_valid: bool = False,
) -> Samples:
    """A token of those that fewer than top_k exceed."""
    return _sample(probs, indices, generator, check_nan, seed, offset, return_valid, top_k=top_k)


def min_p_sampling_from_probs(
    probs: torch.Tensor,
    min_p: Setting,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Number = None,
    offset: Number = None,
    return_valid: bool = False,
) -> Samples:
    """A token of those that have min_p times the largest probability or more."""
    return _sample(probs, indices, generator, check_nan, seed, offset, return_valid, min_p=min_p)


def top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: Setting,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Number = None,
    offset: Number = None,
    return_valid: bool = False,
) -> Samples:
    """A token that both filters keep: "joint", both of probs; "top_k_first", top_p of what top_k keeps."""
    order = _order(filter_apply_order)
    k, p = _by_row(top_k, probs, indices), _by_row(top_p, probs, indices)
    return _sample(
        probs, indices, generator, check_nan, seed, offset, return_valid, top_k=k, top_p=p, filter_order=order
    )


def top_k_top_p_sampling_from_logits(
    logits: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: Setting,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Number = None,
    offset: Number = None,
    return_valid: bool = False,
) -> Samples:
    """`top_k_top_p_sampling_from_probs` of softmax(logits), which is not written anywhere."""
    _check_nan("logits", logits, check_nan)
    return ops.sample_from_logits(
        logits,
        top_k=_by_row(top_k, logits, indices),
        top_p=_float(_by_row(top_p, logits, indices)),
        filter_order=_order(filter_apply_order),
        indices=indices,
        generator=generator,
        seed=seed,
        offset=offset,
        return_valid=return_valid,
    )


def top_p_renorm_probs(probs: torch.Tensor, top_p: Setting, is_deterministic: bool = False) -> torch.Tensor:
    """What top_p keeps, with sum 1."""
    return ops.renormalize_probs(probs, top_p=_float(top_p))


def top_k_renorm_probs(probs: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """What top_k keeps, with sum 1."""
    return ops.renormalize_probs(probs, top_k=top_k)


top_p_renorm_prob, top_k_renorm_prob = top_p_renorm_probs, top_k_renorm_probs


def top_k_mask_logits(logits: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """-inf for what top_k does not keep."""
    return ops.mask_logits(logits, top_k)


def chain_speculative_sampling(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor | None = None,
    maybe_output_emitted_draft_token_num: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: Number = None,
    offset: Number = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens [batch, n + 1], -1 behind the last one, drafts accepted, drafts emitted); the counts are added to those given."""
    return ops.speculative_sample(
        draft_probs,
        draft_token_ids,
        target_probs,
        num_accepted=maybe_output_accepted_token_num,
        num_emitted=maybe_output_emitted_draft_token_num,
        generator=generator,
        seed=seed,
        offset=offset,
    )


def _sample(
    probs: torch.Tensor,
    indices: torch.Tensor | None,
    generator: torch.Generator | None,
    check_nan: bool,
    seed: Number,
    offset: Number,
    return_valid: bool,
    *,
    top_k: Setting | None = None,
    top_p: Setting | None = None,
    min_p: Setting | None = None,
    filter_order: str = "joint",
) -> Samples:
    _check_nan("probs", probs, check_nan)
    return ops.sample_from_probs(
        probs,
        top_k=top_k,
        top_p=_float(top_p),
        min_p=_float(min_p),
        filter_order=filter_order,
        indices=indices,
        generator=generator,
        seed=seed,
        offset=offset,
        return_valid=return_valid,
    )


def _float(setting: Setting | None) -> Setting | None:
    return setting.float() if isinstance(setting, torch.Tensor) else setting


def _by_row(setting: Setting, x: torch.Tensor, indices: torch.Tensor | None) -> Setting:
    """For each output, the setting of its row of x: where top_p takes part, FlashInfer has them by rows, else by outputs."""
    if isinstance(setting, torch.Tensor) and isinstance(indices, torch.Tensor) and setting.shape == x.shape[:1]:
        return setting[indices.long().clamp(0, max(x.shape[0] - 1, 0))]
    return setting


def _check_nan(name: str, x: torch.Tensor, wanted: bool) -> None:
    if wanted and bool(torch.isnan(x).any()):
        raise ValueError(f"{name}: got NaN, want numbers")


def _order(filter_apply_order: str) -> str:
    if filter_apply_order not in ("top_k_first", "joint"):
        raise ValueError(f"filter_apply_order: got {filter_apply_order!r}, want 'top_k_first' or 'joint'")
    return filter_apply_order

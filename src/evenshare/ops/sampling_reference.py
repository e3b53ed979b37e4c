"""Sampling in plain torch, with the kernels' random numbers but by sorting: the CPU backend, and the kernels' oracle."""

from __future__ import annotations

import torch

ROUNDS = 7
MASK = 0xFFFFFFFF
DRAFT_COUNTER = 0x70000000 // 4  # of the numbers that judge drafts; those of tokens come before
MIN_TEMPERATURE = 1e-6


def softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """float64; temperature: float32 [rows] or [1]."""
    mass = masses(scaled(logits, temperature), True)
    return mass / mass.sum(-1, keepdim=True)


def scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return logits.float() * (1.0 / temperature.float().clamp(min=MIN_TEMPERATURE))[:, None]


def uniforms(shape: tuple[int, int], seed: torch.Tensor, offset: torch.Tensor, first_counter: int = 0) -> torch.Tensor:
    """float32 [rows, columns] in (0, 1): Philox-4x32-7 (Salmon et al., SC 2011) of counter (column / 4, row, offset), key seed."""
    rows, columns = shape
    counter = torch.arange((columns + 3) // 4, dtype=torch.int64).expand(rows, -1) + first_counter
    low, high = offset & MASK, (offset >> 32) & MASK
    c = [
        counter,
        torch.arange(rows)[:, None].expand_as(counter),
        low.expand_as(counter),
        high.expand_as(counter),
    ]
    k0, k1 = int(seed) & MASK, (int(seed) >> 32) & MASK
    for _ in range(ROUNDS):
        # Products wrap to the 64 bits that they have unsigned.
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [((b >> 32) & MASK) ^ c[1] ^ k0, b & MASK, ((a >> 32) & MASK) ^ c[3] ^ k1, a & MASK]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    words = torch.stack(c, -1).flatten(1)[:, :columns]
    return (words.float() * 2.0**-32 + 2.0**-33).clamp(max=1 - 2.0**-24)


def race(mass: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """log(mass) - log(E) for exponential E: the largest key among any set of tokens is a sample of it. mass: float64."""
    u = uniforms((mass.shape[0], mass.shape[1]), seed, offset)
    return mass.log() - (-torch.log1p(-u.double())).log()


def masses(x: torch.Tensor, from_logits: bool) -> torch.Tensor:
    """float64: probabilities, or softmax of logits up to a factor; what is negative counts as 0."""
    wide = x.double()
    if not from_logits:
        return wide.clamp(min=0)
    top = wide.amax(-1, keepdim=True)
    return torch.where((wide == top) & (wide > -torch.inf), 1.0, (wide - top).exp()).where(wide > -torch.inf, 0.0)


def kept(mass: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """bool: tokens that fewer than top_k, and less than top_p of the row's mass, exceed. Settings: [rows] or [1]."""
    ordered, column = mass.sort(dim=-1, descending=True)
    position = torch.arange(mass.shape[1]).expand_as(column)
    changes = torch.ones_like(ordered, dtype=torch.bool)
    changes[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    exceeding = position.where(changes, 0).cummax(-1).values  # the position of the first of equals
    keep = torch.ones_like(changes)
    if top_k is not None:
        keep &= exceeding < top_k.clamp(min=1)[:, None]
    if top_p is not None:
        sums = ordered.cumsum(-1)
        mass_exceeding = (sums - ordered).gather(-1, exceeding)
        limit = top_p.double()[:, None] * sums[:, -1:]
        keep &= (mass_exceeding < limit) | (exceeding == 0) | (top_p[:, None] >= 1)
    return torch.zeros_like(keep).scatter_(-1, column, keep) & (mass > 0)


def keep_filters(
    mass: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    top_k_first: bool,
) -> torch.Tensor:
    """bool: what all filters keep; with top_k_first, top_p is of the mass that top_k keeps."""
    if top_k_first and top_k is not None and top_p is not None:
        keep = kept(mass, top_k, None)
        keep &= kept(mass.where(keep, 0), None, top_p)
    else:
        keep = kept(mass, top_k, top_p)
    if min_p is not None:
        top = mass.amax(-1, keepdim=True)
        keep &= (mass >= top * min_p.double()[:, None]) | (mass == top)
    return keep


def sample(
    x: torch.Tensor,
    from_logits: bool,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    top_k_first: bool,
    seed: torch.Tensor,
    offset: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens int64 [rows], valid bool [rows]); a row with NaN, or with nothing to sample, gives 0 and False."""
    mass = masses(x, from_logits)
    valid = ~x.isnan().any(-1) & (mass > 0).any(-1)
    mass = mass.where(valid[:, None], 1)
    key = race(mass, seed, offset)
    if not (top_k is None and top_p is None and min_p is None):
        key.masked_fill_(~keep_filters(mass, top_k, top_p, min_p, top_k_first), -torch.inf)
    return key.argmax(-1).where(valid, 0), valid


def renormalize(probs: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """float64: what top_k, and of it top_p, keeps of each row, divided by its sum."""
    mass = masses(probs, False)
    kept_mass = mass.where(keep_filters(mass, top_k, top_p, None, True), 0)
    total = kept_mass.sum(-1, keepdim=True)
    return kept_mass / total.where(total != 0, 1)


def mask(logits: torch.Tensor, top_k: torch.Tensor | None) -> torch.Tensor:
    """Logits that top_k does not keep become -inf."""
    if top_k is None:
        return logits
    ordered = logits.double().sort(-1, descending=True).values
    last = (top_k.long().clamp(1, logits.shape[1]) - 1)[:, None].expand(logits.shape[0], 1)
    return logits.where(logits >= ordered.gather(-1, last), -torch.inf)


def verify_chain(
    draft: torch.Tensor, ids: torch.Tensor, target: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens [rows, n + 1], -1 after the last one, drafts accepted one by one [rows], drafts emitted [rows])."""
    rows, n, width = draft.shape
    known = (ids >= 0) & (ids < width)
    column = ids.long().where(known, 0)[..., None]
    p, q = draft.gather(-1, column)[..., 0].float(), target[:, :n].gather(-1, column)[..., 0].float()
    accepted = known & (uniforms((rows, n), seed, offset, DRAFT_COUNTER) * p < q)
    emitted = accepted.long().cumprod(-1).sum(-1)
    at = emitted[:, None, None].expand(rows, 1, width)
    wanted = target.float().gather(1, at)[:, 0]
    drafted = torch.cat([draft.float(), wanted.new_zeros(rows, 1, width)], 1).gather(1, at)[:, 0]
    rest = (wanted - drafted.clamp(min=0)).clamp(min=0)
    token = race(rest.double(), seed, offset).argmax(-1)
    token = token.where((rest > 0).any(-1), wanted.argmax(-1))
    out = torch.cat([ids.long(), ids.new_full((rows, 1), -1)], 1)
    place = torch.arange(n + 1)
    out = out.where(place < emitted[:, None], -1).where(place != emitted[:, None], token[:, None])
    return out, accepted.sum(-1), emitted

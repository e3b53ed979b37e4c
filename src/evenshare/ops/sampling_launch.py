"""Launches of the sampling kernels: a survey of all rows, then what is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton

from evenshare.device.launcher import Launch, get_launcher
from evenshare.ops.kernels import sampling as kernels
from evenshare.ops.kernels import sampling_speculative as speculative

# None of these depends on the number of rows, so that a row's sums do not either.
PART = 8192  # columns that a program surveys: few rows still make many programs
BLOCK, NUM_WARPS = 2048, 8  # columns at a time, 8 a thread
GROUP, MAX_GROUPS = 128, 4096  # neighbours that share a peak; peaks of a row are held in registers
PIVOTS = 8

Setting = float | torch.Tensor | None


@dataclass(frozen=True)
class Cuts:
    """How rows of `width` columns are cut."""

    width: int
    part: int
    block: int
    group: int

    @cached_property
    def num_parts(self) -> int:
        return -(-self.width // self.part)

    @cached_property
    def num_groups(self) -> int:
        return -(-self.width // self.group)

    def of(self, *names: str) -> tuple[tuple[str, int], ...]:
        """Constants of a kernel."""
        return tuple((name, self._constants[name]) for name in names)

    @cached_property
    def _constants(self) -> dict[str, int]:
        return {
            "PART": self.part,
            "PARTS": triton.next_power_of_2(self.num_parts),
            "PIVOTS": PIVOTS,
            "GROUP": self.group,
            "GROUPS": triton.next_power_of_2(self.num_groups),
            "BLOCK": self.block,
        }


@lru_cache(maxsize=64)
def make_cuts(width: int) -> Cuts:
    block = min(max(triton.next_power_of_2(width), 16), BLOCK)
    wide_enough = triton.next_power_of_2(-(-width // MAX_GROUPS))
    return Cuts(width, PART, block, min(max(GROUP, wide_enough), block // 2))  # the search has blocks half as long


@dataclass(frozen=True)
class Survey:
    """What a survey writes: float32 and int32 [rows, num_parts], and int32 [rows, num_groups]."""

    best: torch.Tensor | None
    best_at: torch.Tensor | None
    top: torch.Tensor
    total: torch.Tensor | None
    peaks: torch.Tensor | None


def _split(setting: Setting, default: float) -> tuple[torch.Tensor | None, float]:
    """(a tensor of rows or None, a number)."""
    return (setting, default) if isinstance(setting, torch.Tensor) else (None, default if setting is None else setting)


@lru_cache(maxsize=1024)
def _bind(
    kernel: Any, num_dynamic: int, device: torch.device, grid: tuple[int, ...], static: tuple[Any, ...], constants: Any
) -> Launch:
    return get_launcher(kernel, num_dynamic, **dict(constants), num_warps=NUM_WARPS).bind(device, grid, static)


def _survey(
    x: torch.Tensor,
    num_rows: int,
    indices: torch.Tensor | None,
    temperature: Setting,
    state: tuple[torch.Tensor, torch.Tensor] | None,
    has_mass: bool,
    has_peaks: bool,
    from_logits: bool,
) -> Survey:
    """state: seed and offset of a race, or None."""
    cuts = make_cuts(x.shape[1])
    shape = (num_rows, cuts.num_parts)
    race = state is not None

    def scratch(wanted: bool, dtype: torch.dtype, *sizes: int) -> torch.Tensor | None:
        return torch.empty(sizes, dtype=dtype, device=x.device) if wanted else None

    survey = Survey(
        scratch(race, torch.float32, *shape),
        scratch(race, torch.int32, *shape),
        torch.empty(shape, dtype=torch.float32, device=x.device),
        scratch(has_mass, torch.float32, *shape),
        scratch(has_peaks, torch.int32, num_rows, cuts.num_groups),
    )
    per_row, number = _split(temperature, 1.0)
    static = (x.shape[0], cuts.width, cuts.num_parts, cuts.num_groups, *x.stride(), float(number))
    flags = (("RACE", race), ("MASS", has_mass), ("PEAKS", has_peaks), ("LOGITS", from_logits))
    launch = _bind(kernels.survey, 10, x.device, shape, static, (*flags, *cuts.of("GROUP", "PART", "BLOCK")))
    seed, offset = state or (None, None)
    launch(
        x, indices, per_row, seed, offset, survey.best, survey.best_at, survey.top, survey.total, survey.peaks
    )  # fmt: skip
    return survey


def softmax(x: torch.Tensor, temperature: Setting, out: torch.Tensor) -> None:
    survey = _survey(x, x.shape[0], None, temperature, None, True, False, True)
    cuts = make_cuts(x.shape[1])
    per_row, number = _split(temperature, 1.0)
    static = (cuts.width, cuts.num_parts, *x.stride(), *out.stride(), float(number))
    grid = (x.shape[0], cuts.num_parts)
    launch = _bind(kernels.softmax, 5, x.device, grid, static, cuts.of("PARTS", "PART", "BLOCK"))
    launch(x, out, per_row, survey.top, survey.total)


def keep(x: torch.Tensor, top_k: Setting, top_p: Setting, from_logits: bool, out: torch.Tensor) -> None:
    survey = _survey(x, x.shape[0], None, None, None, not from_logits, True, from_logits)
    assert survey.peaks is not None
    cuts = make_cuts(x.shape[1])
    (k_rows, k), (p_rows, p) = _split(top_k, 0), _split(top_p, 0.0)
    groups = torch.empty_like(survey.peaks)
    low = torch.empty(x.shape[0], dtype=torch.int32, device=x.device)
    mass = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    static = (cuts.width, cuts.num_parts, cuts.num_groups, *x.stride(), min(int(k), cuts.width), float(p))
    flags = (("HAS_TOP_K", top_k is not None), ("HAS_TOP_P", top_p is not None), ("LOGITS", from_logits))
    constants = (*flags, *cuts.of("PARTS", "PIVOTS", "GROUPS", "GROUP", "BLOCK"))
    find = _bind(kernels.find_kept, 9, x.device, (x.shape[0],), static, constants)
    find(x, k_rows, p_rows, survey.top, survey.total, survey.peaks, groups, low, mass)
    write = _bind(
        kernels.keep,
        4,
        x.device,
        (x.shape[0], cuts.num_parts),
        (cuts.width, *x.stride(), *out.stride()),
        (("LOGITS", from_logits), *cuts.of("PART", "BLOCK")),
    )
    write(x, out, low, mass)


def sample(
    x: torch.Tensor,
    out: torch.Tensor,
    valid: torch.Tensor | None,
    indices: torch.Tensor | None,
    temperature: Setting,
    top_k: Setting,
    top_p: Setting,
    min_p: Setting,
    top_k_first: bool,
    from_logits: bool,
    seed: torch.Tensor,
    offset: torch.Tensor,
) -> None:
    cuts = make_cuts(x.shape[1])
    filtered = not (top_k is None and top_p is None and min_p is None)
    survey = _survey(
        x, out.shape[0], indices, temperature, (seed, offset), top_p is not None, filtered, from_logits
    )  # fmt: skip
    groups = None if survey.peaks is None else torch.empty_like(survey.peaks)
    (k_rows, k), (p_rows, p), (min_rows, least) = _split(top_k, 0), _split(top_p, 0.0), _split(min_p, 0.0)
    t_rows, t = _split(temperature, 1.0)
    numbers = (min(int(k), cuts.width), float(p), float(least), float(t))
    static = (x.shape[0], cuts.width, cuts.num_parts, cuts.num_groups, *x.stride(), *numbers)
    flags = (
        ("HAS_TOP_K", top_k is not None),
        ("HAS_TOP_P", top_p is not None),
        ("HAS_MIN_P", min_p is not None),
        ("TOP_K_FIRST", top_k_first and top_k is not None and top_p is not None),
        ("LOGITS", from_logits),
    )
    constants = (*flags, *cuts.of("PARTS", "PIVOTS", "GROUPS", "GROUP", "BLOCK"))
    launch = _bind(kernels.sample, 16, x.device, (out.shape[0],), static, constants)
    settings = (k_rows, p_rows, min_rows, t_rows)
    surveyed = (survey.best, survey.best_at, survey.top, survey.total, survey.peaks, groups)
    launch(x, out, valid, indices, *settings, seed, offset, *surveyed)


def verify_chain(
    draft: torch.Tensor,
    ids: torch.Tensor,
    target_probs: torch.Tensor,
    out: torch.Tensor,
    accepted: torch.Tensor,
    emitted: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
) -> None:
    rows, num_draft, width = draft.shape
    cuts = make_cuts(width)
    device = draft.device
    end = torch.empty(rows, dtype=torch.int32, device=device)
    values = torch.empty(2, rows, cuts.num_parts, dtype=torch.float32, device=device)
    columns = torch.empty(2, rows, cuts.num_parts, dtype=torch.int32, device=device)
    parts = (values[0], columns[0], values[1], columns[1])
    strides = (*draft.stride(), *ids.stride(), *target_probs.stride())
    block = (("BLOCK", max(triton.next_power_of_2(num_draft + 1), 4)),)
    judge = _bind(speculative.judge_drafts, 9, device, (rows,), (num_draft, width, *strides), block)
    judge(draft, ids, target_probs, out, end, accepted, emitted, seed, offset)
    static = (num_draft, width, cuts.num_parts, *draft.stride(), *target_probs.stride())
    constants = cuts.of("PART", "BLOCK")
    survey = _bind(speculative.survey_rest, 9, device, (rows, cuts.num_parts), static, constants)
    survey(draft, target_probs, end, *parts, seed, offset)
    place = _bind(
        speculative.place_token, 6, device, (rows,), (num_draft, cuts.num_parts), cuts.of("PARTS")
    )  # fmt: skip
    place(out, end, *parts)

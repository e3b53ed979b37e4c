"""FlashInfer's conventions for arguments: dtypes by name, caches in one tensor or two, int32 metadata, what cannot be had."""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any

import torch

from evenshare.attention.variants import Variant, alibi, alibi_slopes
from evenshare.device.checks import check_is_tensor
from evenshare.device.target import BACKENDS

DType = str | torch.dtype
Scale = float | torch.Tensor | None
PagedCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
E5M2 = torch.float8_e5m2


def canonical_dtype(name: str, dtype: DType) -> torch.dtype:
    """torch.float16 for "float16" or torch.float16."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name}: got {dtype!r}, want a torch.dtype or its name")
    return found


def check_int32(**tensors: torch.Tensor | None) -> None:
    """Raise unless each is None or a one-dimensional int32 tensor: int64 indices are refused, as by FlashInfer."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        check_is_tensor(**{name: tensor})
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name}: got dtype {tensor.dtype}, want torch.int32")
        if tensor.dim() != 1:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want one dimension")


def check_kv_layout(kv_layout: str) -> str:
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: got {kv_layout!r}, want 'NHD' or 'HND'")
    return kv_layout


def split_cache(cache: PagedCache, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, v), each of four dimensions, of a tuple of them or of one tensor [pages, 2, ...]."""
    if isinstance(cache, tuple | list):
        if len(cache) != 2:
            raise ValueError(f"paged_kv_cache: got {len(cache)} tensors, want (k, v)")
        check_is_tensor(**{"paged_kv_cache[0]": cache[0], "paged_kv_cache[1]": cache[1]})
        return cache[0], cache[1]
    check_is_tensor(paged_kv_cache=cache)
    if cache.dim() != 5 or cache.shape[1] != 2:
        inner = "page, heads, dim" if kv_layout == "NHD" else "heads, page, dim"
        raise ValueError(f"paged_kv_cache: got shape {tuple(cache.shape)}, want [pages, 2, {inner}] or a tuple (k, v)")
    return cache[:, 0], cache[:, 1]


def refuse(argument: str, got: Any, want: str) -> None:
    """Raise NotImplementedError for what evenshare cannot do."""
    shown = "a tensor" if isinstance(got, torch.Tensor) else repr(got)
    raise NotImplementedError(f"{argument}: got {shown}, want {want} (evenshare has nothing in its place)")


def only_default(**arguments: Any) -> None:
    """Refuse each that is neither None nor False nor 0."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) or value not in (None, False, 0):
            refuse(name, value, "None")


def check_no_jit(jit_args: Any, args: tuple[Any, ...] = ()) -> None:
    """FlashInfer compiles CUDA source that its user hands over; evenshare takes a Python function."""
    if jit_args is not None or args:
        raise NotImplementedError(
            f"jit_args: got {jit_args if args == () else args!r}, want None: give plan() a variant=evenshare.Variant(...) instead, "
            "which says in Python what CUDA strings say there"
        )


def engine_backend(backend: str | None) -> str | None:
    """evenshare's own names; those of FlashInfer's kernels choose nothing here."""
    return backend if backend in BACKENDS else None


def check_pos_encoding_mode(mode: str) -> str:
    if mode not in POS_ENCODING_MODES:
        raise ValueError(f"pos_encoding_mode: got {mode!r}, want one of {', '.join(POS_ENCODING_MODES)}")
    return mode


def window_of(window_left: int | None) -> int:
    """Any negative number is "no window"."""
    return -1 if window_left is None or window_left < 0 else window_left


def resolve_sm_scale(sm_scale: float | None, head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale)


@cache
def alibi_score(num_heads: int, device: torch.device) -> Any:
    """The score_mod of ALIBI: one for all plans, since its slopes are a tensor."""
    return alibi(alibi_slopes(num_heads, device))


def make_variant(
    variant: Variant | None, pos_encoding_mode: str, num_qo_heads: int, device: torch.device, mask_mod: Any = None
) -> Variant | None:
    """What `variant=`, a custom mask and ALIBI come to. Raises ValueError if the first comes with another one."""
    wants_alibi = pos_encoding_mode == "ALIBI"
    if variant is not None:
        if not isinstance(variant, Variant):
            raise TypeError(f"variant: got {type(variant).__name__}, want evenshare.Variant or None")
        if wants_alibi or mask_mod is not None:
            raise ValueError("variant: got one beside a custom mask or ALIBI, want all of it in the variant")
        return variant
    if not wants_alibi and mask_mod is None:
        return None
    return Variant(score_mod=alibi_score(num_qo_heads, device) if wants_alibi else None, mask_mod=mask_mod)


def times(a: Scale, b: Scale) -> Scale:
    """The product of two scales, None being 1."""
    return b if a is None else a if b is None else a * b


def is_one(scale: Scale) -> bool:
    return scale is None or (not isinstance(scale, torch.Tensor) and scale == 1)


@cache
def warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=4)

"""What one attention call computes: the part that does not depend on lengths. Each constraint is stated once, here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from evenshare.device.checks import check_is_tensor

if TYPE_CHECKING:
    from evenshare.attention.variants.variant import Variant

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn  # of keys, values and queries, each a code times a scale
CODES = (torch.int8, torch.uint8)  # of keys and values that a variant's transforms make numbers of
MIN_HEAD_DIM, MAX_HEAD_DIM = 1, 256
MAX_WINDOW = 1 << 30


@dataclass(frozen=True)
class Problem:
    """Heads, dims, dtype and mask of an attention call. Raises ValueError or TypeError naming the argument at fault."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int  # of q and k
    head_dim_v: int  # of v and the output
    dtype: torch.dtype  # of the output and, unless q_dtype says otherwise, of q
    page_size: int = 0  # 0: contiguous keys
    causal: bool = False
    window_left: int = -1  # keys to the left that a row sees, inclusive; -1: all
    logits_soft_cap: float = 0.0  # 0: off
    sm_scale: float = 1.0
    kv_dtype: torch.dtype | None = None  # of k and v: FP8, CODES beside a variant's key and value or, None, dtype
    q_dtype: torch.dtype | None = None  # of q: FP8 beside such keys or, None, dtype
    variant: Variant | None = None

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_v", "page_size", "window_left"):
            if not isinstance(getattr(self, name), int):
                raise TypeError(f"{name}: got {getattr(self, name)!r}, want an int")
        for name in ("logits_soft_cap", "sm_scale"):
            if not isinstance(getattr(self, name), int | float):
                raise TypeError(f"{name}: got {getattr(self, name)!r}, want a number or None")
        if self.num_kv_heads < 1 or self.num_qo_heads < 1 or self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads, num_kv_heads: got {self.num_qo_heads} and {self.num_kv_heads}, "
                "want positive numbers, the first a multiple of the second"
            )
        self.check_head_dims()
        if self.dtype not in DTYPES:
            raise TypeError(f"dtype of q, k, v: got {self.dtype}, want one of {', '.join(map(str, DTYPES))}")
        if self.fp8_q and not self.fp8_kv:
            beside = self.kv_dtype or self.dtype
            raise TypeError(f"q_dtype, kv_dtype: got {FP8} and {beside}, want {FP8} for k and v too, or a 16-bit q")
        if self.q_dtype not in (None, self.dtype, FP8):
            raise TypeError(f"q_dtype: got {self.q_dtype}, want {self.dtype} or, beside such keys, {FP8}")
        if self.kv_dtype in CODES:
            transforms = getattr(self.variant, "transforms", {})
            if not {"key", "value"} <= set(transforms):
                raise TypeError(f"kv_dtype: got {self.kv_dtype}, want it only beside a variant with key and value")
        elif self.kv_dtype not in (None, self.dtype) and (self.kv_dtype, self.dtype.itemsize) != (FP8, 2):
            also = f" or {FP8}" if self.dtype.itemsize == 2 else ""
            raise TypeError(f"kv_dtype: got {self.kv_dtype}, want {self.dtype}{also}")
        if self.page_size < 0:
            raise ValueError(f"page_size: got {self.page_size}, want 1 or more")
        if self.variant is not None and not hasattr(self.variant, "score_mod"):
            raise TypeError(f"variant: got {type(self.variant).__name__}, want an evenshare.Variant or None")
        if self.window_left < -1:
            raise ValueError(f"window_left: got {self.window_left}, want -1 (off) or a count of keys >= 0")
        # Longer windows reach every key, and sums of a window and a length must not pass 2^31.
        object.__setattr__(self, "window_left", min(self.window_left, MAX_WINDOW))
        if not (self.logits_soft_cap >= 0 and math.isfinite(self.logits_soft_cap)):
            raise ValueError(f"logits_soft_cap: got {self.logits_soft_cap}, want a finite number >= 0 (0 or None: off)")
        if not math.isfinite(self.sm_scale):
            raise ValueError(f"sm_scale: got {self.sm_scale}, want a finite number")

    def check_head_dims(self) -> None:
        for name, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
                raise ValueError(f"{name}: got {dim}, want {MIN_HEAD_DIM} to {MAX_HEAD_DIM}")

    @property
    def fp8_kv(self) -> bool:
        return self.kv_dtype == FP8

    @property
    def fp8_q(self) -> bool:
        return self.q_dtype == FP8

    @property
    def changes_keys(self) -> bool:
        """Whether a variant transforms keys or values, whenever they are loaded."""
        return self.variant is not None and not self.variant.transforms.keys().isdisjoint(("key", "value"))

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads


def default_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim)."""
    return 1.0 / math.sqrt(max(head_dim, 1))  # a head_dim below 1 is refused by Problem


def default_causal(variant: Variant | None) -> bool:
    """A mask of the user's own, such as that of a prefix LM, would mean nothing below a causal one."""
    return variant is None or variant.mask_mod is None


def lse_scale(base: float) -> float:
    """Factor from a base-2 logarithm to a logarithm of `base`."""
    if not (base > 1 and math.isfinite(base)):
        raise ValueError(f"base: got {base}, want a finite number above 1")
    return math.log(2.0) / math.log(base)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype,
    device: torch.device,
    unit_stride: bool = True,
) -> None:
    """Raise unless `tensor` has this dtype, device, shape (None: any extent) and, if asked, a last dimension of stride 1."""
    check_is_tensor(**{name: tensor})
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, want {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, want {device}")
    if tensor.dim() != len(shape) or any(w is not None and w != g for w, g in zip(shape, tensor.shape, strict=False)):
        want = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want [{want}]")
    if unit_stride and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: got stride {tensor.stride(-1)} in the last dimension, want 1")

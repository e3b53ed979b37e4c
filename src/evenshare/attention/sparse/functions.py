"""Block-sparse attention: `block_sparse_attention`, and a plan for those who call it with the same lists in every layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from evenshare.attention.problem import Problem, default_scale
from evenshare.attention.sparse.blocks import BlockSparsity
from evenshare.attention.sparse.plan import BlockSparsePlan
from evenshare.attention.variants.variant import Variant
from evenshare.device.checks import check_is_tensor
from evenshare.device.target import select_target

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def plan_block_sparse_attention(
    blocks: BlockMask | BlockSparsity,
    *,
    batch: int,
    qo_len: int,
    kv_len: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    variant: Variant | None = None,
    dtype: torch.dtype = torch.bfloat16,
    base: float = math.e,
    device: torch.device | str | None = None,
    backend: str | None = None,
) -> BlockSparsePlan:
    """Deal the key blocks that a batch's rows see, and no others, to the device's workers in even shares.

    blocks: a `BlockMask` of torch.nn.attention.flex_attention or a `BlockSparsity`, on the device or on the host; the former is
    planned without a sync. batch, qo_len, kv_len: of the tensors [batch, qo_len, Hq, D] and [batch, kv_len, Hkv, D].
    variant: what else happens to scores; its mask_mod is that of the blocks. The other arguments are those of `plan_attention`.
    device: where q, k, v are; None: where the lists are.

    Raises ValueError or TypeError naming the argument, what was got and what is wanted.

    >>> blocks = BlockSparsity.from_bsr(torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1]), (2, 4))
    >>> plan = plan_block_sparse_attention(blocks, batch=1, qo_len=4, kv_len=8, num_qo_heads=2, num_kv_heads=1, head_dim=8,
    ...                                    dtype=torch.float32)
    >>> plan.run(torch.randn(1, 4, 2, 8), torch.randn(1, 8, 1, 8), torch.randn(1, 8, 1, 8)).shape
    torch.Size([1, 4, 2, 8])
    """
    sparsity = BlockSparsity.of(blocks)
    for name, size in (("batch", batch), ("qo_len", qo_len), ("kv_len", kv_len)):
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"{name}: got {size!r}, want an int of 0 or more")
    if variant is not None and getattr(variant, "mask_mod", None) is not None:
        raise ValueError("variant: got a mask_mod, want it as that of the blocks, which full blocks do without")
    target = select_target(sparsity.device if device is None else device, backend)
    problem = Problem(
        num_qo_heads,
        num_kv_heads,
        head_dim,
        head_dim if head_dim_v is None else head_dim_v,
        dtype,
        logits_soft_cap=logits_soft_cap or 0.0,
        sm_scale=default_scale(head_dim) if sm_scale is None else sm_scale,
        variant=_masked(variant, sparsity),
    )
    return BlockSparsePlan(problem, sparsity, batch, qo_len, kv_len, target, base)


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: BlockMask | BlockSparsity,
    *,
    variant: Variant | None = None,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    return_lse: bool = False,
    base: float = math.e,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
) -> Any:
    """Softmax attention of each block of query rows over its list of key blocks (FlashInfer, section 3.1; FlexAttention).

    q [B, Sq, Hq, D], k [B, Skv, Hkv, D], v [B, Skv, Hkv, Dv], float32, float16 or bfloat16. blocks: a `BlockMask` of
    torch.nn.attention.flex_attention, or lists in BSR form, `BlockSparsity.from_bsr`, with blocks of any size. Full blocks skip
    the mask function, blocks in no list cost nothing. Positions, also those of the variant's functions, count from 0.
    It plans anew: in a model make a plan for all layers, `plan_block_sparse_attention`.

    Returns out, like q with Dv, or (out, lse) if `return_lse` or `lse` is given. A row without keys has out = 0 and lse = -inf.
    Raises ValueError or TypeError naming the argument, before anything is written.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, None, None, 256, 256, device="cpu")
    >>> q, k, v = torch.randn(1, 256, 4, 8), torch.randn(1, 256, 2, 8), torch.randn(1, 256, 2, 8)
    >>> block_sparse_attention(q, k, v, mask).shape
    torch.Size([1, 256, 4, 8])
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(**{name: tensor})
        if tensor.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want [batch, tokens, heads, head_dim]")
    plan = plan_block_sparse_attention(
        blocks,
        batch=q.shape[0],
        qo_len=q.shape[1],
        kv_len=k.shape[1],
        num_qo_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        variant=variant,
        dtype=q.dtype,
        base=base,
        device=q.device,
        backend=backend,
    )
    return plan.run(q, k, v, out=out, lse=lse, return_lse=return_lse)


def _masked(variant: Variant | None, sparsity: BlockSparsity) -> Variant:
    """The variant with the blocks' mask."""
    if variant is None:
        return Variant(mask_mod=sparsity.mask_mod)
    if not isinstance(variant, Variant):
        raise TypeError(f"variant: got {type(variant).__name__}, want an evenshare.Variant or None")
    return Variant(
        score_mod=variant.score_mod,
        mask_mod=sparsity.mask_mod,
        softmax=variant.softmax,
        sinks=variant.sinks,
        **variant.transforms,
    )

"""Latent attention without a plan of one's own."""

from __future__ import annotations

import math
from typing import Any

import torch

from evenshare.attention.mla.plan import plan_mla
from evenshare.device.checks import check_is_tensor


def mla_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv: torch.Tensor,
    kpe: torch.Tensor,
    *,
    sm_scale: float,
    qo_indptr: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    causal: bool = True,
    return_lse: bool = False,
    base: float = math.e,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
    debug: bool = False,
) -> Any:
    """Latent attention of a ragged batch over a paged cache: see `plan_mla`, and `MLAPlan.run` for the tensors.

    q_nope: [total_q, H, C]; q_pe: [total_q, H, R]; ckv: [num_pages, page_size, C]; kpe: [num_pages, page_size, R].
    Returns out [total_q, H, C], or (out, lse [total_q, H]) if `return_lse` or `lse` is given.
    Raises ValueError or TypeError naming the argument, what was got and what is wanted, before anything is written.

    >>> table, lens = torch.tensor([[3, 1], [5, 0]]), torch.tensor([20, 7])
    >>> (q_nope, q_pe), (ckv, kpe) = (torch.randn(*shape, 576).split([512, 64], -1) for shape in ((2, 4), (6, 16)))
    >>> mla_attention(q_nope, q_pe, ckv, kpe, sm_scale=192**-0.5, block_table=table, kv_lens=lens).shape
    torch.Size([2, 4, 512])
    """
    for name, tensor in (("q_nope", q_nope), ("q_pe", q_pe), ("ckv", ckv), ("kpe", kpe)):
        check_is_tensor(**{name: tensor})
        if tensor.dim() != 3:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want 3 dimensions")
    plan = plan_mla(
        num_heads=q_nope.shape[1],
        page_size=ckv.shape[1],
        sm_scale=sm_scale,
        head_dim_ckv=q_nope.shape[2],
        head_dim_kpe=q_pe.shape[2],
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        last_page_len=last_page_len,
        block_table=block_table,
        kv_lens=kv_lens,
        causal=causal,
        dtype=q_nope.dtype,
        base=base,
        max_q_rows=q_nope.shape[0],
        device=q_nope.device,
        backend=backend,
        debug=debug,
    )
    return plan.run(q_nope, q_pe, ckv, kpe, out=out, lse=lse, return_lse=return_lse)

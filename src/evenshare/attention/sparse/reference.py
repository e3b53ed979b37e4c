"""Block-sparse attention in plain torch: each row block beside the keys of its list, and no others."""

from __future__ import annotations

import torch

from evenshare.attention.formula import Rule, clear_rows, formula, widened
from evenshare.attention.problem import Problem
from evenshare.attention.sparse.blocks import BlockSparsity
from evenshare.attention.variants.eager import Place
from evenshare.attention.variants.variant import Variant


def block_sparse_attention(
    problem: Problem,
    variant: Variant,
    sparsity: BlockSparsity,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """q [B, Sq, Hq, D], k, v [B, Skv, Hkv, D] -> out, lse (natural), overwritten. The lists were checked."""
    group = problem.group_size
    cap = problem.logits_soft_cap or None
    rule = Rule(False, -1, cap, problem.sm_scale, None, None, None, variant)
    block_rows, block_keys = sparsity.block_size
    lists = [
        t.expand(q.shape[0], *t.shape[1:]).tolist() for t in (sparsity.begin, sparsity.num_full, sparsity.num_blocks)
    ]
    within = torch.arange(block_keys, device=k.device)
    lists_heads = sparsity.num_blocks.shape[1]
    per_list = q.shape[2] // lists_heads
    for b in range(q.shape[0]):
        for h in range(lists_heads):
            # Heads of this list, and their KV heads.
            own = slice(h * per_list, (h + 1) * per_list)
            shared = slice(own.start // group, (own.stop - 1) // group + 1)
            numbers = [torch.arange(s.start, s.stop, device=k.device) for s in (own, shared)]
            for i, row in enumerate(range(0, q.shape[1], block_rows)):
                rows = slice(row, min(row + block_rows, q.shape[1]))
                begin, num_full, num_blocks = (values[b][h][i] for values in lists)
                listed = sparsity.indices[begin : begin + num_blocks].to(k.device, torch.int64)
                keys = (listed[:, None] * block_keys + within).flatten()
                there = keys < k.shape[1]
                num_unmasked = int(there[: num_full * block_keys].sum())
                keys = keys[there]
                outputs = out[b, rows, own], None if lse is None else lse[b, rows, own]
                if not len(keys):
                    clear_rows(*outputs)
                    continue
                place = Place(b, numbers[0], torch.arange(rows.start, rows.stop, device=k.device), keys)
                at = rule, b, numbers[1], keys
                own_k, own_v = (
                    widened(k[b, keys, shared], "key", None, *at),
                    widened(v[b, keys, shared], "value", None, *at),
                )
                formula(q[b, rows, own], own_k, own_v, None, rule, place, *outputs, num_unmasked)

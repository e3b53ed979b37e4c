"""Verify a tree of draft tokens in one call: every token sees the cache and its own ancestors, no other branch.

python examples/variants/tree_decoding.py
"""

from __future__ import annotations

import torch

import evenshare
from evenshare.attention import variants

HEADS, DIM, CACHED, PAGE = 4, 32, 13, 8
# Two guesses for the next token, and what may follow them; a token's parent comes before it.
PARENTS = [-1, -1, 0, 0, 1, 2, 2]


def main() -> None:
    num_tokens = len(PARENTS)
    kv_lens = torch.tensor([CACHED + num_tokens])
    variant = evenshare.Variant(mask_mod=variants.tree(torch.tensor([PARENTS]), kv_lens))
    print(variant.draw(num_tokens, CACHED + num_tokens))

    k_cache, v_cache = torch.randn(2, 4, PAGE, HEADS, DIM)
    q = torch.randn(num_tokens, HEADS, DIM)
    pages = torch.tensor([[2, 0, 3]])
    batch = {"block_table": pages, "kv_lens": kv_lens, "qo_indptr": torch.tensor([0, num_tokens])}
    out = evenshare.paged_attention(q, k_cache, v_cache, **batch, variant=variant)

    # The same as decoding the branch 0, 2, 5 alone.
    branch = [0, 2, 5]
    k, v = (cache[pages[0]].flatten(0, 1) for cache in (k_cache, v_cache))
    kept = [*range(CACHED), *(CACHED + i for i in branch)]
    alone = evenshare.attention(q[branch][None], k[kept][None], v[kept][None], causal=True)
    torch.testing.assert_close(out[branch], alone[0])
    print(f"-> {tuple(out.shape)}, and the branch {branch} has what it has alone")


if __name__ == "__main__":
    main()

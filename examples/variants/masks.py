"""Masks, drawn: a line for each query row, a column for each key.

python examples/variants/masks.py
"""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

import evenshare
from evenshare.attention import variants

LENGTH = 24
document_ids = torch.tensor([0] * 9 + [1] * 10 + [2] * 5)
generator = torch.Generator().manual_seed(0)
bits, indptr = variants.pack_masks([torch.rand(LENGTH, LENGTH, generator=generator) < 0.3])
lens = torch.tensor([LENGTH])

MASKS = {
    "causal": variants.causal,
    "sliding window": variants.sliding_window(5),
    "dilated window": variants.dilated_window(5, 3),
    "prefix LM": variants.prefix_lm(torch.tensor([8])),
    "documents, causal": and_masks(variants.documents(document_ids), variants.causal),
    # StreamingLLM: the first keys, and a window.
    "first keys and a window": or_masks(
        and_masks(variants.causal, lambda b, h, q_idx, kv_idx: kv_idx < 3), variants.sliding_window(5)
    ),
    "any bits": variants.packed_mask(bits, indptr, lens, lens),
}


def main() -> None:
    q, k, v = torch.randn(3, 1, LENGTH, 2, 32)
    for name, mask_mod in MASKS.items():
        variant = evenshare.Variant(mask_mod=mask_mod)
        out = evenshare.attention(q, k, v, variant=variant)
        print(f"{name}\n{variant.draw(LENGTH, LENGTH)}\n-> {tuple(out.shape)}\n")


if __name__ == "__main__":
    main()

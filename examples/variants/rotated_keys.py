"""A cache of unrotated int8 keys and values: the kernel dequantises, norms and rotates them as it reads them.

python examples/variants/rotated_keys.py
"""

from __future__ import annotations

import torch

import evenshare
from evenshare.attention import variants

HEADS, KV_HEADS, HEAD_DIM, PAGES, PAGE_SIZE = 8, 2, 64, 8, 16


def main() -> None:
    keys, values = torch.randn(2, PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    scales = torch.stack([x.abs().amax((0, 1, 3)) for x in (keys, values)]) / 127  # for each KV head
    codes = [(x / s[:, None]).round().to(torch.int8) for x, s in zip((keys, values), scales, strict=True)]
    norm, turn = variants.rms_norm(torch.rand(HEAD_DIM)), variants.rope(HEAD_DIM, rope_theta=5e5)

    def dequantised(which: int) -> variants.transforms.Transform:
        return lambda x, b, h, kv_idx, d: x * scales[which, h]

    variant = evenshare.Variant(
        query=variants.in_turn(norm, turn), key=variants.in_turn(dequantised(0), norm, turn), value=dequantised(1)
    )
    block_table, kv_lens = torch.tensor([[3, 1, 6], [0, 7, 0]]), torch.tensor([40, 20])
    options = {"block_table": block_table, "kv_lens": kv_lens}
    q = torch.randn(2, HEADS, HEAD_DIM)
    out = evenshare.paged_attention(q, *codes, variant=variant, **options)
    plain = evenshare.Variant(query=variants.in_turn(norm, turn), key=variants.in_turn(norm, turn))
    exact = evenshare.paged_attention(q, keys, values, variant=plain, **options)
    print(f"int8 keys and values -> {tuple(out.shape)}, off by {float((out - exact).norm() / exact.norm()):.1%}")


if __name__ == "__main__":
    main()

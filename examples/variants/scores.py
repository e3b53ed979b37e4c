"""What is done to scores: ALiBi, soft cap, a learned bias, sinks, no softmax. The darker a key, the more its score gains.

python examples/variants/scores.py
"""

from __future__ import annotations

import torch

import evenshare
from evenshare import Variant
from evenshare.attention import variants

HEADS, LENGTH = 4, 24
biased = variants.alibi(variants.alibi_slopes(HEADS))
capped = variants.soft_cap(30.0)
distances = torch.linspace(-3, 3, 11).cos().expand(HEADS, 11)

VARIANTS = {
    "ALiBi": Variant(score_mod=biased, mask_mod=variants.causal),
    "ALiBi on capped scores": Variant(
        score_mod=lambda score, *positions: biased(capped(score, *positions), *positions)
    ),
    "a bias for each distance": Variant(score_mod=variants.relative_bias(distances)),
    "sinks": Variant(sinks=torch.tensor([0.0, 1.0, 2.0, 3.0]), mask_mod=variants.causal),
    "sigmoid attention": variants.sigmoid_attention(-3.0, variants.causal),
}


def main() -> None:
    q, k, v = torch.randn(3, 1, LENGTH, HEADS, 32)
    for name, variant in VARIANTS.items():
        out = evenshare.attention(q, k, v, variant=variant)
        print(f"{name}\n{variant.draw(LENGTH, LENGTH, h=HEADS - 1)}\n-> {tuple(out.shape)}\n")


if __name__ == "__main__":
    main()

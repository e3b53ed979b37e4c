"""AWQ (arXiv 2306.00978) as AutoAWQ stores it, version gemm, 4 bits.

    qweight  int32 [k, n / 8]         codes, packed along n
    qzeros   int32 [groups, n / 8]    zero points, in the same way: (q - zero) * scale
    scales   float16 or bfloat16 [groups, n]

Nibble j of a word, low first, holds the word's column INTERLEAVED[j].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evenshare.quant.formats import words
from evenshare.quant.formats.format import Config, Format, Tensors, check, one_of_all
from evenshare.quant.rounding import pack_codes
from evenshare.quant.weight import QuantizedWeight

HALVES = (torch.float16, torch.bfloat16)
BITS = 4
INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
NIBBLE_OF_COLUMN = tuple(INTERLEAVED.index(column) for column in range(8))


def _matches(config: Config) -> bool:
    version = config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm"
    bits = config.get("bits", config.get("w_bit", BITS))
    return (
        config.get("quant_method") == "awq"
        and str(version).lower() == "gemm"
        and bits == BITS
        and config.get("zero_point", True)
    )


def _reorder(codes: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Codes [r, n] with the eight of each word in `order`."""
    return codes.view(codes.shape[0], -1, 8)[..., list(order)].flatten(1)


def _unpack(tensors: Tensors, config: Config) -> QuantizedWeight:
    qweight, qzeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    check("qweight", qweight, torch.int32, None, None)
    k, n = qweight.shape[0], qweight.shape[1] * 8
    group_size = int(config.get("group_size", config.get("q_group_size", -1)))
    group_size = k if group_size == -1 else group_size
    check("scales", scales, HALVES, -(-k // group_size), n)
    check("qzeros", qzeros, torch.int32, scales.shape[0], n // 8)
    codes = _reorder(words.unpack(qweight, BITS), NIBBLE_OF_COLUMN).t()
    zeros = _reorder(words.unpack(qzeros, BITS), NIBBLE_OF_COLUMN).t().contiguous()
    return QuantizedWeight(pack_codes(codes, BITS), scales.t().contiguous(), k, group_size, BITS, zeros)


def _refusal(weight: QuantizedWeight) -> str | None:
    if weight.bits != BITS:
        return f"its codes have {weight.bits} bits, not {BITS}"
    if weight.permutation is not None:
        return "it has a permutation (act-order), and groups lie side by side"
    if weight.n % 8:
        return f"its {weight.n} rows are no multiple of 8"
    if weight.scales.dtype not in HALVES:
        return f"its scales are {weight.scales.dtype}, not float16 or bfloat16"
    return words.refuse_other_than_integer(weight)


def _pack(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    codes, zeros = weight.unpacked_codes().t(), words.integer_zeros(weight).t()
    return {
        "qweight": words.pack(_reorder(codes.contiguous(), INTERLEAVED), BITS),
        "qzeros": words.pack(_reorder(zeros.contiguous(), INTERLEAVED), BITS),
        "scales": weight.scales.t().contiguous(),
    }


def _describe(weights: Mapping[str, QuantizedWeight], skipped: Sequence[str]) -> dict[str, Any]:
    each = weights.values()
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": BITS,
        "group_size": one_of_all("group size", [-1 if w.group_size == w.k else w.group_size for w in each]),
        "zero_point": True,
        "modules_to_not_convert": list(skipped) or None,
    }


AWQ = Format(
    name="awq",
    wants="quant_method awq, version gemm, 4 bits, zero_point true",
    required=("qweight", "qzeros", "scales"),
    matches=_matches,
    unpack=_unpack,
    refusal=_refusal,
    pack=_pack,
    describe=_describe,
)

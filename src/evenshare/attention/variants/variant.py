"""`Variant`: attention as its user writes it, in torch's operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from evenshare.attention.variants.program import program
from evenshare.attention.variants.source import layout_of, load

ScoreMod = Callable[..., Any]  # (score, b, h, q_idx, kv_idx) -> score
MaskMod = Callable[..., Any]  # (b, h, q_idx, kv_idx) -> bool
Transform = Callable[..., Any]  # (x, b, h, position, d) -> vector


class Variant:
    """What an attention call does to scores and vectors, which keys a row sees, and how weights follow from scores.

    score_mod(score, b, h, q_idx, kv_idx): the new score, given q k^T * sm_scale in fp32 (after a soft cap of the call's own).
    mask_mod(b, h, q_idx, kv_idx): whether the row sees the key, beside the call's own causal and window_left.
    Their arguments stand for single numbers, FlexAttention's signatures (torch.nn.attention.flex_attention): b is the number of the
    request in the batch, h that of the query head, kv_idx the key's position in its request. q_idx counts so that a request's last
    query row sits at its last key: row i of n, beside m keys, is at m - n + i, which is negative for rows before the first key.
    query(x, b, h, q_idx, d), key(x, b, h, kv_idx, d), value(x, b, h, kv_idx, d), output(x, b, h, q_idx, d): what becomes of each
    query, key, value and output vector before its use, in torch's operations: x is its D numbers in fp32, d is torch.arange(D), and
    h the head, which for keys and values is the KV head. x[i] is another element, x.mean() a mean. The result is rounded to q's
    dtype, that of `output` to the output's. Rows without keys stay 0. Keys and values of integers (kv_dtype) want key and value.
    softmax: False takes the scores themselves as weights, without a denominator: the output is the sum of score * value over the
    keys seen (sigmoid attention, Ramapuram et al., arXiv 2409.04431, with a sigmoid as score_mod); such a call has no lse.
    sinks: [Hq], float16, bfloat16 or float32: a score of each query head that joins the denominator, and so the lse, without a
    value (StreamingLLM, arXiv 2309.17453, section 3.3; gpt-oss). A row without keys keeps out = 0 and lse = -inf.

    The functions are called here, once, with symbols in place of numbers, and printed as device functions for the kernels;
    on the CPU backend they run in torch. Numbers they capture are part of the text. Tensors they capture (and `sinks`) become
    arguments of the kernel: a change of their values in place needs nothing new. Make a variant once and keep it.
    An index from a tensor's end is negative, as in torch; one outside the tensor reads 0 in the kernels and raises on the CPU.

    Two variants are equal if their text and tensors are the same.
    Raises VariantError, with the user's line, for an operation that has no device code and for a Python `if` on a traced value;
    TypeError or ValueError for other arguments.

    >>> slopes = torch.tensor([0.5, 0.25])
    >>> variant = Variant(score_mod=lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx))
    >>> variant.tensors[0] is slopes
    True
    """

    def __init__(
        self,
        *,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        query: Transform | None = None,
        key: Transform | None = None,
        value: Transform | None = None,
        output: Transform | None = None,
        softmax: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> None:
        transforms = {"query": query, "key": key, "value": value, "output": output}
        for name, function in {"score_mod": score_mod, "mask_mod": mask_mod, **transforms}.items():
            if function is not None and not callable(function):
                raise TypeError(f"{name}: got {type(function).__name__}, want a function or None")
        if not isinstance(softmax, bool):
            raise TypeError(f"softmax: got {softmax!r}, want True or False")
        if sinks is not None:
            if not isinstance(sinks, torch.Tensor):
                raise TypeError(f"sinks: got {type(sinks).__name__}, want a tensor or None")
            if sinks.dim() != 1 or sinks.dtype not in (torch.float16, torch.bfloat16, torch.float32):
                raise ValueError(
                    f"sinks: got {sinks.dtype} of shape {tuple(sinks.shape)}, want [num_qo_heads] of float16, bfloat16 or float32"
                )
            if not softmax:
                raise ValueError("sinks: got a tensor, want None with softmax=False, which has no denominator")
        self.score_mod, self.mask_mod, self.softmax, self.sinks = score_mod, mask_mod, softmax, sinks
        self.transforms = {name: function for name, function in transforms.items() if function is not None}
        self._text, tensors = program(score_mod, mask_mod, self.transforms, sinks, softmax)
        self.tensors: tuple[torch.Tensor, ...] = tuple(tensors)
        self._layouts = (softmax, *map(layout_of, tensors))

    def source(self) -> str:
        """The generated text: a Triton module with `modify`, `sink` if there are sinks, and the transforms."""
        return self._text

    def draw(self, qo_len: int, kv_len: int, b: int = 0, h: int = 0) -> str:
        """A picture in text of what request b's query head h sees, a line for each of qo_len rows beside kv_len keys.

        Hidden keys are dots; the darker a key, the more its score gains on one of 0.

        >>> print(Variant(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx <= q_idx).draw(2, 4))
        ███·
        ████
        """
        from evenshare.attention.variants.eager import Place, modified

        device = self.tensors[0].device if self.tensors else None
        heads, keys = (torch.arange(size, device=device) for size in (h + 1, kv_len))
        place = Place(b, heads, torch.arange(kv_len - qo_len, kv_len, device=device), keys)
        scores = modified(self, torch.zeros(h + 1, qo_len, kv_len, device=device), place)[h]
        hidden = float("-inf") if self.softmax else 0.0
        seen = scores[scores != hidden]
        low, high = (float(seen.min()), float(seen.max())) if len(seen) else (0.0, 0.0)

        def shade(score: float) -> str:
            return "·" if score == hidden else "█" if low == high else "░▒▓█"[int((score - low) / (high - low) * 3.99)]

        return "\n".join("".join(map(shade, row)) for row in scores.tolist())

    @cached_property
    def modify(self) -> Any:
        """The device function of scores (score, b, h, q_idx, kv_idx, args), whose shapes broadcast; -inf or 0 if hidden."""
        return load(self._text).modify

    @cached_property
    def functions(self) -> dict[str, Any]:
        """The device functions beside `modify` by name, None if not there: `rescore`, which hides nothing, `sink`, transforms."""
        names = ("sink", "query", "key", "value", "output")
        functions = {name: getattr(load(self._text), name, None) for name in names}
        only_score = None if self.score_mod is None else self.modify
        return functions | {"rescore": getattr(load(self._text), "rescore", None if self.mask_mod else only_score)}

    @cached_property
    def arguments(self) -> tuple[Any, ...] | None:
        """What the kernel takes as `args`: of each tensor itself, then size and stride of each dimension. None: no tensors."""
        flat: list[Any] = []
        for tensor in self.tensors:
            flat.append(tensor.detach().view(torch.uint8) if tensor.dtype == torch.bool else tensor.detach())
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                flat += size, stride
        return tuple(flat) or None

    @property
    def scores_in_base_2(self) -> bool:
        """Whether nobody sees the scores' values, so that the kernel may scale them as its softmax wants them."""
        return self.score_mod is None and self.softmax

    def check(self, num_qo_heads: int, device: torch.device) -> None:
        """Raise ValueError unless the sinks are of these heads and all tensors on this device."""
        if self.sinks is not None and self.sinks.shape[0] != num_qo_heads:
            raise ValueError(f"variant: got sinks of {self.sinks.shape[0]} heads, want num_qo_heads {num_qo_heads}")
        for tensor in self.tensors:
            if tensor.device != device:
                raise ValueError(
                    f"variant: got a captured tensor of shape {tuple(tensor.shape)} on {tensor.device}, want {device}"
                )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Variant):
            return NotImplemented
        return self._text == other._text and self._layouts == other._layouts

    def __hash__(self) -> int:
        return hash((self._text, self._layouts))

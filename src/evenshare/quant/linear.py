"""Quantised layers as torch modules, and what puts them into a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from evenshare.quant import cpu, op
from evenshare.quant.encodings import ENCODINGS
from evenshare.quant.functions import w4a16_matmul, w8a16_matmul
from evenshare.quant.rounding import quantize
from evenshare.quant.weight import QuantizedWeight

PARTS = ("codes", "scales", "zeros", "offsets", "permutation")


class _HoldsWeight(nn.Module):
    """A module around a `QuantizedWeight`, whose tensors are its buffers (None for those that the weight has not).

    State dicts hold the buffers and, as `_extra_state`, a tensor of k, group size, bits and encoding; loading wants the same form.
    `.to()` and its kin move the buffers, and never change their dtype: codes are codes, and scales were chosen with them.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    offsets: torch.Tensor | None
    permutation: torch.Tensor | None

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        for name in PARTS:
            self.register_buffer(name, getattr(weight, name))
        self.k, self.group_size, self.bits, self.encoding = weight.k, weight.group_size, weight.bits, weight.encoding
        self._quantized: QuantizedWeight | None = op.remember(weight)

    @property
    def quantized(self) -> QuantizedWeight:
        """The weight made of the buffers, with what its backends have packed."""
        weight, own = self._quantized, self._buffers
        # On the path of every token, so written out. Buffers are replaced one by one where somebody else's loader fills them.
        if (
            weight is None
            or weight.codes is not own["codes"]
            or weight.scales is not own["scales"]
            or weight.zeros is not own["zeros"]
            or weight.offsets is not own["offsets"]
            or weight.permutation is not own["permutation"]
        ):
            weight = self._renew()
        return weight

    def _renew(self) -> QuantizedWeight:
        parts: dict[str, Any] = {name: self._buffers[name] for name in PARTS}
        weight = QuantizedWeight(k=self.k, group_size=self.group_size, bits=self.bits, encoding=self.encoding, **parts)
        self._quantized = op.remember(weight)
        return weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        own = {id(tensor) for tensor in self._buffers.values() if tensor is not None}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if id(tensor) not in own or moved.dtype == tensor.dtype else tensor.to(moved.device)

        before = self._buffers["codes"]
        super()._apply(move, recurse)
        after = self._buffers["codes"]
        if after is not before and after is not None and before is not None:
            # From the meta device (to_empty) come no values yet; a state dict brings them.
            self._quantized = None if before.is_meta and not after.is_meta else self._renew()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._renew()  # whatever was packed is of the weight before

    def get_extra_state(self) -> torch.Tensor:
        """k, group size, bits and encoding as int64 [4]: a tensor, because safetensors files hold nothing else."""
        return torch.tensor((self.k, self.group_size, self.bits, ENCODINGS.index(self.encoding)))

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Raises ValueError if the state is of a weight of another form."""
        want = self.get_extra_state().tolist()
        if state.tolist() != want:
            raise ValueError(
                f"state dict: got (k, group_size, bits, encoding) = {state.tolist()}, want those of the module, {want}"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_quantized": None}  # packed forms are made again where a copy is used


class QuantLinear(_HoldsWeight):
    """y = x Wᵀ + b with 4- or 8-bit W [n, k]: `w4a16_matmul` or `w8a16_matmul` in the place of nn.Linear.

    forward: x [..., k], float32, float16 or bfloat16 -> [..., n] in x's dtype.

    Compiles with `fullgraph=True`: torch.compile sees one operator, `evenshare::w4a16`. For inference only.

    >>> import torch
    >>> from evenshare.quant import QuantLinear
    >>> layer = QuantLinear.from_linear(torch.nn.Linear(128, 64), group_size=32, refine=True)
    >>> layer(torch.randn(3, 128)).shape
    torch.Size([3, 64])
    """

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None = None, *, backend: str | None = None
    ) -> None:
        super().__init__(weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.out_features, self.in_features = weight.shape
        self.backend = backend
        self._matmul = w4a16_matmul if weight.bits == 4 else w8a16_matmul

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, group_size: int = 128, *, backend: str | None = None, **options: Any
    ) -> QuantLinear:
        """Quantise the weight of `linear`, keeping its bias; `options` are those of `evenshare.quantize`.

        On the meta device this makes a layer to load a state dict into (`assign=True`).
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear: got {type(linear).__name__}, want an nn.Linear")
        return cls(quantize(linear.weight.detach(), group_size, **options), linear.bias, backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            parts = (self.codes, self.scales, self.zeros, self.offsets, self.permutation, self.bias)
            return op.call(x, *parts, self.k, self.group_size, self.bits, self.encoding, None, self.backend)
        return self._matmul(x, self.quantized, bias=self.bias, backend=self.backend)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """`forward` for x [m, k] without checks and hooks: on a CPU they cost as much as a small product (8 us)."""
        if (
            self.bias is None
            and x.device.type == "cpu"
            and self.backend != "triton"
            and not torch.compiler.is_compiling()
        ):
            return cpu.matmul(x, self.quantized)
        return self.forward(x)

    def extra_repr(self) -> str:
        table = "" if self.encoding == "integer" else f", encoding={self.encoding}"
        return (
            f"in_features={self.k}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"bits={self.bits}, group_size={self.group_size}{table}"
        )


class QuantEmbedding(_HoldsWeight):
    """Embedding lookup in a quantised table [vocabulary, d]; only the rows asked for are dequantised, to `dtype`."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__(weight)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.dtype = dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.quantized.lookup(ids, self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.bits}"


def replace_linears(model: nn.Module, weights: Mapping[str, QuantizedWeight], *, backend: str | None = None) -> None:
    """Put a `QuantLinear` in the place of each nn.Linear named in `weights` (as in `model.named_modules()`), keeping its bias.

    The linear's own weight is dropped unread, so it may be on the meta device.
    Raises KeyError if there is no such module and ValueError if it is no linear of that shape.
    """
    for name, weight in weights.items():
        try:
            linear = model.get_submodule(name)
        except AttributeError as error:
            raise KeyError(f"weights[{name!r}]: the model has no module of that name") from error
        if not isinstance(linear, nn.Linear) or (linear.out_features, linear.in_features) != weight.shape:
            raise ValueError(
                f"weights[{name!r}]: got shape {weight.shape}, want that of a linear, but the model has {linear}"
            )
        model.set_submodule(name, QuantLinear(weight, linear.bias, backend=backend))


def quantize_model(
    model: nn.Module,
    group_size: int = 128,
    *,
    ignore: Iterable[str] = ("lm_head",),
    progress: Callable[[str, int, int], None] | None = None,
    backend: str | None = None,
    **options: Any,
) -> nn.Module:
    """Quantise every nn.Linear of `model` in place, one by one, without data; returns the model.

    ignore: modules that stay as they are, see `is_ignored`.
    progress: called with (name, layers done, layers in all) after each layer.
    backend: as in `w4a16_matmul`. options: those of `evenshare.quantize`: bits, symmetric, zero_points, refine, scale_dtype.

    Subclasses of nn.Linear are left alone: what they compute is theirs. A model on the meta device becomes one to load a state
    dict into. Raises ValueError if there is nothing to quantise.
    """
    names = find_linears(model, ignore)
    if not names:
        raise ValueError("model: got one without an nn.Linear that is not ignored, want at least one")
    for done, name in enumerate(names, 1):
        layer = QuantLinear.from_linear(model.get_submodule(name), group_size, backend=backend, **options)  # type: ignore[arg-type]
        model.set_submodule(name, layer)
        if progress is not None:
            progress(name, done, len(names))
    return model


def find_linears(model: nn.Module, ignore: Iterable[str] = ()) -> list[str]:
    """Names of the nn.Linear modules of `model` that are not ignored, in the model's order."""
    ignore = tuple(ignore)
    return [
        name
        for name, module in model.named_modules()
        if name and type(module) is nn.Linear and not is_ignored(name, ignore)
    ]


def is_ignored(name: str, ignore: Iterable[str]) -> bool:
    """Whether a module is named by a pattern: its name, the end of its name after a dot ("lm_head", "mlp.gate"), or a shell
    pattern for the whole name ("model.layers.0.*")."""
    return any(name == p or name.endswith(f".{p}") or fnmatchcase(name, p) for p in ignore)

"""How transformers loads and saves 4-bit checkpoints with evenshare: a quantization config and a quantizer of its own.

`from_pretrained` asks the config class of a checkpoint's `quant_method` to read `quantization_config`. `take_over` puts a
`ConfigReader` there: what a format of `evenshare.quant.formats` reads becomes a `CheckpointConfig`, everything else goes to
transformers' own class. A `CheckpointConfig` leads to `CheckpointQuantizer`. Its linears wait as `PackedLinear`, with buffers
named and shaped as in the files, so transformers fills them like any other; then each becomes a `QuantLinear`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from evenshare.quant import QuantEmbedding, QuantLinear, replace_linears
from evenshare.quant.formats.format import Format
from evenshare.quant.formats.registry import find_format

__all__ = [
    "CheckpointConfig",
    "CheckpointQuantizer",
    "QuantEmbedding",
    "QuantLinear",
    "release",
    "replace_linears",
    "take_over",
]

NAME = "evenshare"
METHODS = ("gptq", "awq", "compressed-tensors", "hqq", "modelopt")


def format_of(config: Mapping[str, Any]) -> Format | None:
    """The format of a quantization_config whose layers can wait as `PackedLinear`, or None."""
    try:
        form = find_format(config)
    except ValueError:
        return None
    parts = (*form.required, *form.optional)
    return form if form.separator == "." and not any("." in part for part in parts) else None


class CheckpointConfig(QuantizationConfigMixin):
    """A checkpoint's quantization_config, kept as it is written."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.quant_method = NAME  # by which transformers finds the quantizer

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.config)


class ConfigReader:
    """In the place of transformers' config class for one quant_method."""

    def __init__(self, original: type[QuantizationConfigMixin] | None) -> None:
        self.original = original

    def from_dict(self, config: Mapping[str, Any], **kwargs: Any) -> Any:
        if format_of(config) is not None:
            return CheckpointConfig(config)
        if self.original is None:
            find_format(config)  # raises, and says which formats are read
            raise ValueError(f"quantization_config: got {dict(config)}, which transformers cannot load")
        return self.original.from_dict(config, **kwargs)


def take_over() -> None:
    """Let `from_pretrained` load the checkpoints of `METHODS` into `QuantLinear`; a second call changes nothing."""
    auto.AUTO_QUANTIZER_MAPPING[NAME] = CheckpointQuantizer
    configs = auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    for method in METHODS:
        if not isinstance(configs.get(method), ConfigReader):
            configs[method] = ConfigReader(configs.get(method))


def release() -> None:
    """Give back what `take_over` took."""
    auto.AUTO_QUANTIZER_MAPPING.pop(NAME, None)
    configs = auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    for method in METHODS:
        reader = configs.get(method)
        if isinstance(reader, ConfigReader):
            if reader.original is None:
                del configs[method]
            else:
                configs[method] = reader.original


class PackedLinear(nn.Module):
    """A linear layer whose tensors are on their way from the files: buffers named as there, on the meta device until then."""

    def __init__(self, linear: nn.Linear, parts: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._model_shape = linear.out_features, linear.in_features
        for name, tensor in parts.items():
            self.register_buffer(name, tensor)
        self.bias = linear.bias

    def quantized(self, form: Format, config: Mapping[str, Any]) -> QuantLinear:
        weight = form.read(dict(self.named_buffers()), config)
        if weight.shape != self._model_shape:
            raise ValueError(f"got a weight of shape {weight.shape}, want {self._model_shape}, as the model has it")
        return QuantLinear(weight, self.bias)


class CheckpointQuantizer(HfQuantizer):
    """Loads a quantised checkpoint into `QuantLinear`, and saves such a model in the format it came from."""

    requires_calibration = True

    def __init__(self, quantization_config: CheckpointConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        form = format_of(quantization_config.config)
        assert form is not None  # ConfigReader made the config
        self.config, self.form = quantization_config.config, form

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files or not all(str(file).endswith(".safetensors") for file in checkpoint_files):
            raise ValueError(f"checkpoint: got {checkpoint_files}, want safetensors files")
        tensors = _meta_tensors(checkpoint_files)
        mark = f"{self.form.separator}{self.form.required[0]}"
        layers = [name.removesuffix(mark) for name in tensors if name.endswith(mark)]
        rename = _renamer(model)
        for layer in layers:
            parts = {
                part: tensors[full]
                for part in (*self.form.required, *self.form.optional)
                if (full := f"{layer}{self.form.separator}{part}") in tensors
            }
            missing = [part for part in self.form.required if part not in parts]
            if missing:
                raise ValueError(f"checkpoint: layer {layer!r}: got {sorted(parts)}, want {missing} as well")
            name = rename(layer)
            linear = _submodule(model, name)
            if not isinstance(linear, nn.Linear):
                raise ValueError(
                    f"checkpoint: got a quantised layer {layer!r}, but the model has {type(linear).__name__} "
                    f"at {name!r}, want an nn.Linear"
                )
            model.set_submodule(name, PackedLinear(linear, parts))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        packed = [(name, module) for name, module in model.named_modules() if isinstance(module, PackedLinear)]
        for name, module in packed:
            try:
                layer = module.quantized(self.form, self.config)
            except (ValueError, TypeError) as error:
                raise ValueError(f"checkpoint: layer {name!r}: {error}") from error
            model.set_submodule(name, layer)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The state dict with the tensors of the checkpoint's format, for `save_pretrained`."""
        state = model.state_dict()
        for name, module in model.named_modules():
            if isinstance(module, QuantLinear):
                for key in [key for key in state if key.startswith(f"{name}.") and key != f"{name}.bias"]:
                    del state[key]
                tensors = self.form.write(module.quantized)
                state.update({f"{name}{self.form.separator}{part}": tensor for part, tensor in tensors.items()})
        return state, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        quantized = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantLinear)]
        for name, module in quantized:
            weight = module.quantized
            linear = nn.Linear(weight.k, weight.n, bias=module.bias is not None, device="meta")
            linear.weight = nn.Parameter(weight.dequantize(dtype or torch.float32), requires_grad=False)
            linear.bias = module.bias
            model.set_submodule(name, linear)
        return model

    def is_serializable(self) -> bool:
        return self.form.describe is not None

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def _meta_tensors(files: Sequence[str]) -> dict[str, torch.Tensor]:
    """Name -> a tensor on the meta device of its shape and dtype: only the files' headers are read."""
    from safetensors import safe_open

    with torch.device("meta"):
        found = {}
        for path in files:
            with safe_open(str(path), "pt") as file:
                for name in file.keys():  # noqa: SIM118  not a mapping
                    part = file.get_slice(name)
                    found[name] = torch.empty(part.get_shape(), dtype=_DTYPES[part.get_dtype()])
    return found


# safetensors' names of dtypes, those that a reader takes.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def _renamer(model: Any) -> Any:
    """Layer name in the files -> module name in the model, by the renamings that transformers will apply to the tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    state = model.state_dict()

    def rename(layer: str) -> str:
        key = f"{layer}.weight"
        renamed, converted = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if converted is not None:
            raise ValueError(
                f"checkpoint: got a quantised layer {layer!r} that the model merges with others (experts?)"
            )
        if renamed not in state and key in state:
            renamed = key
        return renamed.removesuffix(".weight")

    return rename


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None

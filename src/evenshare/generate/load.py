"""A model and its tokenizer from a GGUF file or a Hugging Face folder, with evenshare's attention and linear layers."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from evenshare.generate.architecture import (
    BLOCK_MODULES,
    Architecture,
    find_architecture,
    head_counts,
    make_config,
    model_class,
)
from evenshare.generate.errors import ModelFileError
from evenshare.generate.fetch import fetch_model
from evenshare.generate.tokenizer import load_tokenizer
from evenshare.quant import QuantizedWeight, prepare
from evenshare.quant.formats.gguf import GGUFError, GGUFFile, read_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name. Raises ValueError for others than bfloat16, float32 and float16."""
    if name not in DTYPES:
        raise ValueError(f"dtype: got {name!r}, want one of {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to generate: transformers' module, its tokenizer and where they came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: Path
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Weights:
    """A file's tensors under transformers' names: quantised ones by module, others by parameter."""

    quantized: dict[str, QuantizedWeight]
    plain: dict[str, torch.Tensor]


def load_model(
    path: str | Path | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
) -> LoadedModel:
    """Load a model for generation.

    path: a GGUF file (architectures llama, qwen2, qwen3), a Hugging Face folder, or None for SmolLM2-135M-Instruct in 4 bits,
        fetched once. 4- and 8-bit weights keep the file's own codes.
    device: "cpu", "cuda" or "cuda:N". dtype: of activations and KV cache, None means bfloat16.
    backend: as in `w4a16_matmul`; None chooses by device.

    Raises ModelFileError if the file is missing, damaged or not supported; ValueError for an unknown device.
    """
    target = _device(device)
    dtype = torch.bfloat16 if dtype is None else dtype
    path = fetch_model() if path is None else Path(path)
    try:
        with _no_collection():
            if path.is_dir():
                return _load_folder(path, target, dtype)
            return _load_gguf(read_gguf(path), target, dtype, backend)
    except FileNotFoundError as error:
        raise ModelFileError(
            f"model: got {path}, which does not exist; want a GGUF file or a Hugging Face folder"
        ) from error
    except GGUFError as error:
        raise ModelFileError(f"model: {error}") from error


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: got {device!r}, want cpu, cuda or cuda:N") from error
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {device!r}, want cpu, cuda or cuda:N")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: got {device!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
    return found


def _load_folder(path: Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    if not (path / "config.json").is_file():
        raise ModelFileError(f"model: got folder {path} without config.json, want a Hugging Face model folder")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from evenshare.compat.transformers import enable
    from evenshare.compat.transformers.layers import fuse_layers

    enable()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="evenshare")
    except (OSError, ValueError, ImportError) as error:
        raise ModelFileError(f"model: transformers cannot load {path}: {error}") from error
    model.to(device).eval()
    if fuse_layers(model):  # a quantised checkpoint
        _pack(model, dtype)
    return LoadedModel(model, tokenizer, path, dtype, device)


def _load_gguf(file: GGUFFile, device: torch.device, dtype: torch.dtype, backend: str | None) -> LoadedModel:
    architecture = find_architecture(file.metadata)
    # Reading and packing weights runs beside importing transformers and reading the tokenizer: of 5.5 s 1.5 are saved.
    with ThreadPoolExecutor(1) as worker, _one_thread():
        weights = worker.submit(_read_and_pack_head, file, architecture, device, dtype, backend)
        from evenshare.compat.transformers import enable

        enable()
        model_class(architecture)
        model = build_model(file, weights.result(), device, dtype, backend=backend)
        packing = worker.submit(_pack, model, dtype)
        tokenizer = load_tokenizer(file.path, lambda: file.metadata)
        packing.result()
    return LoadedModel(model, tokenizer, file.path, dtype, device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Importing transformers makes a million objects that all stay: looking for garbage among them takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Loading is thousands of short operators; each would wake torch's pool for less work than the waking costs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _read_and_pack_head(
    file: GGUFFile, architecture: Architecture, device: torch.device, dtype: torch.dtype, backend: str | None
) -> Weights:
    weights = read_weights(file, architecture, device)
    head = weights.quantized.get("lm_head", weights.quantized.get("model.embed_tokens"))
    if head is not None:  # the largest by far, and never joined with another
        prepare(head, dtype, backend)
    return weights


def _pack(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Pack weights for the backend now, not at the first token."""
    from evenshare.compat.transformers.quantizers import QuantLinear

    for module in model.modules():
        if isinstance(module, QuantLinear):
            prepare(module.quantized, dtype, module.backend)


def build_model(
    file: GGUFFile, weights: Weights, device: torch.device, dtype: torch.dtype, *, backend: str | None = None
) -> PreTrainedModel:
    """transformers' model of a GGUF file around its `weights`, built without allocating what they will replace."""
    from evenshare.compat.transformers.layers import fuse_layers
    from evenshare.compat.transformers.quantizers import QuantEmbedding, QuantLinear, replace_linears

    architecture = find_architecture(file.metadata)
    tied = "output.weight" not in file
    config = make_config(architecture, file.metadata, tied=tied, attention_bias="blk.0.attn_q.bias" in file)
    with torch.device("meta"):
        model = model_class(architecture)(config)
    quantized, plain = dict(weights.quantized), weights.plain
    embedding = quantized.pop("model.embed_tokens", None)
    if embedding is not None:
        model.set_submodule("model.embed_tokens", QuantEmbedding(embedding, dtype))
        if tied:
            model.set_submodule("lm_head", QuantLinear(embedding, backend=backend))
    replace_linears(model, quantized, backend=backend)
    plain = {name: tensor.to(device, dtype) for name, tensor in plain.items()}
    if tied and embedding is None:
        plain["lm_head.weight"] = plain["model.embed_tokens.weight"]
    parameters = dict(model.named_parameters(remove_duplicate=False))  # quantised layers have theirs, as buffers
    missing, unexpected = model.load_state_dict(plain, strict=False, assign=True)
    missing = [name for name in missing if name in parameters]
    if missing or unexpected:
        raise ModelFileError(f"{file.path}: weights missing {missing[:3]}, unexpected {unexpected[:3]}")
    # Built on the meta device, so its tables of frequencies are empty; it is a few hundred bytes.
    rotary = type(model.model.rotary_emb)(config)
    if "rope_freqs.weight" in file:
        rotary.inv_freq /= file["rope_freqs.weight"]
    model.model.rotary_emb = rotary.to(device)
    fuse_layers(model)
    model.set_attn_implementation("evenshare")
    model.generation_config.eos_token_id = config.eos_token_id
    return model.eval().requires_grad_(False)


def read_weights(file: GGUFFile, architecture: Architecture, device: torch.device) -> Weights:
    """Every tensor of the file on `device`, rows of q and k in transformers' order."""
    q_heads, kv_heads = head_counts(file.metadata)
    quantized: dict[str, QuantizedWeight] = {}
    plain: dict[str, torch.Tensor] = {}
    for name in file:
        module, leaf = _module_name(file, name)
        if not module:
            continue
        tensor: Any = file[name]
        rows = None
        if architecture.interleaved_rope and module.endswith(("q_proj", "k_proj")):
            rows = half_split_rows(tensor.shape[0], q_heads if module.endswith("q_proj") else kv_heads)
        if isinstance(tensor, QuantizedWeight):
            quantized[module] = (tensor if rows is None else tensor.take_rows(rows)).to(device)
        else:
            plain[f"{module}.{leaf}"] = tensor if rows is None else tensor[rows]
    return Weights(quantized, plain)


def _module_name(file: Mapping[str, Any], name: str) -> tuple[str, str]:
    """("model.layers.3.self_attn.q_proj", "weight") of "blk.3.attn_q.weight"; ("", "") for a tensor that is no parameter."""
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "rope_freqs": ""}
    stem, _, leaf = name.rpartition(".")
    if stem in whole:
        return whole[stem], leaf if whole[stem] else ""
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in BLOCK_MODULES:
        return f"model.layers.{parts[1]}.{BLOCK_MODULES[parts[2]]}", leaf
    raise ModelFileError(f"tensor {name!r}: not known, want the tensors of a llama-like model")


def half_split_rows(num_rows: int, num_heads: int) -> torch.Tensor:
    """Rows of q or k in the order of half-split rope, as indices into the interleaved order that converters write for llama.

    Interleaved rope turns the pairs (2i, 2i + 1), half-split rope the pairs (i, i + D / 2): row i of a head comes from row 2i,
    row i + D / 2 from row 2i + 1.
    """
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)

"""The tokenizer inside a GGUF file as a transformers tokenizer, built once and cached as tokenizer.json."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenshare.generate.errors import ModelFileError
from evenshare.generate.fetch import cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Part of the cache key: raise it when a tokenizer built from the same file changes.
_FORMAT = "1"
# The metadata, tokens and merges included, lie at the start of the file: 2 MB for 49k tokens, 8 MB for 128k.
_KEYED_BYTES = 16 << 20

# `tokenizer.ggml.token_type`: how a token takes part in the text.
_CONTROL, _USER_DEFINED = 3, 4

# How text is cut into words before byte-pair merging, by `tokenizer.ggml.pre`. None: GPT-2's own rule.
_WORDS_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_QWEN2 = _WORDS_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_WORDS = {
    "smollm": None, "gpt-2": None, "default": None, "llama-bpe": _WORDS_LLAMA3, "llama3": _WORDS_LLAMA3, "qwen2": _WORDS_QWEN2,
}  # fmt: skip


def load_tokenizer(path: Path, metadata: Callable[[], Mapping[str, Any]]) -> PreTrainedTokenizerFast:
    """The tokenizer of the GGUF file at `path`, from the cache if this file was seen before.

    metadata: gives the file's key-value pairs; called only when the tokenizer has to be built.

    Raises ModelFileError if the file holds no tokenizer or one of an unknown kind.
    """
    from transformers import PreTrainedTokenizerFast

    folder = cache_dir() / "tokenizers" / _cache_key(path)
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = _build(path, metadata())
    _store(tokenizer, folder)
    return tokenizer


def _cache_key(path: Path) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {path.stat().st_size} ".encode())
    with path.open("rb") as source:
        digest.update(source.read(_KEYED_BYTES))
    return digest.hexdigest()[:32]


def _store(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A rename makes the folder appear complete or not at all. A cache that cannot be written costs time, not the run."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".build-", dir=folder.parent))
    except OSError:
        return
    try:
        tokenizer.save_pretrained(fresh)
        os.replace(fresh, folder)
    except OSError:  # another process was first, or the disk is full
        shutil.rmtree(fresh, ignore_errors=True)


def _build(path: Path, metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ModelFileError(f"{path}: no tokenizer.ggml.model in its metadata, want a GGUF file with a tokenizer")
    if kind == "gpt2":
        return build_bpe(metadata)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # transformers raises whatever its converters meet
        raise ModelFileError(f"{path}: transformers cannot convert its tokenizer ({kind}): {error}") from error


def build_bpe(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (`tokenizer.ggml.model` = gpt2) from GGUF metadata.

    Raises ModelFileError for a way of splitting words (`tokenizer.ggml.pre`) that is not known here.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokens = list(metadata["tokenizer.ggml.tokens"])
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    words = metadata.get("tokenizer.ggml.pre", "default")
    if words not in _WORDS:
        raise ModelFileError(f"tokenizer.ggml.pre: got {words!r}, want one of {', '.join(_WORDS)}")

    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    pattern = _WORDS[words]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if words == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(t, normalized=False, special=True)
            for t, kind in zip(tokens, kinds, strict=False)
            if kind == _CONTROL
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    )

    named = {
        name: tokens[metadata[key]]
        for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        )
        if metadata.get(key) is not None
    }
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A", special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])]
                ),
            ]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )

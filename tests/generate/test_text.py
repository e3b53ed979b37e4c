"""Tokenizer from GGUF metadata, its cache, and text from tokens as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenshare.generate import ModelFileError, TextStream, encode_prompt
from evenshare.generate.tokenizer import build_bpe, load_tokenizer
from tests.generate.gguf_models import END, TEMPLATE, vocabulary


def metadata(**changes: Any) -> dict[str, Any]:
    tokens, merges = vocabulary()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.chat_template": TEMPLATE,
    } | changes


def test_text_survives() -> None:
    tokenizer = build_bpe(metadata())
    text = "hello world, it's 12 o'clock\n\t naïve 漢字 🙂 "
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids)[:2] == ["hello", "Ġw"]
    assert tokenizer.eos_token == END


def test_special_tokens_are_one_token() -> None:
    tokenizer = build_bpe(metadata())
    assert tokenizer(f"a{END}b")["input_ids"][1] == tokenizer.eos_token_id


def test_begin_token_only_if_the_file_says_so() -> None:
    plain = build_bpe(metadata(**{"tokenizer.ggml.bos_token_id": 5}))("hello")["input_ids"]
    marked = build_bpe(metadata(**{"tokenizer.ggml.bos_token_id": 5, "tokenizer.ggml.add_bos_token": True}))
    assert marked("hello")["input_ids"] == [5, *plain]


def test_unknown_splitting() -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer.ggml.pre: got 'klingon', want one of smollm"):
        build_bpe(metadata(**{"tokenizer.ggml.pre": "klingon"}))


def test_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSHARE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF one")
    first = load_tokenizer(file, metadata)
    again = load_tokenizer(file, lambda: pytest.fail("built twice"))
    assert again("hello 12").input_ids == first("hello 12").input_ids
    assert again.chat_template == TEMPLATE
    assert again.eos_token == END
    file.write_bytes(b"GGUF two")  # another file under the same name
    with pytest.raises(ModelFileError, match=r"no tokenizer.ggml.model"):
        load_tokenizer(file, dict)


def test_unwritable_cache_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVENSHARE_CACHE", str(tmp_path / "file"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert load_tokenizer(file, metadata)("hello").input_ids


def test_chat_and_raw() -> None:
    tokenizer = build_bpe(metadata())
    raw = encode_prompt(tokenizer, "hello", chat=False)
    chat = encode_prompt(tokenizer, "hello")
    assert tokenizer.decode(chat) == f"[user] hello{END}[assistant] "
    assert tokenizer.decode(raw) == "hello"
    assert encode_prompt(tokenizer, "hello", chat=True) == chat
    bare = build_bpe(metadata(**{"tokenizer.chat_template": None}))
    assert encode_prompt(bare, "hello") == raw
    with pytest.raises(ModelFileError, match="no chat template; use --raw"):
        encode_prompt(bare, "hello", chat=True)


@pytest.mark.parametrize("text", ["hello world", "漢字 🙂🙂 é", "one\ntwo\n\nthree 🙂\n"])
def test_stream_gives_whole_characters(text: str) -> None:
    tokenizer = build_bpe(metadata())
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokenizer(text)["input_ids"]]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.finish() == text


def test_stream_ends_with_half_a_character() -> None:
    tokenizer = build_bpe(metadata())
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in tokenizer("a🙂")["input_ids"][:3]] == ["a", "", ""]
    assert stream.finish() == "\ufffd"

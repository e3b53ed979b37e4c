"""Text in and out: chat templates, and text from tokens as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenshare.generate.errors import ModelFileError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, *, chat: bool | None = None) -> list[int]:
    """Token ids of a prompt.

    chat: True makes it the user's turn of a chat by the model's own template, False takes the text as it is, None is True if the
    model has a template.

    Raises ModelFileError for chat=True without a template, ValueError for an empty prompt.
    """
    if not prompt:
        raise ValueError("prompt: got an empty text, want at least one character")
    if chat and tokenizer.chat_template is None:
        raise ModelFileError("chat: the model has no chat template; use --raw")
    if chat is False or tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    turns = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"])


class TextStream:
    """Turns tokens into pieces of text that never change afterwards.

    A character may take several tokens, and decoding a part of them gives U+FFFD: such an end is held back until it is whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = (
            0  # of the line that is being decoded: earlier ones are done, so the cost does not grow with the text
        )
        self._sent = 0  # characters of that line given out

    def push(self, token: int) -> str:
        """The text that `token` completes, maybe empty."""
        self._tokens.append(token)
        text = self._text()
        if text.endswith("\ufffd"):
            return ""
        piece = text[self._sent :]
        self._sent = len(text)
        if text.endswith("\n"):
            self._start, self._sent = len(self._tokens), 0
        return piece

    def finish(self) -> str:
        """What was held back."""
        return self._text()[self._sent :]

    def _text(self) -> str:
        return self._tokenizer.decode(self._tokens[self._start :], skip_special_tokens=True)

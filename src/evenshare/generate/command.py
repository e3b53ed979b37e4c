"""The command `evenshare generate`: what it prints, and how errors end it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenshare.generate.errors import GenerateError, MissingExtraError

if TYPE_CHECKING:
    from evenshare.generate.load import LoadedModel

EXTRA = ("transformers", "tokenizers", "jinja2")


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    prompts: tuple[str, ...]
    model: str | None = None
    device: str = "cpu"
    max_new_tokens: int = 128
    temperature: float = 0.0
    chat: bool | None = None
    dtype: str = "bfloat16"
    backend: str | None = None
    seed: int = 0


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Errors that the user can cure end the program with one line: exit code 2 for wrong input, 1 for the surroundings."""
    try:
        yield
    except GenerateError as error:
        _stop(str(error), error.exit_code)
    except (ValueError, TypeError) as error:
        _stop(str(error), 2)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise SystemExit(130) from None


def _stop(message: str, exit_code: int) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print("[bold red]error:[/]", end=" ")
    print(message, file=sys.stderr)
    raise SystemExit(exit_code) from None


def run(request: Request) -> None:
    """Load the model, answer the prompts on stdout, and say on stderr how long it took."""
    with named_errors():
        _check(request)
        started = time.perf_counter()
        loaded = _load(request)
        _say(f"{loaded.path.name} on {loaded.device}, {request.dtype}: loaded in {time.perf_counter() - started:.1f} s")
        if len(request.prompts) == 1:
            _answer_one(loaded, request)
        else:
            _answer_several(loaded, request)


def _check(request: Request) -> None:
    """What is wrong without a model is said before one is loaded."""
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {request.max_new_tokens}, want at least 1")
    if request.temperature < 0:
        raise ValueError(f"temperature: got {request.temperature}, want 0 or more")
    if any(not prompt for prompt in request.prompts):
        raise ValueError("prompt: got an empty text, want at least one character")


def _load(request: Request) -> LoadedModel:
    try:
        from evenshare.generate.load import dtype_of, load_model

        return load_model(request.model, request.device, dtype_of(request.dtype), backend=request.backend)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in EXTRA:
            raise MissingExtraError(f"{error.name} is not installed: pip install evenshare[generate]") from error
        raise


def _answer_one(loaded: LoadedModel, request: Request) -> None:
    from evenshare.generate.decode import stream_tokens
    from evenshare.generate.text import TextStream, encode_prompt

    ids = encode_prompt(loaded.tokenizer, request.prompts[0], chat=request.chat)
    started = time.perf_counter()
    times = []
    text = TextStream(loaded.tokenizer)
    tokens = stream_tokens(
        loaded, ids, max_new_tokens=request.max_new_tokens, temperature=request.temperature, seed=request.seed
    )
    for token in tokens:
        times.append(time.perf_counter())
        print(text.push(token), end="", flush=True)
    print(text.finish(), flush=True)
    if not times:
        _say(f"{len(ids)} prompt tokens; the model ended the answer at once")
        return
    line = f"{len(ids)} prompt tokens, first token after {1000 * (times[0] - started):.0f} ms"
    if len(times) > 1:
        line += f"; {len(times)} tokens at {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s"
    _say(line)


def _answer_several(loaded: LoadedModel, request: Request) -> None:
    from rich.console import Console

    from evenshare.generate.decode import batch_tokens
    from evenshare.generate.text import encode_prompt

    prompts = [encode_prompt(loaded.tokenizer, prompt, chat=request.chat) for prompt in request.prompts]
    started = time.perf_counter()
    answers = batch_tokens(
        loaded, prompts, max_new_tokens=request.max_new_tokens, temperature=request.temperature, seed=request.seed
    )
    elapsed = time.perf_counter() - started
    console = Console(highlight=False)
    for prompt, answer in zip(request.prompts, answers, strict=True):
        console.rule(prompt.replace("\n", " ")[:60], align="left")
        print(loaded.tokenizer.decode(answer, skip_special_tokens=True), flush=True)
    total = sum(map(len, answers))
    _say(f"{len(prompts)} prompts, {total} tokens in {elapsed:.1f} s: {total / elapsed:.1f} tokens/s together")


def _say(line: str) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print(line, style="dim", markup=False)

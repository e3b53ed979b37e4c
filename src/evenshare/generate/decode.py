"""Token loops: one prompt token by token, several by transformers' continuous batching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from evenshare.generate.load import LoadedModel

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig

PAGE_SIZE = 64  # tokens of a page: whole tiles for the kernels, and little is left unused at a request's end
MAX_BATCH_TOKENS = 512  # tokens of a step; longer prompts are cut into chunks


def stop_tokens(loaded: LoadedModel) -> frozenset[int]:
    """Tokens that end an answer."""
    eos = loaded.model.generation_config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def check_request(loaded: LoadedModel, prompt: Sequence[int], max_new_tokens: int, temperature: float) -> None:
    """Raises ValueError for a request that cannot be served."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, want at least 1")
    if temperature < 0:
        raise ValueError(f"temperature: got {temperature}, want 0 (greedy) or more")
    if not prompt:
        raise ValueError("prompt: got no tokens, want at least one")
    limit = loaded.model.config.max_position_embeddings
    if len(prompt) + max_new_tokens > limit:
        raise ValueError(
            f"prompt + max_new_tokens: got {len(prompt)} + {max_new_tokens}, want at most the model's {limit} positions"
        )


def stream_tokens(
    loaded: LoadedModel, prompt: Sequence[int], *, max_new_tokens: int, temperature: float = 0.0, seed: int = 0
) -> Iterator[int]:
    """Generate from `prompt` (token ids), yielding tokens as they come; the stop token is not yielded.

    temperature: 0 takes the likeliest token; otherwise logits are divided by it and sampled with `seed`.

    Raises ValueError for an empty or too long prompt, max_new_tokens < 1 or temperature < 0.
    """
    check_request(loaded, prompt, max_new_tokens, temperature)
    return _stream(loaded, prompt, max_new_tokens, temperature, seed)


def _stream(
    loaded: LoadedModel, prompt: Sequence[int], max_new_tokens: int, temperature: float, seed: int
) -> Iterator[int]:
    from evenshare.compat.transformers.cache import InPlaceCache

    model, stops, device = loaded.model, stop_tokens(loaded), loaded.device
    generator = torch.Generator(device).manual_seed(seed)
    cache = InPlaceCache(model.config.num_hidden_layers)
    ids = torch.tensor([list(prompt)], device=device)
    for _ in range(max_new_tokens):
        # Entered for each step and never across a yield: the caller's code runs in its own mode.
        with torch.inference_mode():
            logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            ids = choose_token(logits, temperature, generator)
        token = int(ids)  # the step's only sync
        if token in stops:
            return
        yield token


def choose_token(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """logits [1, vocabulary] -> int64 [1, 1]."""
    if temperature == 0:
        # max is 3 times as fast as argmax on a CPU (50 us against 165 us for 49152 bfloat16 logits); both take the first of equals.
        return logits.max(-1, keepdim=True).indices
    return torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1, generator=generator)


def batch_tokens(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Generate from several prompts at once by transformers' continuous batching over `paged|evenshare`.

    Returns each prompt's new tokens, in order, without the stop token. Raises ValueError as `stream_tokens` does, and
    RuntimeError if transformers gives up a request.
    """
    for prompt in prompts:
        check_request(loaded, prompt, max_new_tokens, temperature)
    from transformers import GenerationConfig

    model, stops = loaded.model, stop_tokens(loaded)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stops) or None,
        pad_token_id=model.config.pad_token_id,
        **sampling,
    )
    single = model.config._attn_implementation
    # Without the prefix transformers may switch to FlashAttention where that is installed.
    model.set_attn_implementation("paged|evenshare")
    try:
        results = model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=config,
            continuous_batching_config=_batching(prompts, max_new_tokens, seed),
        )
    finally:
        model.set_attn_implementation(single)
    answers = list(results.values())  # in the order of the prompts
    errors = [answer.error for answer in answers if answer.error is not None]
    if errors or len(answers) != len(prompts):
        raise RuntimeError(
            f"continuous batching: {len(answers)} of {len(prompts)} prompts answered; {'; '.join(errors)}"
        )
    return [[token for token in answer.generated_tokens if token not in stops] for answer in answers]


def _batching(prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> ContinuousBatchingConfig:
    """A cache for just these requests: the default takes most of the machine's memory."""
    from transformers import ContinuousBatchingConfig

    blocks = sum(-(-(len(prompt) + max_new_tokens) // PAGE_SIZE) for prompt in prompts)
    return ContinuousBatchingConfig(
        block_size=PAGE_SIZE, num_blocks=blocks + len(prompts), max_batch_tokens=MAX_BATCH_TOKENS, seed=seed
    )

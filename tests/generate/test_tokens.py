"""Greedy tokens are those of transformers' own code on the dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evenshare.generate import batch_tokens, load_model, stream_tokens
from evenshare.generate.load import LoadedModel
from tests.generate.gguf_models import greedy, write_model

PROMPT_LENGTHS = (1, 3, 17, 40, 130)
NEW_TOKENS = 64


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab_size - 1, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENSHARE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> str:
    """Where the model under test runs; transformers' oracle stays on the CPU."""
    return request.param


@pytest.fixture(scope="module", params=["llama", "llama-untied", "qwen2"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, place: str
) -> tuple[LoadedModel, list[list[int]]]:
    """A model and what transformers generates after each prompt."""
    architecture, _, form = request.param.partition("-")
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    oracle = write_model(path, architecture, tied=form != "untied")
    loaded = load_model(path, place, torch.float32)
    want = [greedy(oracle, prompt, NEW_TOKENS) for prompt in prompts(oracle.config.vocab_size)]
    assert all(len(set(tokens)) > NEW_TOKENS // 4 for tokens in want)  # a model that repeats itself would hide faults
    return loaded, want


def test_single_prompts(case: tuple[LoadedModel, list[list[int]]]) -> None:
    loaded, want = case
    for prompt, tokens in zip(prompts(loaded.model.config.vocab_size), want, strict=True):
        assert list(stream_tokens(loaded, prompt, max_new_tokens=NEW_TOKENS)) == tokens


def test_continuous_batching(case: tuple[LoadedModel, list[list[int]]]) -> None:
    loaded, want = case
    assert batch_tokens(loaded, prompts(loaded.model.config.vocab_size), max_new_tokens=NEW_TOKENS) == want
    assert loaded.model.config._attn_implementation == "evenshare"


def test_bfloat16_error_is_that_of_the_dtype(tmp_path: Path) -> None:
    """Prompt and single tokens go two ways through the layers; both stay as close to float32 as transformers' own bfloat16."""
    from evenshare.compat.transformers.cache import InPlaceCache

    path = tmp_path / "tiny.gguf"
    oracle = write_model(path)
    loaded = load_model(path, "cpu", torch.bfloat16)
    ids = torch.tensor([prompts(oracle.config.vocab_size)[2]])
    with torch.inference_mode():
        exact = oracle(ids).logits
        theirs = oracle.to(torch.bfloat16)(ids).logits.float()
        whole = loaded.model(ids, past_key_values=InPlaceCache(3)).logits.float()
        cache = InPlaceCache(3)
        steps = [loaded.model(ids[:, i : i + 1], past_key_values=cache).logits.float() for i in range(ids.shape[1])]
    budget = 2 * (theirs - exact).square().mean().sqrt()
    for ours in (whole, torch.cat(steps, 1)):
        assert (ours - exact).square().mean().sqrt() < budget
    assert loaded.model.model.layers[0]._loop is not None  # the single tokens did take the loop


def test_sampling_repeats_with_its_seed(case: tuple[LoadedModel, list[list[int]]]) -> None:
    loaded, _ = case
    runs = [list(stream_tokens(loaded, [5, 6], max_new_tokens=12, temperature=2.0, seed=s)) for s in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


def test_stop_token_ends_the_answer(case: tuple[LoadedModel, list[list[int]]]) -> None:
    loaded, want = case
    stop = want[0][5]
    loaded.model.generation_config.eos_token_id = stop
    try:
        expected = want[0][: want[0].index(stop)]
        prompt = prompts(loaded.model.config.vocab_size)[0]
        assert list(stream_tokens(loaded, prompt, max_new_tokens=NEW_TOKENS)) == expected
        assert batch_tokens(loaded, [prompt], max_new_tokens=NEW_TOKENS) == [expected]
    finally:
        loaded.model.generation_config.eos_token_id = None


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1], {"max_new_tokens": 0}, "max_new_tokens: got 0, want at least 1"),
        ([1], {"max_new_tokens": 4, "temperature": -1.0}, "temperature: got -1.0"),
        ([], {"max_new_tokens": 4}, "prompt: got no tokens"),
        ([1] * 510, {"max_new_tokens": 4}, "got 510 \\+ 4, want at most the model's 512"),
    ],
)
def test_refused_requests(
    case: tuple[LoadedModel, list[list[int]]], prompt: list[int], options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stream_tokens(case[0], prompt, **options)

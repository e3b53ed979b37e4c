"""Sampling: which tokens are drawn and how often, by float64 and by sorting; rows that cannot be drawn from; strides and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from evenshare.ops import (
    mask_logits,
    renormalize_probs,
    sample_from_logits,
    sample_from_probs,
    sampling_launch,
    sampling_reference,
    softmax,
    speculative_sample,
)
from tests.ops.helpers import assert_rounded_once, dtypes_of

Place = tuple[torch.device, str]


def keeps(
    probs: torch.Tensor, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0, top_k_first: bool = False
) -> torch.Tensor:
    """What filters keep of one row, token by token as they are defined."""
    row = probs.double().cpu()
    kept = row > 0
    if top_k is not None:
        kept &= torch.tensor([int((row > value).sum()) < top_k for value in row])
    whole = row.where(kept, 0) if top_k_first else row
    if top_p < 1:
        limit = top_p * float(whole.sum())
        kept &= torch.tensor([float(whole[row > value].sum()) < limit or bool(value == row.max()) for value in row])
    return kept & (row >= min_p * row.max())


def distinct_rows(rows: int, width: int) -> torch.Tensor:
    """Probabilities of which no two sums are near a limit of the tests."""
    return torch.softmax(torch.randn(rows, width) * 2, -1)


@pytest.fixture
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows of a few hundred tokens become many parts and groups, as long ones are."""
    for name, value in (("GROUP", 8), ("PART", 64), ("BLOCK", 32)):
        monkeypatch.setattr(sampling_launch, name, value)
    sampling_launch.make_cuts.cache_clear()
    yield
    sampling_launch.make_cuts.cache_clear()


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"top_p": 0.6},
    {"top_p": 1.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.5},
    {"top_k": 9, "top_p": 0.5, "filter_order": "top_k_first"},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.03, "filter_order": "top_k_first"},
]


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> tuple[float, float]:
    """(statistic, a bound that it exceeds once in a hundred thousand tests)."""
    probs = probs.double().cpu() / probs.double().sum().cpu()
    counts = torch.bincount(tokens.long().cpu(), minlength=len(probs)).double()
    assert (counts[probs == 0] == 0).all(), "drew what has no probability"
    counts, expected = counts[probs > 0], probs[probs > 0] * len(tokens)
    small = expected < 5
    if small.any():  # one class of all that is rare
        counts = torch.cat([counts[~small], counts[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
    freedom = max(len(counts) - 1, 1)
    bound = freedom * (1 - 2 / (9 * freedom) + 4.27 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty
    return float(((counts - expected) ** 2 / expected).sum()), bound


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_what_filters_keep(place: Place, filters: dict[str, Any]) -> None:
    device, backend = place
    interpreted = (device.type, backend) == ("cpu", "triton")
    probs = distinct_rows(1, 60)
    definition = {name: value for name, value in filters.items() if name != "filter_order"}
    kept = keeps(probs[0], **definition, top_k_first=filters.get("filter_order") == "top_k_first")
    want = probs[0].where(kept, 0)
    n = 4 if interpreted else 20000
    indices = torch.zeros(n, dtype=torch.int32, device=device)
    for x, draw in ((probs, sample_from_probs), (probs.log(), sample_from_logits)):
        tokens = draw(x.to(device), indices=indices, seed=3, offset=1, backend=backend, **filters)
        assert tokens.dtype == torch.int32
        statistic, bound = chi_square(tokens, want)
        assert interpreted or statistic < bound
        assert kept[tokens.long().cpu()].all()


@pytest.mark.usefixtures("small_cuts")
def test_every_backend_draws_the_same(place: Place) -> None:
    device, backend = place
    probs = distinct_rows(6, 200)
    settings: dict[str, Any] = {
        "top_k": torch.tensor([1, 3, 200, 201, 20, 70]),
        "top_p": torch.linspace(0, 1, 6).flip(0),
        "min_p": torch.tensor([0.0, 0.5, 0.01] * 2),
    }
    on_device = {name: value.to(device) for name, value in settings.items()}
    for order in ("joint", "top_k_first"):
        want = sample_from_probs(probs, seed=5, offset=2**40 + 1, filter_order=order, **settings)
        state = {"seed": 5, "offset": torch.tensor([2**40 + 1], device=device)}
        x = probs.to(device)
        got = sample_from_probs(x, **state, filter_order=order, backend=backend, **on_device)
        assert torch.equal(got.cpu(), want)
        got = sample_from_logits(x.log(), **state, filter_order=order, backend=backend, **on_device)
        assert torch.equal(got.cpu(), want)


def test_seed_offset_and_generator(place: Place) -> None:
    device, backend = place
    probs = torch.full((6, 200), 5e-3, device=device)

    def draw(**state: Any) -> list[int]:
        tokens = sample_from_probs(probs, backend=backend, **state)
        assert isinstance(tokens, torch.Tensor)
        return tokens.tolist()

    assert draw(seed=1, offset=2) == draw(seed=1, offset=2) == draw(seed=torch.tensor([1], device=device), offset=2)
    draws = [
        draw(seed=1),
        draw(seed=2),
        draw(seed=1, offset=1),
        draw(seed=1 + 2**32),
        draw(seed=1, offset=2**32),
        draw(seed=-1),
    ]
    assert len({tuple(tokens) for tokens in draws}) == 6
    assert len(set(draws[0])) > 3  # rows differ
    first, second = (torch.Generator(device).manual_seed(7) for _ in range(2))
    assert [draw(generator=first), draw(generator=first)] == [draw(generator=second), draw(generator=second)]
    assert draw(generator=first) != draw()


def test_random_numbers_are_philox() -> None:
    """Random123's known answers for Philox-4x32-7 and a counter and key of zeros."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = torch.tensor([0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48], dtype=torch.float64)
    got = sampling_reference.uniforms((1, 4), zero, zero)[0].double()
    torch.testing.assert_close(got * 2.0**32, words, rtol=2**-24, atol=1)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 50}, {"top_p": 0.5}, {"top_k": 40, "top_p": 0.9, "filter_order": "top_k_first"}], ids=str
)
def test_a_large_vocabulary(place: Place, filters: dict[str, Any]) -> None:
    device, backend = place
    logits = torch.randn(1, 128256) * 3
    want = sample_from_logits(logits, 1.5, seed=8, **filters)
    assert torch.equal(sample_from_logits(logits.to(device), 1.5, seed=8, backend=backend, **filters).cpu(), want)


def test_rows_that_cannot_be_drawn(place: Place) -> None:
    device, backend = place
    nan, inf = float("nan"), float("inf")
    probs = torch.tensor([[0.0, 0.0, 0.0], [0.5, nan, 0.5], [-1.0, 0.0, 1e-40], [0.0, 2.0, 0.0]], device=device)
    logits = torch.tensor([[-inf, -inf, -inf], [0.0, nan, 0.0], [-inf, -inf, -1e38], [0.0, inf, 0.0]], device=device)
    for filters in FILTERS:
        for draw, x in ((sample_from_probs, probs), (sample_from_logits, logits)):
            tokens, valid = draw(x, seed=0, return_valid=True, backend=backend, **filters)
            assert tokens.tolist() == [0, 0, 2, 1], filters
            assert valid.tolist() == [False, False, True, True]


def test_ties_are_kept_and_shared(place: Place) -> None:
    device, backend = place
    probs = torch.tensor([[0.1, 0.3, 0.3, 0.3, 0.0]], device=device)
    n = 60 if backend == "cpu" or device.type == "cuda" else 16
    indices = torch.zeros(n, dtype=torch.int64, device=device)
    for filters in ({"top_k": 1}, {"top_k": 3}, {"top_p": 0.2}, {"min_p": 1.0}):
        tokens = sample_from_probs(probs, indices=indices, seed=1, backend=backend, **filters)
        assert tokens.dtype == torch.int64
        assert set(tokens.tolist()) == {1, 2, 3}
    assert_rounded_once(
        renormalize_probs(probs, top_k=2, backend=backend), torch.tensor([[0, 1, 1, 1, 0]]).double() / 3
    )


@pytest.mark.parametrize("width", [1, 17, 300])
@pytest.mark.usefixtures("small_cuts")
def test_renormalize_and_mask(place: Place, width: int) -> None:
    device, backend = place
    for dtype in dtypes_of(place):
        probs = distinct_rows(3, width).to(dtype)
        for top_k, top_p in ((1, None), (5, None), (width, None), (None, 0.7), (None, 0.0), (None, 1.0), (20, 0.6)):
            kept = torch.stack([keeps(row, top_k, 1.0 if top_p is None else top_p, 0, True) for row in probs])
            want = probs.double().where(kept, 0)
            out = torch.full((width, 3), float("nan"), dtype=dtype, device=device).T
            got = renormalize_probs(probs.to(device), top_k=top_k, top_p=top_p, out=out, backend=backend)
            assert got is out
            assert_rounded_once(got.cpu(), want / want.sum(-1, keepdim=True))
        for top_k in (1, 4, width):
            counts = torch.tensor([top_k, 1, width + 3], device=device)
            logits = (probs.log() - 3).to(dtype)
            kept = [keeps((row - row.max()).double().exp(), int(k)) for row, k in zip(logits, counts, strict=True)]
            got = mask_logits(logits.to(device), counts, backend=backend)
            assert torch.equal(got.cpu(), logits.where(torch.stack(kept), -torch.inf))


@pytest.mark.usefixtures("small_cuts")
def test_softmax(place: Place) -> None:
    device, backend = place
    for dtype in dtypes_of(place):
        logits = (torch.randn(4, 300) * 5).to(dtype)
        logits[0, 1:] = -torch.inf
        logits[1, 7] = torch.inf
        temperature = torch.tensor([1.0, 2.0, 0.3, 0.0], device=device)
        want = torch.softmax(logits.double() / temperature.cpu().double().clamp(min=1e-6)[:, None], -1)
        want[1] = torch.nn.functional.one_hot(torch.tensor(7), 300)
        got = softmax(logits.to(device), temperature, backend=backend)
        assert got.dtype == torch.float32
        assert_rounded_once(got.cpu(), want, largest=50.0)
        want = torch.softmax(logits[2:].double() / 0.5, -1)
        assert_rounded_once(softmax(logits.to(device)[2:], 0.5, backend=backend).cpu(), want, largest=50.0)


def test_any_strides_and_blocks(place: Place) -> None:
    device, backend = place
    wide = distinct_rows(6, 9001).to(device)
    for x in (wide[::2, 1::3], wide[:, :5000], wide.T.contiguous().T[1:4], wide[:1].expand(3, 9001)):
        for filters in ({}, {"top_k": 3}, {"top_p": 0.5}):
            want = sample_from_probs(x.cpu().contiguous(), seed=9, **filters)
            assert torch.equal(sample_from_probs(x, seed=9, backend=backend, **filters).cpu(), want)
        k = torch.tensor([5, 99, 6, 99, 7, 99, 8, 99, 9, 99, 1, 99], device=device)[::2][: x.shape[0]]
        assert (renormalize_probs(x, top_k=k, backend=backend) > 0).sum(-1).tolist() == k.tolist()


def test_empty(place: Place) -> None:
    device, backend = place
    nothing = torch.empty(0, 50, device=device)
    for draw in (sample_from_probs, sample_from_logits):
        for filters in FILTERS:
            tokens, valid = draw(nothing, return_valid=True, backend=backend, **filters)
            assert (tokens.shape, valid.shape) == ((0,), (0,))
        indices = torch.empty(0, dtype=torch.int32, device=device)
        assert draw(torch.ones(2, 3, device=device), indices=indices, backend=backend).shape == (0,)
    assert softmax(nothing, backend=backend).shape == (0, 50)
    assert renormalize_probs(nothing, top_k=1, backend=backend).shape == (0, 50)
    ids = torch.empty(0, 2, dtype=torch.int32, device=device)
    tokens, *_ = speculative_sample(
        nothing.reshape(0, 2, 25), ids, torch.empty(0, 3, 25, device=device), backend=backend
    )
    assert tokens.shape == (0, 3)


def speculative_oracle(draft: torch.Tensor, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Probability of each first token, the drafts being given: [vocab]."""
    p, q, drafted = draft[0].double(), target[0].double(), int(ids[0])
    accept = min(1.0, float(q[drafted] / p[drafted])) if p[drafted] > 0 else float(q[drafted] > 0)
    rest = (q - p).clamp(min=0)
    want = (1 - accept) * rest / rest.sum().clamp(min=1e-30)
    want[drafted] += accept
    return want


def test_speculative_first_tokens_follow_the_target(place: Place) -> None:
    device, backend = place
    interpreted = (device.type, backend) == ("cpu", "triton")
    draft, target = distinct_rows(2, 12), distinct_rows(3, 12)
    rows = 24 if interpreted else 20000
    drafts = torch.multinomial(draft, rows, replacement=True).T.int()
    tokens, accepted, emitted = speculative_sample(
        draft.expand(rows, 2, 12).to(device),
        drafts.to(device),
        target.expand(rows, 3, 12).to(device),
        seed=2,
        backend=backend,
    )
    tokens, accepted, emitted = tokens.cpu(), accepted.cpu(), emitted.cpu()
    place_of = torch.arange(3)
    assert ((tokens == -1) == (place_of > emitted[:, None])).all()
    assert torch.equal(
        tokens[:, :2].where(place_of[:2] < emitted[:, None], -1), drafts.where(place_of[:2] < emitted[:, None], -1)
    )
    assert (emitted <= accepted).all()
    assert (accepted <= 2).all()
    if interpreted:
        return
    # Whatever was drafted, each emitted token is one of the target, given that the ones before it were accepted.
    statistic, bound = chi_square(tokens[:, 0], target[0])
    assert statistic < bound
    statistic, bound = chi_square(tokens[emitted >= 1, 1], target[1])
    assert statistic < bound
    statistic, bound = chi_square(tokens[emitted == 2, 2], target[2])
    assert statistic < bound
    for drafted in range(3):  # and given the draft, accepted or drawn from what is left
        chosen = drafts[:, 0] == drafted
        statistic, bound = chi_square(tokens[chosen, 0], speculative_oracle(draft, torch.tensor([drafted]), target))
        assert statistic < bound


@pytest.mark.usefixtures("small_cuts")
def test_speculative_parts(place: Place) -> None:
    device, backend = place
    draft, target = distinct_rows(6, 150).view(2, 3, 150), distinct_rows(8, 150).view(2, 4, 150)
    ids = draft.argmax(-1)
    want = speculative_sample(draft, ids, target, seed=4)
    got = speculative_sample(draft.to(device), ids.to(device), target.to(device), seed=4, backend=backend)
    assert [part.tolist() for part in got] == [part.tolist() for part in want]


def test_speculative_edges(place: Place) -> None:
    device, backend = place
    certain = torch.eye(4, device=device).half()
    draft = torch.stack([certain[:3]] * 5)
    target = torch.stack([certain, certain[[0, 3, 2, 1]], certain[[3, 2, 1, 0]], certain, certain])
    ids = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, -1, 2], [7, 1, 2]], device=device)
    counts = torch.full((2, 5), 10, dtype=torch.int32, device=device)
    tokens, accepted, emitted = speculative_sample(
        draft, ids, target, num_accepted=counts[0], num_emitted=counts[1], seed=0, backend=backend
    )
    # An unknown draft is refused. Where nothing is left of the difference, the target's likeliest token is drawn.
    assert tokens.tolist() == [[0, 1, 2, 3], [0, 3, -1, -1], [3, -1, -1, -1], [0, 1, -1, -1], [0, -1, -1, -1]]
    assert (accepted - 10).tolist() == [3, 2, 0, 2, 2]
    assert (emitted - 10).tolist() == [3, 1, 0, 1, 0]
    assert accepted.data_ptr() == counts[0].data_ptr()
    none = torch.empty(5, 0, dtype=torch.int64, device=device)
    tokens, accepted, _ = speculative_sample(draft[:, :0], none, target[:, 1:2], seed=0, backend=backend)
    assert tokens.tolist() == [[1], [3], [2], [1], [1]]
    assert accepted.tolist() == [0] * 5


X, K = torch.ones(2, 8), torch.ones(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: sample_from_probs([1]), TypeError, "probs: got list, want a tensor"),
        (lambda: sample_from_probs(X[0]), ValueError, r"probs: got shape \(8,\), want \[rows, vocab\]"),
        (lambda: sample_from_probs(X[:, :0]), ValueError, r"probs: got shape \(2, 0\), want one token or more"),
        (lambda: sample_from_logits(X.int()), TypeError, "logits: got dtype torch.int32"),
        (lambda: sample_from_probs(X, top_k=0), ValueError, "top_k: got 0, want a whole number above 0"),
        (lambda: sample_from_probs(X, top_k=1.5), ValueError, r"top_k: got 1.5"),
        (lambda: sample_from_probs(X, top_k=K.float()), TypeError, "top_k: got dtype torch.float32"),
        (lambda: sample_from_probs(X, top_k=K[:1]), ValueError, r"top_k: got shape \(1,\), want \[2\]"),
        (lambda: sample_from_probs(X, top_p=1.1), ValueError, r"top_p: got 1.1, want a number from 0 to 1"),
        (lambda: sample_from_probs(X, top_p=float("nan")), ValueError, "top_p: got nan"),
        (lambda: sample_from_probs(X, top_p=K), TypeError, "top_p: got dtype torch.int32, want torch.float32"),
        (lambda: sample_from_probs(X, min_p=-0.1), ValueError, r"min_p: got -0.1"),
        (lambda: sample_from_probs(X, min_p="a"), TypeError, "min_p: got str"),
        (lambda: sample_from_logits(X, -1.0), ValueError, r"temperature: got -1.0, want a finite number"),
        (lambda: sample_from_probs(X, filter_order="both"), ValueError, "filter_order: got 'both', want one of joint"),
        (
            lambda: sample_from_probs(X, indices=torch.tensor([2])),
            ValueError,
            r"indices: got \[2\], want rows of probs",
        ),
        (lambda: sample_from_probs(X, indices=X), TypeError, "indices: got dtype torch.float32"),
        (lambda: sample_from_probs(X, offset=1), ValueError, "offset: got one without a seed"),
        (lambda: sample_from_probs(X, seed=1.0), TypeError, "seed: got float"),
        (lambda: sample_from_probs(X, seed=K), ValueError, r"seed: got torch.int32 \(2,\)"),
        (lambda: sample_from_probs(X, generator=1), TypeError, "generator: got int"),
        (lambda: sample_from_probs(X, backend="x"), ValueError, "backend: got 'x'"),
        (lambda: softmax(X, K), TypeError, "temperature: got dtype torch.int32"),
        (lambda: softmax(X, out=X.half()), TypeError, r"out: got dtype torch.float16"),
        (lambda: renormalize_probs(X, out=X[:1]), ValueError, r"out: got shape \(1, 8\)"),
        (lambda: mask_logits(X, 0), ValueError, "top_k: got 0"),
        (lambda: speculative_sample(X, K, X), ValueError, r"draft_probs: got shape \(2, 8\), want \[rows, n, vocab\]"),
        (lambda: speculative_sample(X[None], K[None], X[None]), ValueError, r"target_probs: got shape \(1, 2, 8\)"),
    ],
)
def test_errors_name_the_argument(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.gpu
def test_large_rows_and_offsets_past_32_bits() -> None:
    width, stride = 262144, 1 << 24
    storage = torch.zeros(stride * 160 + width, dtype=torch.float16, device="cuda")
    logits = storage.as_strided((161, width), (stride, 1))
    logits.copy_(torch.randn(161, width) * 3)
    for filters in ({}, {"top_k": 50, "top_p": 0.9, "filter_order": "top_k_first"}, {"min_p": 0.01}):
        want = sample_from_logits(logits.cpu(), seed=1, **filters)
        got = sample_from_logits(logits, seed=1, **filters)
        assert (got.cpu() == want).float().mean() > 0.97  # a sum's rounding may move the last token that top-p keeps


@pytest.mark.gpu
def test_neither_syncs_nor_needs_the_same_numbers_in_a_graph() -> None:
    logits = torch.randn(8, 1000, device="cuda")
    k, p, seed = (
        torch.full((8,), 40, device="cuda"),
        torch.full((8,), 0.9, device="cuda"),
        torch.tensor([1], device="cuda"),
    )

    def draw(**state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return sample_from_logits(logits, 0.7, top_k=k, top_p=p, return_valid=True, **state)  # type: ignore[return-value]

    draw(), draw(seed=seed)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        draw()
        draw(seed=3, offset=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given, _ = draw(seed=seed)
        own, _ = draw()
    seen = set()
    for number in (5, 6):
        seed.fill_(number)
        graph.replay()
        assert torch.equal(given, draw(seed=number)[0])
        seen.add(tuple(own.tolist()))
    assert len(seen) == 2  # torch's generator moves on between replays

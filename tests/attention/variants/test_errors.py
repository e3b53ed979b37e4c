"""What cannot become device code is named with its line; what a call cannot take is refused before it runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import evenshare
from evenshare import Variant, VariantError
from evenshare.attention import variants
from evenshare.attention.variants import source
from tests.attention.helpers import Place, int32, random_batch, run_ragged

SLOPES, BIAS = torch.linspace(-1, 1, 4), torch.zeros(2, 4, 9)


def branches(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    if q > k:  # what cannot be traced
        return s
    return 2 * s


UNTRACEABLE: list[tuple[Callable[..., Any], str]] = [
    (branches, "`if`.*torch.where"),
    (lambda s, b, h, q, k: s if q > k and h else q, "`and`"),
    (lambda s, b, h, q, k: torch.cumsum(s, 0), "the operation cumsum is not in the table"),
    (lambda s, b, h, q, k: s.erfinv(), "the operation erfinv is not in the table"),
    (lambda s, b, h, q, k: s.add_(1), "the operation add_ .* in place, want add"),
    (lambda s, b, h, q, k: torch.relu(s) + torch.nn.functional.silu(s, inplace=True), "silu: got inplace=True"),
    (lambda s, b, h, q, k: math.tanh(s), "a function of `math`"),
    (lambda s, b, h, q, k: s * int(q), r"int\(\) of a traced value; want .int\(\)"),
    (lambda s, b, h, q, k: sum(s), "a loop over a traced value"),
    (lambda s, b, h, q, k: s * len(q), "len"),
    (lambda s, b, h, q, k: [s, s][h], "a Python sequence; want a tensor"),
    (lambda s, b, h, q, k: s.device.index, "the attribute device"),
    (lambda s, b, h, q, k: s[0], "an index of a traced value"),
    (lambda s, b, h, q, k: s @ s, "the operation matmul"),
    (lambda s, b, h, q, k: 2**q * s, "pow: want an exponent"),
    (lambda s, b, h, q, k: s**-1, "pow: want an exponent"),
    (lambda s, b, h, q, k: s + torch.add(s, q, alpha=2), "alpha=2"),
    (lambda s, b, h, q, k: s + ((q > 1) - (k > 1)), "sub of a bool"),
    (lambda s, b, h, q, k: 1 - (q > k), "sub of a bool"),
    (lambda s, b, h, q, k: -(q > k), "neg of a bool"),
    (lambda s, b, h, q, k: s + torch.div(q, k, rounding_mode="trunc"), "rounding_mode='trunc'"),
    (lambda s, b, h, q, k: s.tanh(s), "tanh: got 2 arguments, want 1"),
    (lambda s, b, h, q, k: s + "1", "an argument of type str"),
    (lambda s, b, h, q, k: s.to(torch.complex64), "dtype torch.complex64"),
    (lambda s, b, h, q, k: s + SLOPES, r"captured tensor of shape \(4,\) with 1 dimensions not indexed"),
    (lambda s, b, h, q, k: s + BIAS[b], "shape .2, 4, 9. with 2 dimensions"),
    (lambda s, b, h, q, k: s + BIAS[b, :, k], "slice"),
    (lambda s, b, h, q, k: s + SLOPES[q > k], "an index of kind bool"),
    (lambda s, b, h, q, k: s + SLOPES[h, q], "2 indices of a tensor of shape"),
    (lambda s, b, h, q, k: s + BIAS[b, 7, k], "index 7 of a dimension of size 4"),
    (lambda s, b, h, q, k: s + SLOPES.exp()[h], "the operation exp on captured tensors alone"),
    (lambda s, b, h, q, k: s * SLOPES[0].item(), "the operation item on captured tensors alone"),
    (lambda s, b, h, q, k: s * SLOPES.sum(), "the operation sum on captured tensors alone"),
    (lambda s, b, h, q, k: s * torch.exp(input=SLOPES)[h], "the operation exp on captured tensors alone"),
    (lambda s, b, h, q, k: s * SLOPES.max(0).values[h], "the operation max on captured tensors alone"),
    (lambda s, b, h, q, k: s * torch.add(SLOPES, 1, out=SLOPES)[h], "the operation add on captured tensors alone"),
    (lambda s, b, h, q, k: s * SLOPES.mul_(2)[h], "the operation mul_ on captured tensors alone"),
    (lambda s, b, h, q, k: s * SLOPES.to(torch.complex64)[h], "captured tensors alone"),
    (lambda s, b, h, q, k: "no number", "got a str returned"),
]


@pytest.mark.parametrize(("function", "message"), UNTRACEABLE)
def test_what_cannot_be_traced(function: Callable[..., Any], message: str) -> None:
    before = SLOPES.clone()
    with pytest.raises(VariantError) as caught:
        Variant(score_mod=function)
    text, place = str(caught.value).split("\n")  # the line that is shown holds the message that is wanted
    assert re.search(message, text)
    assert f"{Path(__file__).name}:" in place
    assert torch.equal(SLOPES, before)


def test_the_line_is_shown() -> None:
    with pytest.raises(VariantError, match=r"test_errors.py:\d+: if q > k:  # what cannot be traced"):
        Variant(score_mod=branches)


def test_wrong_numbers_of_arguments() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        Variant(mask_mod=lambda q_idx, kv_idx: q_idx >= kv_idx)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"score_mod": 3}, TypeError, "score_mod: got int, want a function or None"),
        ({"mask_mod": SLOPES}, TypeError, "mask_mod: got Tensor"),
        ({"softmax": 0}, TypeError, "softmax: got 0, want True or False"),
        ({"sinks": [1.0]}, TypeError, "sinks: got list, want a tensor or None"),
        (
            {"sinks": torch.zeros(2, 2)},
            ValueError,
            r"sinks: got torch.float32 of shape \(2, 2\), want \[num_qo_heads\]",
        ),
        ({"sinks": torch.zeros(4, dtype=torch.int32)}, ValueError, "sinks: got torch.int32"),
        ({"sinks": SLOPES, "softmax": False}, ValueError, "sinks: got a tensor, want None with softmax=False"),
    ],
)
def test_arguments_of_a_variant(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Variant(**arguments)


INDEX = torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: variants.sliding_window(-1), "window_left: got -1, want an int of 0 or more"),
        (lambda: variants.dilated_window(3, 0), "dilation: got 0, want an int of 1 or more"),
        (lambda: variants.prefix_lm(SLOPES), "prefix_lens: got torch.float32"),
        (lambda: variants.documents(torch.zeros(1, 2, 3, dtype=torch.int32)), "document_ids: .* of 1 or 2 dimensions"),
        (lambda: variants.packed_mask(INDEX, INDEX, INDEX, INDEX), "bits: got torch.int32"),
        (lambda: variants.pack_masks([SLOPES]), r"masks\[0\]: got torch.float32"),
        (lambda: variants.tree(INDEX, INDEX), "parents: got torch.int32 .* of 2 dimensions"),
        (lambda: variants.soft_cap(0.0), "cap: got 0.0, want a finite number above 0"),
        (lambda: variants.alibi(INDEX), "slopes: got torch.int32"),
        (lambda: variants.alibi_slopes(0), "num_heads: got 0"),
        (lambda: variants.relative_bias(torch.zeros(4, 8)), "table: got 8 distances, want an odd number"),
    ],
)
def test_arguments_of_the_ready_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_calls_that_do_not_fit(place: Place) -> None:
    batch = random_batch((3,), (9,), (2, 1), dim=16)
    sigmoid = variants.sigmoid_attention()
    with pytest.raises(ValueError, match="lse, return_lse: got one, want neither with a variant of softmax=False"):
        run_ragged(batch, place, variant=sigmoid)
    with pytest.raises(ValueError, match="variant: got sinks of 4 heads, want num_qo_heads 2"):
        run_ragged(batch, place, variant=Variant(sinks=SLOPES.to(place.device)))
    with pytest.raises(TypeError, match=r"variant: got function, want an evenshare\.Variant or None"):
        run_ragged(batch, place, variant=variants.causal)
    elsewhere = SLOPES.to("meta")
    with pytest.raises(ValueError, match=r"variant: got a captured tensor of shape \(4,\) on meta, want (cpu|cuda)"):
        run_ragged(batch, place, variant=Variant(score_mod=lambda s, b, h, q, k: s + elsewhere[h]))


def test_a_mask_of_the_users_own_is_not_causal_by_default() -> None:
    shape: dict[str, Any] = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 16, "kv_indptr": int32([0, 9])}
    cases = [
        (None, True),
        (Variant(score_mod=variants.soft_cap(2.0)), True),
        (Variant(mask_mod=variants.causal), False),
    ]
    for variant, causal in cases:
        assert evenshare.plan_attention(**shape, variant=variant).problem.causal == causal
        assert evenshare.plan_attention(**shape, variant=variant, causal=True).problem.causal


def test_one_kernel_for_one_text(tmp_path: Path) -> None:
    """Also for another value of a captured tensor, and from a file that can be read; numbers are part of the text."""

    def make(slopes: torch.Tensor, factor: float) -> Variant:
        return Variant(score_mod=lambda s, b, h, q, k: s + factor * slopes[h])

    other = torch.zeros(17)[1::2]
    one, two, three = make(SLOPES, 2.0), make(other, 2.0), make(SLOPES, 3.0)
    assert one.source() == two.source()
    assert one.modify is two.modify
    assert one.modify is not three.modify
    assert one == make(SLOPES, 2.0)
    assert hash(one) == hash(make(SLOPES, 2.0))
    assert one != two
    assert one != three
    assert two.arguments is not None
    assert two.arguments[0].data_ptr() == other.data_ptr()
    assert two.arguments[1:] == (8, 2)
    assert {file.read_text() for file in (tmp_path / "variants").iterdir()} == {one.source(), three.source()}


def test_a_spoilt_file_is_written_again(tmp_path: Path) -> None:
    variant = Variant(score_mod=lambda s, b, h, q, k: s + 0.123)
    _ = variant.modify
    (file,) = (tmp_path / "variants").iterdir()
    file.write_bytes(b"spoilt \xff")
    source._loaded.cache_clear()
    _ = Variant(score_mod=lambda s, b, h, q, k: s + 0.123).modify
    assert file.read_text() == variant.source()


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EVENSHARE_CACHE", str(tmp_path / "file"))
    variant = Variant(score_mod=lambda s, b, h, q, k: s + 0.456)
    assert Path(source.load(variant.source()).__file__ or "").read_text() == variant.source()

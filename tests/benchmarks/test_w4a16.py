"""The table of 4-bit products with small weights on the CPU: its reference, its peers, its targets."""

from __future__ import annotations

import pytest
import torch

from benchmarks import harness, peers, w4a16
from benchmarks.results import Row
from evenshare import quantize, w4a16_matmul
from evenshare.quant.rounding import pack_codes


@pytest.fixture(autouse=True)
def _few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w4a16, "copies_past_l2", lambda size: 2)
    w4a16.make_weights.cache_clear()
    w4a16.make_forms.cache_clear()


def test_the_reference_is_what_the_codes_mean() -> None:
    weight = quantize(torch.randn(8, 256), w4a16.GROUP_SIZE)
    dense = w4a16.dequantize(weight.unpacked_codes(), weight.scales)
    x = torch.randn(3, 256)
    assert peers.relative_error(w4a16_matmul(x, weight, backend="cpu"), x @ dense.T) < 1e-6


def test_a_case(bench: harness.Bench) -> None:
    row = w4a16.measure(bench, w4a16.Case(64, 256, 3, target=19.0, speed=1.2))
    assert row.peers == {"cublas": 20.0}
    assert row.bytes == 64 * 256 // 2 + 64 * 2 * 2 + 2 * 3 * (64 + 256)
    assert row.flops == 2 * 3 * 64 * 256
    speed = bench.rows[1]
    assert (speed.case, speed.ours, speed.target) == ("n=64 k=256 m=3: speed, ours / cublas", 1.0, 1.2)
    assert row.missed
    assert speed.missed


def test_of_many_rows_cublas_is_the_only_peer(bench: harness.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def peer(name: str, *arguments: object) -> None:
        asked.append(name)

    monkeypatch.setattr(peers, "w4a16", peer)
    monkeypatch.setattr(w4a16, "MANY_ROWS", (5,))
    bench.peers = list(w4a16.USUAL_PEERS)
    for m in (4, 5):
        w4a16.measure(bench, w4a16.Case(64, 256, m))
    assert asked == [*w4a16.USUAL_PEERS, "cublas"]


def test_forms_are_the_same_numbers() -> None:
    weight = quantize(torch.randn(8, 384), w4a16.GROUP_SIZE, scale_dtype=torch.bfloat16)
    forms = w4a16.in_other_forms(weight)
    assert list(forms) == list(w4a16.FORM_SPEED)
    assert [(form.group_size, form.zeros is None) for form in forms.values()] == [(64, True), (32, True), (128, False)]
    for form in forms.values():
        assert torch.equal(form.dequantize(), weight.dequantize())
        assert form.packed is not weight.packed


def test_forms_stand_beside_groups_of_128(bench: harness.Bench) -> None:
    w4a16.measure_forms(bench, w4a16.Case(64, 256, 3, ", forms"))
    row, *speeds = bench.rows
    assert row.peers == dict.fromkeys(w4a16.FORM_SPEED, 20.0)
    assert [speed.case for speed in speeds] == [f"{row.case}: speed, {name} / ours" for name in w4a16.FORM_SPEED]
    assert not any(speed.missed for speed in speeds)


def test_targets() -> None:
    cases = [*w4a16.FEW, *w4a16.MANY, *w4a16.FORMS]
    assert len({case.title for case in cases}) == len(cases) == 20 + 10 + 8
    assert [case.title for case in w4a16.FEW if case.speed] == ["n=28672 k=8192 m=1"]
    assert {case.speed for case in w4a16.MANY} == {0.92}
    slow = Row("groups", "x", "higher", 1 / 1.16, "ratio", target=w4a16.FORM_SPEED["group 32"])
    assert slow.missed  # 16 % longer than groups of 128


def test_fill_summarises_whole_tables_alone(bench: harness.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w4a16, "FEW", [w4a16.Case(64, 256, m) for m in (1, 2)])
    monkeypatch.setattr(w4a16, "MANY", [])
    monkeypatch.setattr(w4a16, "FORMS", [w4a16.Case(64, 256, 1, ", forms")])
    w4a16.fill(bench)
    assert [row.kind for row in bench.rows] == ["value", "value", "geomean", "value", "ratio", "ratio", "ratio"]
    bench.rows, bench.only = [], "m=2"
    w4a16.fill(bench)
    assert [row.case for row in bench.rows] == ["n=64 k=256 m=2"]
    assert bench.failed == []


def test_warming_up_calls_all_that_the_largest_weight_takes(
    bench: harness.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(w4a16, "FEW", [w4a16.Case(n, 256, m) for n in (64, 128) for m in (1, 2)])
    monkeypatch.setattr(w4a16, "MANY", [w4a16.Case(128, 256, 5)])
    monkeypatch.setattr(w4a16, "FORMS", [w4a16.Case(128, 256, 1, ", forms")])
    made: list[torch.Size] = []
    monkeypatch.setattr(w4a16, "w4a16_matmul", lambda x, weight: made.append((*x.shape, weight.n, weight.group_size)))
    w4a16.warm_up(bench)
    assert sorted(made) == sorted(
        [(m, 256, 128, 128) for m in (1, 2, 5)] + [(1, 256, 128, size) for size in (64, 32, 128)]
    )
    bench.only, made[:] = "m=2", []
    w4a16.warm_up(bench)
    assert made == [(2, 256, 128, 128)]
    bench.only = "nothing"
    w4a16.warm_up(bench)
    assert len(made) == 1


def test_codes_of_torchs_kernel_lie_high_first() -> None:
    codes = torch.randint(16, (3, 10), dtype=torch.uint8)
    packed = peers.pack_high_first(codes)
    assert torch.equal(packed >> 4, codes[:, ::2])
    assert torch.equal(pack_codes(codes, 4), (packed << 4) | (packed >> 4))  # ours has the low nibble first


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_torchs_kernel_computes_the_same() -> None:
    weight = quantize(torch.randn(256, 512, device="cuda"), w4a16.GROUP_SIZE, scale_dtype=torch.bfloat16)
    codes, x = weight.unpacked_codes(), torch.randn(3, 512, device="cuda", dtype=torch.bfloat16)
    dense = w4a16.dequantize(codes, weight.scales)
    call = peers.w4a16("torch-int4", x, dense.to(x.dtype), codes, weight.scales, w4a16.GROUP_SIZE)
    assert call is not None
    assert peers.relative_error(call(), x.float() @ dense.T) < 1e-2


def test_torchs_kernel_is_not_given_rows_that_stop_the_process() -> None:
    weight = quantize(torch.randn(64, 128), w4a16.GROUP_SIZE)
    codes, dense = weight.unpacked_codes(), weight.dequantize()
    x = torch.ones(peers.TORCH_INT4_ROWS + 1, 128)
    assert peers.w4a16("torch-int4", x, dense, codes, weight.scales, w4a16.GROUP_SIZE) is None

"""Keys and values in float8_e4m3fn, and queries too: every entry point gives what the dequantised tensors give."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from evenshare.attention import AttentionPlan, attention, paged_attention, plan_attention
from evenshare.attention.problem import FP8, Problem
from tests.attention.helpers import (
    Batch,
    Place,
    assert_matches,
    int32,
    move,
    nan_outputs,
    random_batch,
    to_pages,
)

MIXED = ((1, 6, 5, 1, 0, 1), (33, 20, 5, 0, 3, 1))  # decode, append, prefill, no keys, no query, first key
LARGE = ((1, 130, 1, 70, 3), (1500, 300, 0, 70, 700))
Scale = float | torch.Tensor | None


def dtypes(place: Place) -> tuple[torch.dtype, ...]:
    return tuple(dtype for dtype in place.dtypes if dtype.itemsize == 2)


def scales(heads: int, kind: str) -> tuple[Scale, Scale]:
    """Of few bits, so that a code times a scale is exact in fp32."""
    match kind:
        case "none":
            return None, None
        case "numbers":
            return 0.25, 1.5
        case "scalars":
            return torch.tensor(0.75), torch.tensor([0.5])
        case "heads":
            return torch.arange(1, heads + 1) / 8, torch.arange(heads + 1, 1, -1) / 4
    raise ValueError(kind)


def q_scale_of(heads: int, kind: str) -> Scale:
    match kind:
        case "none":
            return None
        case "numbers":
            return 0.5
        case "scalars":
            return torch.tensor(1.25)
        case "heads":
            return torch.arange(3, heads + 3) / 4
    raise ValueError(kind)


def quantized(batch: Batch, k_scale: Scale, v_scale: Scale) -> tuple[Batch, Batch]:
    """(the batch with codes for keys and values, the batch that they stand for)."""
    codes = replace(batch, k=batch.k.to(FP8), v=batch.v.to(FP8))
    return codes, replace(batch, k=scaled(codes.k, k_scale), v=scaled(codes.v, v_scale))


def quantized_q(codes: Batch, values: Batch, q_scale: Scale) -> tuple[Batch, Batch]:
    """The same pair with codes for queries; the query heads of a KV head share its scale."""
    q = codes.q.to(FP8)
    by_kv_head = q.unflatten(1, (codes.k.shape[1], -1))
    return replace(codes, q=q), replace(values, q=scaled(by_kv_head, q_scale, 2).flatten(1, 2))


def scaled(x: torch.Tensor, scale: Scale, trailing: int = 1) -> torch.Tensor:
    factor = torch.as_tensor(1.0 if scale is None else scale, device=x.device)
    return x.float() * factor.view(-1, *[1] * trailing)


def on(place: Place, *values: Scale) -> list[Scale]:
    return [x.to(place.device) if isinstance(x, torch.Tensor) else x for x in values]


def arguments(codes: Batch, place: Place, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = codes.q if codes.q.dtype == FP8 else codes.q.to(dtype)
    return q.to(place.device), codes.k.to(place.device), codes.v.to(place.device)


def check(
    lens: tuple[tuple[int, ...], tuple[int, ...]], place: Place, kind: str = "heads", page_size: int = 0,
    heads: tuple[int, int] = (4, 2), dim: int = 16, kv_layout: str = "NHD", dim_v: int | None = None,
    q_kind: str | None = None, **options: Any,
) -> None:  # fmt: skip
    """Ragged (page_size 0) or paged attention against the oracle of the dequantised batch, which is where the codes are.

    q_kind: of q's scale; None: a 16-bit q.
    """
    k_scale, v_scale = on(place, *scales(heads[1], kind))
    q_scale = None if q_kind is None else on(place, q_scale_of(heads[1], q_kind))[0]
    batch = move(random_batch(*lens, heads, dim, dim_v), place)
    codes, values = quantized(batch, k_scale, v_scale)
    if q_kind is not None:
        codes, values = quantized_q(codes, values, q_scale)
    for dtype in dtypes(place):
        q, k, v = arguments(codes, place, dtype)
        outputs = nan_outputs(batch, place, dtype)
        common = {"qo_indptr": int32(batch.qo_indptr, place.device), "q_scale": q_scale}
        common |= {"k_scale": k_scale, "v_scale": v_scale}
        common |= {"backend": place.backend, "causal": True, **outputs, **options}
        if page_size:
            pages = to_pages(codes, page_size, kv_layout)
            table = pages.table("indptr", place.device)
            paged_attention(q, pages.k, pages.v, kv_layout=kv_layout, **table, **common)
        else:
            attention(q, k, v, kv_indptr=int32(batch.kv_indptr, place.device), **common)
        assert_matches(outputs["out"], outputs["lse"], values, **options)


@pytest.mark.parametrize("kind", ["none", "numbers", "scalars", "heads"])
def test_scales(place: Place, kind: str) -> None:
    check(MIXED, place, kind)
    check(MIXED, place, kind, page_size=4)


@pytest.mark.parametrize("kind", ["none", "numbers", "scalars", "heads"])
@pytest.mark.parametrize("q_kind", ["none", "numbers", "scalars", "heads"])
def test_scales_of_queries(place: Place, kind: str, q_kind: str) -> None:
    check(MIXED, place, kind, q_kind=q_kind)
    check(MIXED, place, kind, q_kind=q_kind, page_size=4)


def test_masks_and_dims_of_queries(place: Place) -> None:
    check(MIXED, place, q_kind="numbers", causal=False)
    check(MIXED, place, q_kind="numbers", page_size=3, kv_layout="HND", window_left=4)
    check(MIXED, place, q_kind="heads", page_size=16, logits_soft_cap=3.0)
    check(((1, 3), (40, 9)), place, q_kind="scalars", dim=20)
    check(((1, 3), (40, 9)), place, q_kind="scalars", dim=192, dim_v=128, page_size=16)


def test_masks(place: Place) -> None:
    check(MIXED, place, causal=False)
    check(MIXED, place, page_size=3, kv_layout="HND", window_left=4)
    check(MIXED, place, page_size=16, logits_soft_cap=3.0)


@pytest.mark.parametrize("dims", [(20, 20), (72, 72), (128, 128), (192, 128), (256, 256)])
def test_head_dims(place: Place, dims: tuple[int, int]) -> None:
    check(((1, 3), (40, 9)), place, dim=dims[0], dim_v=dims[1], page_size=16)


def test_dense_and_without_lse(place: Place) -> None:
    batch = move(random_batch((3, 3), (20, 20), (4, 2), 16), place)
    codes, values = quantized(batch, 0.5, 2.0)
    for dtype in dtypes(place):
        q, k, v = (x.unflatten(0, (2, -1)) for x in arguments(codes, place, dtype))
        out = attention(q, k, v, causal=True, k_scale=0.5, v_scale=2.0, backend=place.backend)
        assert_matches(out.flatten(0, 1), None, values)


def test_dense_queries(place: Place) -> None:
    """The output's dtype is out_dtype, that of `out`, or bfloat16."""
    batch = move(random_batch((3, 3), (20, 20), (4, 2), 16), place)
    codes, values = quantized_q(*quantized(batch, 0.5, 2.0), 1.5)
    q, k, v = (x.to(place.device).unflatten(0, (2, -1)) for x in (codes.q, codes.k, codes.v))
    common: dict[str, Any] = {"causal": True, "q_scale": 1.5, "k_scale": 0.5, "v_scale": 2.0, "backend": place.backend}
    for dtype in dtypes(place):
        out = attention(q, k, v, out_dtype=dtype, **common)
        assert out.dtype == dtype
        assert_matches(out.flatten(0, 1), None, values)
        given = torch.full_like(out, math.nan)
        for named in (None, dtype):
            assert attention(q, k, v, out=given, out_dtype=named, **common) is given
            assert torch.equal(given, out)
    assert attention(q, k, v, **common).dtype == torch.bfloat16


def test_every_code_of_a_query(place: Place) -> None:
    """The score of one key, exactly: lse is the code times the scales, and the key's one dimension."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    q = codes[~codes.isnan()].to(place.device).view(254, 1, 1)
    q = torch.nn.functional.pad(q.view(torch.uint8), (0, 15)).view(FP8)
    k = torch.ones(1, 1, 16, device=place.device).to(FP8)
    indptrs = {"qo_indptr": int32([0, 254], place.device), "kv_indptr": int32([0, 1], place.device)}
    for dtype in dtypes(place):
        _, lse = attention(
            q, k, k, **indptrs, sm_scale=1.0, q_scale=0.5, out_dtype=dtype, return_lse=True, backend=place.backend
        )
        want = q[:, :, 0].float() / 2
        assert torch.allclose(lse, want, rtol=4 * torch.finfo(torch.float32).eps, atol=0)


def test_every_code(place: Place) -> None:
    """One key a request: the output is the value, whichever of the 254 finite codes it is, scaled."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    v = codes[~codes.isnan()].to(place.device).view(127, 1, 2)
    v = torch.nn.functional.pad(v.view(torch.uint8), (0, 6)).view(FP8)
    indptr = int32(range(128), place.device)
    for dtype in dtypes(place):
        q = torch.ones(127, 1, 8, dtype=dtype, device=place.device)
        out = attention(q, v, v, qo_indptr=indptr, kv_indptr=indptr, v_scale=0.5, backend=place.backend)
        assert torch.equal(out, (v.float() / 2).to(dtype))


def test_other_numbers_for_the_same_plan(place: Place) -> None:
    """As layers have them, one after the other; the tensor's values are read when the kernel runs."""
    dtype = dtypes(place)[0]
    batch = move(random_batch((1, 2), (21, 9), (4, 2), 16), place)
    plan = plan_attention(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=dtype, kv_dtype=FP8, qo_indptr=int32(batch.qo_indptr),
        kv_indptr=int32(batch.kv_indptr), device=place.device, backend=place.backend,
    )  # fmt: skip
    held = torch.zeros(2, device=place.device)
    for number in (0.5, 1.0, 3.0):
        held.copy_(torch.tensor([number, 2 * number]))
        for k_scale, v_scale in ((number, 2.0), (held, number), (2.0, held), (held[:1], held[1:]), (1, None)):
            codes, values = quantized(batch, k_scale, v_scale)
            q, k, v = arguments(codes, place, dtype)
            assert_matches(plan.run(q, k, v, k_scale=k_scale, v_scale=v_scale), None, values)


def test_other_scales_of_queries_for_the_same_plan(place: Place) -> None:
    dtype = dtypes(place)[0]
    batch = move(random_batch((1, 2), (21, 9), (4, 2), 16), place)
    plan = plan_attention(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=dtype, kv_dtype=FP8, q_dtype=FP8, qo_indptr=int32(batch.qo_indptr),
        kv_indptr=int32(batch.kv_indptr), device=place.device, backend=place.backend,
    )  # fmt: skip
    held = torch.zeros(2, device=place.device)
    for number in (0.5, 3.0):
        held.copy_(torch.tensor([number, 2 * number]))
        one = held[1:]
        for q_scale, k_scale in (
            (number, 2.0),
            (number, held),
            (held, number),
            (held, held),
            (one, held),
            (held, one),
            (one, None),
        ):
            codes, values = quantized_q(*quantized(batch, k_scale, None), q_scale)
            out = plan.run(*arguments(codes, place, dtype), q_scale=q_scale, k_scale=k_scale)
            assert out.dtype == dtype
            assert_matches(out, None, values)


def test_scales_of_a_wider_tensor(place: Place) -> None:
    """One layer's column of [heads, layers]."""
    batch = move(random_batch((2,), (21,), (4, 2), 16), place)
    table = torch.tensor([[0.5, math.nan, 3.0], [2.0, math.nan, 0.25]], device=place.device)
    codes, values = quantized(batch, table[:, 0], table[:, 2])
    q, k, v = arguments(codes, place, dtypes(place)[0])
    indptrs = {"qo_indptr": int32([0, 2], place.device), "kv_indptr": int32([0, 21], place.device)}
    scaled = {"k_scale": table[:, 0], "v_scale": table[:, 2]}
    assert_matches(attention(q, k, v, causal=True, **indptrs, **scaled, backend=place.backend), None, values)


def fp8_plan(**changes: Any) -> AttentionPlan:
    good: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "kv_dtype": FP8}
    return plan_attention(**good | {"kv_indptr": int32([0, 3])} | changes)


@pytest.mark.parametrize(
    ("scale", "error", "text"),
    [
        (0.0, ValueError, "k_scale: got 0.0, want a finite number above 0"),
        (-1, ValueError, "k_scale: got -1, want"),
        (math.nan, ValueError, "k_scale: got nan, want"),
        ("1", TypeError, "k_scale: got str, want a number, a float32 tensor or None"),
        (torch.ones(3), ValueError, r"k_scale: got shape \(3,\), want \[2\]"),
        (torch.ones(1, 2), ValueError, r"k_scale: got shape \(1, 2\), want \[2\]"),
        (torch.ones(2).half(), TypeError, "k_scale: got dtype torch.float16, want torch.float32"),
        (torch.ones(2, device="meta"), ValueError, "k_scale: got device meta, want cpu"),
    ],
)
def test_wrong_scales(scale: Any, error: type[Exception], text: str) -> None:
    plan, q, kv = fp8_plan(), torch.zeros(1, 4, 16).bfloat16(), torch.zeros(3, 2, 16).to(FP8)
    out = torch.ones_like(q)
    with pytest.raises(error, match=text):
        plan.run(q, kv, kv, k_scale=scale, out=out)
    with pytest.raises(error, match=text.replace("k_scale", "v_scale")):
        plan.run(q, kv, kv, v_scale=scale, out=out)
    assert (out == 1).all()


@pytest.mark.parametrize(
    ("scale", "error", "text"),
    [
        (0.0, ValueError, "q_scale: got 0.0, want a finite number above 0"),
        (-1, ValueError, "q_scale: got -1, want"),
        (1e30, ValueError, r"q_scale \* k_scale: got 1.*e\+60, want"),
        ("1", TypeError, "q_scale: got str, want a number, a float32 tensor or None"),
        (torch.ones(3), ValueError, r"q_scale: got shape \(3,\), want \[2\]"),
        (torch.ones(4), ValueError, r"q_scale: got shape \(4,\), want \[2\]"),
        (torch.ones(2).half(), TypeError, "q_scale: got dtype torch.float16, want torch.float32"),
        (torch.ones(2, device="meta"), ValueError, "q_scale: got device meta, want cpu"),
    ],
)
def test_wrong_scales_of_queries(scale: Any, error: type[Exception], text: str) -> None:
    plan, q, kv = fp8_plan(q_dtype=FP8), torch.zeros(1, 4, 16).to(FP8), torch.zeros(3, 2, 16).to(FP8)
    out = torch.ones(1, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(error, match=text):
        plan.run(q, kv, kv, q_scale=scale, k_scale=1e30, out=out)
    if "k_scale" not in text:
        with pytest.raises(error, match=text):
            plan.run(q, kv, kv, q_scale=scale, k_scale=torch.ones(2), out=out)
    assert (out == 1).all()


def test_wrong_dtypes_of_queries() -> None:
    q, kv = torch.zeros(1, 4, 16).to(FP8), torch.zeros(3, 2, 16).to(FP8)
    bf16 = torch.bfloat16
    with pytest.raises(TypeError, match=r"q_dtype, kv_dtype: got torch\.float8_e4m3fn and torch\.bfloat16, want torch"):
        fp8_plan(q_dtype=FP8, kv_dtype=None)
    with pytest.raises(TypeError, match=r"q_dtype, kv_dtype: got torch\.float8_e4m3fn and torch\.float16, want torch"):
        attention(q[None], kv.half()[None], kv.half()[None])
    with pytest.raises(TypeError, match=r"q_dtype: got torch\.float16, want torch\.bfloat16 or"):
        fp8_plan(q_dtype=torch.float16)
    with pytest.raises(TypeError, match=r"q: got dtype torch\.bfloat16, want torch\.float8_e4m3fn"):
        fp8_plan(q_dtype=FP8).run(q.to(bf16), kv, kv)
    with pytest.raises(TypeError, match=r"q: got dtype torch\.float8_e4m3fn, want torch\.bfloat16"):
        fp8_plan().run(q, kv, kv)
    with pytest.raises(TypeError, match=r"out: got dtype torch\.float16, want torch\.bfloat16"):
        fp8_plan(q_dtype=FP8).run(q, kv, kv, out=q.half())
    with pytest.raises(ValueError, match=r"q_scale: got a scale of torch\.bfloat16 queries"):
        fp8_plan().run(q.to(bf16), kv, kv, q_scale=1.0)
    with pytest.raises(TypeError, match=r"out_dtype: got torch\.float32, want torch\.float16 or torch\.bfloat16"):
        attention(q[None], kv[None], kv[None], out_dtype=torch.float32)
    with pytest.raises(TypeError, match=r"out: got torch\.float32, want torch\.float16 or torch\.bfloat16"):
        attention(q[None], kv[None], kv[None], out=q[None].float())
    with pytest.raises(TypeError, match=r"out: got dtype torch\.float16, want torch\.bfloat16"):
        attention(q[None], kv[None], kv[None], out=q[None].half(), out_dtype=bf16)
    with pytest.raises(TypeError, match=r"out_dtype: got torch\.float16, want None or q's torch\.bfloat16"):
        attention(q[None].to(bf16), kv[None], kv[None], out_dtype=torch.float16)
    assert fp8_plan(q_dtype=bf16).problem.q_dtype == bf16


def test_wrong_dtypes() -> None:
    q, kv = torch.zeros(1, 4, 16).bfloat16(), torch.zeros(3, 2, 16).to(FP8)
    with pytest.raises(TypeError, match=r"kv_dtype: got torch\.float16, want torch\.bfloat16 or torch\.float8_e4m3fn"):
        fp8_plan(kv_dtype=torch.float16)
    with pytest.raises(TypeError, match=r"kv_dtype: got torch\.float8_e4m3fn, want torch\.float32"):
        fp8_plan(dtype=torch.float32)
    with pytest.raises(TypeError, match=r"k: got dtype torch\.bfloat16, want torch\.float8_e4m3fn"):
        fp8_plan().run(q, kv.bfloat16(), kv)
    with pytest.raises(TypeError, match=r"v: got dtype torch\.bfloat16, want torch\.float8_e4m3fn"):
        fp8_plan().run(q, kv, kv.bfloat16())
    with pytest.raises(TypeError, match=r"k: got dtype torch\.float8_e4m3fn, want torch\.bfloat16"):
        fp8_plan(kv_dtype=None).run(q, kv, kv)
    with pytest.raises(ValueError, match=r"k_scale: got a scale of torch\.bfloat16 keys"):
        fp8_plan(kv_dtype=torch.bfloat16).run(q, kv.bfloat16(), kv.bfloat16(), k_scale=1.0)
    with pytest.raises(ValueError, match=r"v_scale: got a scale of torch\.bfloat16 keys"):
        attention(q[None], kv.bfloat16()[None], kv.bfloat16()[None], v_scale=torch.ones(2))
    assert Problem(4, 2, 16, 16, torch.float16, kv_dtype=FP8).fp8_kv
    assert not Problem(4, 2, 16, 16, torch.float16, kv_dtype=torch.float16).fp8_kv


@pytest.fixture
def gpu() -> Place:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no CUDA GPU with fp8")
    return Place(torch.device("cuda"), "triton", (torch.float16, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_real_tiles(gpu: Place, dim: int) -> None:
    check(LARGE, gpu, heads=(8, 2), dim=dim)
    for page_size in (1, 3, 16, 64, 256):
        check(LARGE, gpu, heads=(8, 2), dim=dim, page_size=page_size, kv_layout="HND" if page_size == 64 else "NHD")
    for page_size in (0, 3, 16):
        check(LARGE, gpu, heads=(8, 2), dim=dim, page_size=page_size, q_kind="heads")


@pytest.mark.gpu
def test_a_graph_reads_the_scales_of_now(gpu: Place) -> None:
    """Numbers are what they were at the capture, tensors what they are at the replay; nothing syncs."""
    batch = move(random_batch((1, 1), (700, 40), (8, 2), 128), gpu)
    plan = fp8_plan(num_qo_heads=8, head_dim=128, kv_indptr=int32(batch.kv_indptr, gpu.device))
    k_scale = torch.ones(2, device=gpu.device)
    codes, _ = quantized(batch, None, None)
    q, k, v = arguments(codes, gpu, torch.bfloat16)
    out = torch.empty_like(q)
    plan.run(q, k, v, k_scale=k_scale, v_scale=2.0, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(q, k, v, k_scale=k_scale, v_scale=0.5, out=out)  # a number that the plan meets here
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.run(q, k, v, k_scale=k_scale, v_scale=0.5)
        k_scale.copy_(k_scale * 3)
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_matches(out, None, quantized(batch, k_scale, 0.5)[1])
    assert_matches(plan.run(q, k, v, k_scale=k_scale, v_scale=0.5), None, quantized(batch, k_scale, 0.5)[1])


@pytest.mark.gpu
def test_a_graph_multiplies_the_scales_of_now(gpu: Place) -> None:
    batch = move(random_batch((1, 1), (700, 40), (8, 2), 128), gpu)
    plan = fp8_plan(num_qo_heads=8, head_dim=128, q_dtype=FP8, kv_indptr=int32(batch.kv_indptr, gpu.device))
    q_scale, k_scale = torch.ones(1, device=gpu.device), torch.ones(2, device=gpu.device)
    codes, _ = quantized_q(*quantized(batch, None, None), None)
    q, k, v = arguments(codes, gpu, torch.bfloat16)
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=gpu.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.run(q, k, v, q_scale=q_scale, k_scale=k_scale, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(q, k, v, q_scale=q_scale, k_scale=k_scale, out=out)
    q_scale.fill_(1.5)
    k_scale.copy_(torch.tensor([0.5, 2.0]))
    graph.replay()
    assert_matches(out, None, quantized_q(*quantized(batch, k_scale, None), q_scale)[1])

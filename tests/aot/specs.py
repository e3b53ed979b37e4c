"""Every kernel as it is launched on a GPU: types, constants, warps. Imports no torch, so it works beside triton alone.

A kernel is one entry of `all_specs`: its function, the types of its pointers and floats, its constants. What is left is int32.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from triton.experimental.gluon.language import NVMMASharedLayout

from evenshare.attention.kernels import forward, hopper_decode, hopper_decode_fp8, hopper_prefill, merge, tile_table
from evenshare.device import epilogue
from evenshare.gemm.kernels import grouped as grouped_matmul
from evenshare.gemm.kernels import hopper_grouped, hopper_matmul, matmul, row_tiles
from evenshare.ops.kernels import append
from evenshare.quant.kernels import dequantize, dequantize_weight, grouped, hopper_few, hopper_w4a16, w4a16
from evenshare.schedule.kernels import parts, shares

if __package__:
    from tests.aot.hopper_gemm_specs import hopper_fp8_specs, hopper_skinny_specs, portable_fp8_specs
    from tests.aot.mla_specs import hopper_mla_specs, mla_specs
    from tests.aot.ops_specs import ops_specs
    from tests.aot.sparse_specs import sparse_specs
    from tests.aot.variant_specs import variant_specs
else:  # beside the script that compiles them
    from hopper_gemm_specs import hopper_fp8_specs, hopper_skinny_specs, portable_fp8_specs
    from mla_specs import hopper_mla_specs, mla_specs
    from ops_specs import ops_specs
    from sparse_specs import sparse_specs
    from variant_specs import variant_specs

FORMS = {
    "symmetric": dequantize.SYMMETRIC,
    "zeros": dequantize.INTEGER_ZEROS,
    "offsets": dequantize.FLOAT_OFFSETS,
    "e2m1": dequantize.E2M1,
    "nf4": dequantize.NF4,
}
# ptxas keeps a few registers on the stack around the calls that divide 64-bit integers, outside the loops.
AROUND_CALLS = 8


@dataclass(frozen=True)
class Spec:
    """One compilation of a kernel."""

    name: str
    kernel: Any  # a jit function
    constants: dict[str, Any]
    # Of pointers and floats, as Triton writes them, and of a tuple those of its parts; an argument left out is int32.
    types: dict[str, Any]
    ones: tuple[str, ...] = ()  # strides that are 1, which the launch specialises on
    unaligned: tuple[str, ...] = ()  # integers that are no multiple of 16
    num_warps: int = 4
    tensor_cores: bool = False  # it must use them
    known_spills: int = 0  # LDL and STL instructions that are accepted in any version and architecture
    architectures: tuple[int, ...] = (80, 90)

    @property
    def wgmma(self) -> bool:
        """Whether sm_90 must use its warp-group instruction, which takes 64 rows."""
        return self.tensor_cores and self.constants.get("BLOCK_M", 64) >= 64 and "TURNS" not in self.constants

    def signature(self) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], list[list[Any]]]]:
        """(types, constants, attributes) by argument, as the launch would specialise them. Raises ValueError for a wrong name."""
        types: dict[str, Any] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        known = {**self.constants, **dict.fromkeys(self.ones, 1)}
        parameters = inspect.signature(self.kernel.fn).parameters
        unspecialized = {*self.unaligned, *(getattr(self.kernel, "do_not_specialize", None) or ())}
        for index, name in enumerate(parameters):
            if name in known:
                types[name] = "constexpr"
                constants[index,] = known[name]
                continue
            types[name] = self.types.get(name, "i32")
            if isinstance(types[name], tuple):  # "1" is the constant
                parts = types[name]
                constants |= {(index, part): 1 for part, kind in enumerate(parts) if kind == "1"}
                attributes |= {
                    (index, part): [["tt.divisibility", 16]] for part, kind in enumerate(parts) if kind[0] == "*"
                }
                types[name] = tuple("constexpr" if kind == "1" else kind for kind in parts)
            elif types[name].startswith("*") or (types[name] == "i32" and name not in unspecialized):
                attributes[index,] = [["tt.divisibility", 16]]
        named = {*self.constants, *self.types, *self.ones, *self.unaligned}
        missing = [name for name in parameters if name.isupper() and name not in self.constants]
        pointers = [
            name
            for name, kind in types.items()
            if name.endswith("_ptr") and not kind.startswith("*") and name not in known
        ]
        if wrong := sorted(named - set(types)) + missing + pointers:
            raise ValueError(f"{self.name}: got no or a wrong entry for {', '.join(wrong)}")
        return types, constants, attributes


def pointers(kind: str, *names: str) -> dict[str, str]:
    return {f"{name}_ptr": f"*{kind}" for name in names}


def profiled(spec: Spec) -> Spec:
    """An attention kernel that records its times."""
    constants = {name: value for name, value in spec.constants.items() if name != "times_ptr"}
    types = spec.types | pointers("i64", "times")
    return replace(spec, name=f"{spec.name} profiled", constants=constants, types=types)


def gemm_specs() -> Iterator[Spec]:
    scratch = {**pointers("fp32", "partials"), **pointers("i32", "counters"), "alpha": "fp32", "beta": "fp32"}
    row_major, transposed = ("stride_a_k", "stride_b_n", "stride_out_n"), ("stride_a_k", "stride_b_k", "stride_out_n")
    strides = ("stride_a_m", "stride_a_k", "stride_b_k", "stride_b_n", "stride_out_m", "stride_out_n")
    # dtype, (block m, n, k), warps, stages, strides of 1, unaligned arguments, activation (with it, a bias; gated, a residual)
    cases: list[tuple[str, tuple[int, int, int], int, int, tuple[str, ...], tuple[str, ...], str | None]] = [
        ("bf16", (128, 128, 64), 8, 3, transposed, (), "gelu"),
        ("bf16", (128, 128, 64), 8, 3, row_major, (), None),
        ("fp16", (64, 64, 64), 4, 4, transposed, (), "silu"),
        ("bf16", (64, 64, 64), 4, 4, row_major, (), None),
        ("bf16", (128, 128, 64), 8, 3, transposed, (), "silu_and_multiply"),
        ("bf16", (128, 128, 64), 8, 3, row_major, (), "gelu_and_multiply"),
        ("fp16", (16, 64, 128), 4, 4, row_major, (), "silu_and_multiply"),
        ("bf16", (16, 64, 128), 4, 4, transposed, (), "gelu_tanh"),
        ("bf16", (128, 128, 32), 8, 3, (), ("m", "n", "k", *strides), None),
        ("bf16", (64, 64, 32), 4, 4, (), ("m", "n", "k", *strides), None),
        ("bf16", (16, 64, 32), 4, 4, (), ("m", "n", "k", *strides), None),
        ("fp32", (64, 64, 32), 8, 3, transposed, (), "gelu"),
        ("fp32", (64, 64, 32), 8, 3, (), ("m", "n", "k", *strides), None),
        ("fp32", (16, 64, 32), 4, 3, row_major, (), "relu"),
        ("tf32", (16, 64, 64), 4, 4, transposed, (), None),
        ("tf32", (64, 64, 32), 4, 4, row_major, (), "relu"),
        ("tf32", (128, 128, 32), 8, 3, transposed, (), None),
        ("tf32", (128, 128, 32), 8, 3, (), ("m", "n", "k", *strides), None),
    ]
    for dtype, block, num_warps, stages, ones, unaligned, activation in cases:
        constants = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), block, strict=True))
        gated = activation is not None and activation.endswith("_and_multiply")
        constants |= {"PRECISION": "tf32" if dtype == "tf32" else "ieee"}
        constants |= {"NUM_STAGES": stages, "ACTIVATION": epilogue.get_activation(activation), "GATED": gated}
        tensors = ["a", "b", "out"]
        for name, present in (("bias", activation is not None), ("residual", gated)):
            if present:
                tensors.append(name)
            else:
                constants[f"{name}_ptr"] = None
        layout = "unaligned" if unaligned else "a b.T" if "stride_b_k" in ones else "a b"
        yield Spec(
            f"gemm {dtype} {'x'.join(map(str, block))} {layout} {activation or ''}".strip(),
            matmul.matmul,
            constants,
            scratch | pointers("fp32" if dtype == "tf32" else dtype, *tensors),
            ones,
            unaligned,
            num_warps,
            tensor_cores=dtype != "fp32",
            known_spills=AROUND_CALLS,
        )


def grouped_matmul_specs() -> Iterator[Spec]:
    # dtype, (block m, n, k), warps, stages, whether weights are transposed, rows by index, activation
    cases = [
        ("bf16", (16, 64, 128), 4, 4, True, True, "silu_and_multiply"),
        ("bf16", (64, 64, 64), 4, 4, False, False, None),
        ("fp16", (128, 128, 64), 8, 3, True, True, None),
        ("fp32", (16, 64, 32), 4, 3, True, False, "relu"),
    ]
    for dtype, block, num_warps, stages, transposed, by_index, activation in cases:
        constants: dict[str, Any] = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), block, strict=True))
        constants |= {"GROUPS": 64, "NUM_STAGES": stages, "ACTIVATION": epilogue.get_activation(activation)}
        constants |= {"GATED": activation == "silu_and_multiply"}
        types = pointers(dtype, "a", "b", "bias", "out") | pointers("fp32", "partials")
        types |= pointers("i32", "offsets", "gather", "scatter", "counters")
        if not by_index:
            constants |= {"gather_ptr": None, "scatter_ptr": None}
            types = {name: kind for name, kind in types.items() if name not in constants}
        yield Spec(
            f"grouped gemm {dtype} {'x'.join(map(str, block))} {'a b.T' if transposed else 'a b'} {activation or ''}".strip(),
            grouped_matmul.grouped_matmul,
            constants,
            types,
            ones=("stride_a_k", "stride_out_n", "stride_bias_n", "stride_b_k" if transposed else "stride_b_n"),
            num_warps=num_warps,
            tensor_cores=dtype != "fp32",
        )


def hopper_matmul_specs() -> Iterator[Spec]:
    """Stream-K GEMM in Gluon."""
    # dtype, block m and n, consumers, stages, k is contiguous in a and b, activation, output by TMA, known spills
    cases = [
        ("bf16", 128, 256, 2, 3, True, True, None, True, 60),
        ("bf16", 128, 256, 2, 3, False, False, None, True, 60),
        ("fp16", 128, 256, 2, 3, True, False, "silu_and_multiply", True, 25),
        ("bf16", 128, 128, 2, 5, True, True, "gelu", True, 0),
        ("bf16", 128, 128, 2, 5, False, True, None, False, 0),
        ("bf16", 64, 256, 1, 4, True, True, None, True, 34),
        ("fp16", 64, 128, 1, 7, False, True, "silu_and_multiply", False, 0),
        ("bf16", 64, 64, 1, 10, True, True, None, True, 0),
    ]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    for dtype, block_m, block_n, consumers, stages, a_k, b_k, activation, by_tma, known_spills in cases:
        gated = activation == "silu_and_multiply"
        rows, columns = block_m // consumers, block_n // 2 if gated else block_n
        constants: dict[str, Any] = {"A_K_MAJOR": a_k, "B_K_MAJOR": b_k, "BLOCK_M": block_m, "BLOCK_N": block_n}
        constants |= {"ACTIVATION": epilogue.get_activation(activation), "GATED": gated, "CONSUMERS": consumers}
        constants |= {"STAGES": stages, "num_warps": 4, "out_ptr" if by_tma else "out": None}
        types = (
            {"alpha": "fp32", "beta": "fp32"}
            | pointers(dtype, "bias", "residual")
            | pointers("fp32", "partials")
            | pointers("i32", "counters")
        )
        boxes = {"a": [rows, 64] if a_k else [64, 64], "b": [columns, 64] if b_k else [64, 64]}
        if by_tma:
            boxes["out"] = [rows, columns]
        else:
            types |= pointers(dtype, "out")
        types |= {name: f"tensordesc<{dtype}{box},{layout!r}>" for name, box in boxes.items()}
        yield Spec(
            f"hopper matmul {dtype} {block_m}x{block_n} {'mk'[a_k]}{'nk'[b_k]} {activation or ''}".strip(),
            hopper_matmul.matmul,
            constants,
            types,
            ones=("stride_out_n",),
            tensor_cores=True,
            known_spills=known_spills,
            architectures=(90,),
        )


def hopper_grouped_specs() -> Iterator[Spec]:
    """Grouped GEMM in Gluon, and the table of its row tiles."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # dtype, block n, stages, activation (with it, a bias), output by TMA, known spills
    cases = [
        ("bf16", 256, 3, None, True, 0),
        ("bf16", 256, 3, "silu_and_multiply", True, 0),
        ("fp16", 128, 5, None, True, 0),
        ("bf16", 128, 5, "silu_and_multiply", False, 0),
    ]
    for dtype, block_n, stages, activation, by_tma, known_spills in cases:
        gated = activation == "silu_and_multiply"
        columns = block_n // 2 if gated else block_n
        constants: dict[str, Any] = {"BLOCK_N": block_n, "STAGES": stages, "GATED": gated, "num_warps": 4}
        constants |= {"ACTIVATION": epilogue.get_activation(activation)}
        types = pointers(dtype, "out", "bias") | pointers("fp32", "partials") | pointers("i32", "counters", "table")
        boxes = {"a": [64, 64], "b": [columns, 64]} | ({"out": [64, columns]} if by_tma else {})
        types |= {name: f"tensordesc<{dtype}{box},{layout!r}>" for name, box in boxes.items()}
        if not by_tma:
            constants["out"] = None
        if activation is None:
            del types["bias_ptr"]
            constants["bias_ptr"] = None
        yield Spec(
            f"hopper grouped gemm {dtype} 128x{block_n} {activation or ''}".strip(),
            hopper_grouped.grouped_matmul,
            constants,
            types,
            ones=("stride_out_n",),
            tensor_cores=True,
            known_spills=known_spills,
            architectures=(90,),
        )
    yield Spec(
        "row tiles",
        row_tiles.row_tiles,
        {"BLOCK_M": 128, "GROUPS": 256, "TILES": 16},
        pointers("i32", "offsets", "table") | pointers("bf16", "out"),
        ("stride_out_n",),
    )


def w4a16_specs() -> Iterator[Spec]:
    # dtype, bits, group, form, block m and n, warps, what is special
    cases = [
        ("bf16", 4, 128, "symmetric", 16, 64, 4, ""),
        ("bf16", 4, 32, "offsets", 16, 64, 4, ""),
        ("fp16", 4, 128, "zeros", 32, 64, 4, ""),
        ("bf16", 4, 128, "symmetric", 64, 128, 4, ""),
        ("bf16", 4, 32, "offsets", 128, 128, 8, ""),
        ("bf16", 8, 32, "symmetric", 16, 64, 4, ""),
        ("fp32", 4, 32, "offsets", 16, 64, 4, ""),
        ("fp32", 4, 32, "offsets", 64, 64, 8, ""),
        ("bf16", 4, 16, "e2m1", 16, 64, 4, ""),
        ("bf16", 4, 32, "e2m1", 128, 128, 8, ""),
        ("bf16", 4, 64, "nf4", 16, 64, 4, ""),
        ("bf16", 4, 64, "nf4", 128, 128, 8, ""),
        ("fp16", 4, 16, "zeros", 16, 64, 4, "permutation"),
        ("fp16", 4, 128, "symmetric", 64, 128, 4, "permutation"),
        ("bf16", 4, 128, "symmetric", 16, 64, 4, "gated"),
        ("bf16", 4, 128, "symmetric", 128, 128, 8, "gated"),
        ("bf16", 4, 32, "offsets", 128, 128, 8, "gated"),
        ("bf16", 4, 32, "symmetric", 16, 64, 4, "residual"),
        ("bf16", 4, 128, "symmetric", 128, 128, 8, "residual"),
    ]
    for dtype, bits, group, form, block_m, block_n, num_warps, special in cases:
        scale = "bf16" if dtype == "bf16" else "fp16"
        constants = {
            "BITS": bits,
            "GROUP_SIZE": group,
            "FORM": FORMS[form].value,
            "GATED": special == "gated",
            "ACTIVATION": epilogue.get_activation("silu" if block_m == 16 else None),
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "NUM_STAGES": 3,
        }
        types = (
            pointers(dtype, "x", "bias", "residual", "out")
            | pointers(scale, "scales", "zeros")
            | pointers("fp32", "partials")
        )
        types |= pointers("i32", "words", "counters")
        for name, kind in (("permutation", "i32"), ("residual", dtype)):
            if special == name:
                types |= pointers(kind, name)
            else:
                constants[f"{name}_ptr"] = None
        if form == "zeros":
            types |= pointers("u8", "zeros")
        name = f"w{bits}a16 {dtype} {block_m}x{block_n} g{group} {form} {special}".strip()
        ones = ("stride_x_k", "stride_out_n")
        yield Spec(
            name,
            w4a16.w4a16,
            constants,
            types,
            ones,
            num_warps=num_warps,
            tensor_cores=dtype != "fp32",
            known_spills=60
            if block_m == 128 and (form, special) in (("nf4", ""), ("offsets", "gated"))
            else 0,  # on sm_80
        )


def grouped_specs() -> Iterator[Spec]:
    """The 4-bit product of experts."""
    scratch = pointers("fp32", "partials") | pointers("i32", "words", "counters", "offsets")
    # dtype, group, form, block m and n, warps, activation, known spills on sm_80
    cases = [
        ("bf16", 32, "e2m1", 16, 64, 4, "silu_and_multiply", 0),
        ("bf16", 128, "symmetric", 32, 64, 4, None, 0),
        ("fp16", 128, "zeros", 64, 128, 4, "silu_and_multiply", 0),
        ("bf16", 128, "symmetric", 128, 128, 8, "silu_and_multiply", 0),
        ("bf16", 128, "symmetric", 128, 128, 8, None, 0),
    ]
    for dtype, group, form, block_m, block_n, num_warps, activation, known_spills in cases:
        constants = {"BITS": 4, "GROUP_SIZE": group, "FORM": FORMS[form].value, "EXPERTS": 128, "NUM_STAGES": 3}
        constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "ACTIVATION": epilogue.get_activation(activation)}
        constants |= {"GATED": activation is not None, "permutation_ptr": None}
        types = scratch | pointers(dtype, "x", "bias", "out") | pointers(dtype, "scales", "zeros")
        if form == "zeros":
            types |= pointers("u8", "zeros")
        yield Spec(
            f"grouped w4a16 {dtype} {block_m}x{block_n} g{group} {form} {activation or ''}".strip(),
            grouped.grouped_w4a16,
            constants,
            types,
            ("stride_x_k", "stride_out_n"),
            num_warps=num_warps,
            tensor_cores=True,
            known_spills=known_spills,
        )


def dequantize_specs() -> Iterator[Spec]:
    """Weights written out for products of many tokens."""
    # dtype, bits, group (None: one), form, columns a program
    cases = [
        ("bf16", 4, 128, "symmetric", 4096),
        ("fp16", 4, 16, "zeros", 4096),
        ("bf16", 4, 32, "offsets", 2048),
        ("bf16", 4, 64, "nf4", 4096),
        ("fp16", 4, 32, "e2m1", 512),
        ("bf16", 8, 32, "symmetric", 4096),
        ("fp32", 4, None, "symmetric", 4096),
    ]
    for dtype, bits, group, form, block_k in cases:
        scale = "fp16" if dtype == "fp16" else "bf16"
        types = (
            pointers("u8", "codes") | pointers(scale, "scales", "zeros") | pointers(dtype, "out") | {"factor": "fp32"}
        )
        if form == "zeros":
            types |= pointers("u8", "zeros")
        constants = {"BITS": bits, "GROUP_SIZE": group or 1 << 30, "FORM": FORMS[form].value, "BLOCK_K": block_k}
        if form == "symmetric":
            types |= pointers("i32", "offsets")  # of experts
        else:
            constants["offsets_ptr"] = None
        yield Spec(
            f"dequantize w{bits} {dtype} g{group or 'k'} {form} {block_k}",
            dequantize_weight.dequantize_weight,
            constants,
            types,
            ("stride_codes_k", "stride_scales_g", "stride_zeros_g"),
            num_warps=max(block_k // 1024, 1),
        )


def hopper_few_specs() -> Iterator[Spec]:
    """The 4-bit product of few tokens in Gluon."""
    # dtype, tokens, turns on the way, those of a unit, turns, group, form, activation, known spills
    cases = [
        ("bf16", 1, 4, 4, 4, 128, "symmetric", None, 0),
        ("bf16", 1, 4, 1, 7, 128, "symmetric", None, 0),
        ("fp16", 1, 2, 2, 8, 64, "zeros", "gelu", 0),
        ("bf16", 8, 4, 4, 4, 128, "symmetric", "silu_and_multiply", 0),
        ("bf16", 8, 2, 2, 2, 32, "offsets", None, 0),
        ("bf16", 8, 4, 4, 4, 64, "symmetric", None, 28),
        ("fp16", 8, 2, 2, 2, 16, "zeros", None, 40),
        ("bf16", 1, 2, 2, 4, 32, "e2m1", None, 0),
        ("bf16", 8, 2, 2, 4, 16, "e2m1", None, 0),
        ("fp16", 8, 4, 1, 1, 64, "nf4", "silu_and_multiply", 0),
    ]
    for dtype, tokens, depth, unit, turns, group, form, activation, known_spills in cases:
        constants: dict[str, Any] = {"GROUP_SIZE": group, "FORM": FORMS[form].value, "TOKENS": tokens}
        constants |= {"ACTIVATION": epilogue.get_activation(activation), "GATED": activation == "silu_and_multiply"}
        constants |= {"DEPTH": depth, "UNIT": unit, "TURNS": turns, "num_warps": 16, "residual_ptr": None}
        types = pointers(dtype, "x", "scales", "zeros", "bias", "out") | pointers("i32", "words")
        if form == "zeros":
            types |= pointers("i16", "zeros")
        elif form != "offsets":
            del types["zeros_ptr"]
            constants["zeros_ptr"] = None
        yield Spec(
            f"hopper few w4a16 {dtype} {tokens}, {depth} of {turns} turns, g{group} {form} {activation or ''}".strip(),
            hopper_few.w4a16_few,
            constants,
            types,
            ones=("stride_out_n",),
            num_warps=16,
            tensor_cores=True,
            known_spills=known_spills,
            architectures=(90,),
        )


def hopper_w4a16_specs() -> Iterator[Spec]:
    """The 4-bit product in Gluon."""
    # dtype, tokens, strips, stages, group, form, activation, known spills
    cases = [
        ("bf16", 8, 4, 11, 128, "symmetric", None, 0),
        ("bf16", 8, 4, 8, 16, "offsets", None, 0),
        ("fp16", 16, 4, 9, 64, "zeros", "silu_and_multiply", 19),
        ("bf16", 16, 4, 10, 32, "symmetric", None, 0),
        ("bf16", 32, 2, 12, 128, "zeros", "gelu", 0),
        ("bf16", 64, 2, 8, 128, "symmetric", "silu_and_multiply", 0),
        ("fp16", 64, 2, 8, 32, "offsets", None, 70),
        ("bf16", 128, 2, 5, 128, "symmetric", None, 0),
        ("bf16", 128, 2, 5, 32, "zeros", None, 70),
        ("bf16", 8, 4, 10, 32, "e2m1", None, 0),
        ("fp16", 16, 4, 8, 16, "e2m1", None, 0),
        ("bf16", 8, 4, 10, 64, "nf4", "relu", 0),
        ("bf16", 64, 2, 8, 16, "e2m1", None, 0),
        ("bf16", 128, 2, 5, 64, "nf4", None, 6),
    ]

    def boxes(dtype: str, shape: list[int], width: int, bits: int) -> str:
        layout = NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=bits, rank=len(shape))
        return f"tensordesc<{dtype}{shape},{layout!r}>"

    for dtype, block_m, strips, stages, group, form, activation, known_spills in cases:
        constants: dict[str, Any] = {"GROUP_SIZE": group, "FORM": FORMS[form].value, "STRIPS": strips, "STAGES": stages}
        constants |= {"ACTIVATION": epilogue.get_activation(activation), "GATED": activation == "silu_and_multiply"}
        constants |= {"BLOCK_M": block_m, "num_warps": 4}
        types = pointers(dtype, "bias", "residual", "out") | pointers("fp32", "partials") | pointers("i32", "counters")
        types |= {"x": boxes(dtype, [block_m, 64], 128, 16), "words": boxes("i32", [strips, 1, 16, 32], 128, 32)}
        scale = "fp32" if form == "nf4" else dtype
        types["scales"] = boxes(scale, [128 // group, 8, 8 * strips], strips * int(scale[-2:]), int(scale[-2:]))
        types["zeros"] = boxes("i16" if form == "zeros" else dtype, [128 // group, 8, 8 * strips], 16 * strips, 16)
        if form not in ("zeros", "offsets"):
            del types["zeros"]
            constants["zeros"] = None
        yield Spec(
            f"hopper w4a16 {dtype} {block_m}x{64 * strips} g{group} {form} {activation or ''}".strip(),
            hopper_w4a16.w4a16,
            constants,
            types,
            ones=("stride_out_n",),
            tensor_cores=True,
            known_spills=known_spills,
            architectures=(90,),
        )


def attention_specs() -> Iterator[Spec]:
    shared = pointers("fp32", "lse", "partial_o", "partial_lse")
    shared |= pointers("i32", "kv_indices", "worker_indptr", "segments", "tiles", "counters", "status")
    shared |= dict.fromkeys(("sm_scale", "logits_soft_cap", "lse_scale"), "fp32")
    plain = {"GROUP": 4, "PAGE_SIZE": 16, "DENSE": False, "SAME_STRIDES": True, "CAUSAL": True, "HAS_WINDOW": False,
             "HAS_SOFT_CAP": False, "HAS_LSE": True, "PRECISION": "ieee", "times_ptr": None}  # fmt: skip
    plain |= dict.fromkeys(("VARIANT", "SINK", "QUERY", "KEY", "VALUE", "OUTPUT", "variant_args"))
    plain |= {"BASE_2": True, "SOFTMAX": True}
    scales = ("k_scale", "v_scale")
    # dtype, head dim, (block m, n), warps, stages, known spills, what differs from `plain`
    cases: list[tuple[str, int, tuple[int, int], int, int, int, dict[str, Any]]] = [
        ("bf16", 128, (16, 128), 4, 3, 36, {}),
        ("bf16", 128, (16, 128), 4, 3, 38, {"PAGE_SIZE": 1}),
        ("fp16", 64, (16, 128), 4, 3, 0, {"GROUP": 3, "HAS_WINDOW": True}),
        ("bf16", 256, (16, 64), 8, 2, 0, {}),
        ("bf16", 128, (32, 64), 4, 3, 4, {"HAS_SOFT_CAP": True}),
        ("bf16", 256, (32, 32), 8, 2, 0, {}),
        ("bf16", 128, (64, 64), 8, 2, 74, {"PAGE_SIZE": 1, "SAME_STRIDES": False}),
        ("bf16", 128, (128, 64), 8, 3, 30, {}),
        ("bf16", 128, (128, 64), 8, 3, 14, {"PAGE_SIZE": 0, "HAS_SOFT_CAP": True}),
        ("fp16", 80, (128, 64), 8, 3, 32, {"PAGE_SIZE": 0, "DENSE": True, "CAUSAL": False, "HAS_WINDOW": True}),
        ("bf16", 256, (64, 32), 8, 2, 16, {}),
        ("fp32", 128, (16, 32), 4, 2, 12, {}),
        ("fp32", 256, (16, 16), 4, 2, 4, {}),
        ("fp32", 128, (32, 32), 8, 2, 18, {}),
        ("fp32", 256, (32, 16), 8, 2, 0, {"HAS_SOFT_CAP": True}),
    ]
    fp8: list[tuple[str, int, tuple[int, int], int, int, int, dict[str, Any]]] = [
        ("bf16", 128, (16, 128), 4, 3, 22, {}),
        ("bf16", 256, (16, 64), 8, 2, 0, {"PAGE_SIZE": 1}),
        ("fp16", 64, (32, 64), 4, 3, 0, {"HAS_SOFT_CAP": True}),
        ("bf16", 128, (128, 64), 8, 3, 66, {"PAGE_SIZE": 0}),
    ]
    for number, (dtype, dim, (block_m, block_n), num_warps, stages, known_spills, changed) in enumerate(
        [*cases, *fp8, *fp8[::3]]
    ):
        keys = dtype if number < len(cases) else "fp8e4nv"
        queries = "fp8e4nv" if number >= len(cases) + len(fp8) else dtype  # the last ones
        block_d = 1 << (dim - 1).bit_length()
        constants = plain | {"HEAD_DIM": dim, "HEAD_DIM_V": dim, "BLOCK_D": block_d, "BLOCK_DV": block_d} | changed
        constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "NUM_STAGES": stages}
        details = ", ".join(f"{name.lower()}={value}" for name, value in changed.items())
        types = shared | pointers(queries, "q") | pointers(dtype, "out") | pointers(keys, "k", "v")
        if keys == dtype:
            constants |= {f"{name}_ptr": None for name in scales}
        else:
            types |= pointers("fp32", *scales)
        name = f"{dtype} {'' if queries == dtype else 'fp8 queries '}{'' if keys == dtype else 'fp8 keys '}"
        yield Spec(
            f"attention {name}D={dim} {block_m}x{block_n} {details}".strip(),
            forward.forward,
            constants,
            types,
            ("stride_lse_head",),
            ("window_left", "num_kv_heads", "num_q_starts", "num_q_tokens", "num_pages", "num_indices"),
            num_warps,
            tensor_cores=dtype != "fp32",
            known_spills=known_spills,
            architectures=(80, 90) if keys == dtype else (90,),
        )


def hopper_specs() -> Iterator[Spec]:
    """Attention in Gluon: K and V by TMA boxes, or gathered."""
    shared = pointers("fp32", "lse", "partial_o", "partial_lse")
    shared |= pointers("i32", "kv_indices", "worker_indptr", "segments", "tiles", "counters", "status")
    shared |= dict.fromkeys(("sm_scale", "logits_soft_cap", "lse_scale"), "fp32")
    plain = {"GROUP": 4, "PAGE_SIZE": 0, "DENSE": False, "times_ptr": None}
    plain |= {"CAUSAL": True, "HAS_WINDOW": False, "HAS_SOFT_CAP": False, "HAS_LSE": True}
    # dtype, head dims of k and v, block n, q buffers, stages, keys of a box (0: gathered), known spills, what differs from `plain`
    cases: list[tuple[str, int, int, int, int, int, int, int, dict[str, Any]]] = [
        ("bf16", 128, 128, 128, 2, 2, 128, 3, {"DENSE": True, "GROUP": 1, "HAS_LSE": False}),
        ("bf16", 128, 128, 128, 2, 2, 128, 0, {"CAUSAL": False}),
        ("bf16", 128, 128, 128, 2, 2, 16, 3, {"PAGE_SIZE": 16}),
        ("bf16", 128, 128, 128, 2, 2, 128, 0, {"PAGE_SIZE": 256, "HAS_WINDOW": True}),
        ("bf16", 128, 128, 128, 2, 2, 0, 25, {"PAGE_SIZE": 1}),
        ("fp16", 72, 72, 128, 2, 2, 0, 195, {"GROUP": 7, "HAS_SOFT_CAP": True}),
        ("fp16", 64, 64, 128, 2, 3, 64, 3, {"PAGE_SIZE": 64, "HAS_SOFT_CAP": True}),
        ("bf16", 256, 256, 64, 1, 2, 64, 21, {}),
        ("bf16", 192, 128, 64, 1, 2, 16, 0, {"PAGE_SIZE": 16}),
        ("bf16", 256, 256, 64, 1, 2, 0, 53, {"PAGE_SIZE": 1}),
    ]
    fp8: list[tuple[str, int, int, int, int, int, int, int, dict[str, Any]]] = [
        ("bf16", 128, 128, 128, 2, 2, 0, 53, {"PAGE_SIZE": 16}),
        ("fp16", 80, 80, 128, 2, 2, 0, 178, {"HAS_SOFT_CAP": True, "GROUP": 7}),
        ("bf16", 64, 64, 128, 2, 3, 0, 0, {"DENSE": True, "CAUSAL": False, "HAS_WINDOW": True}),
        ("bf16", 256, 256, 64, 1, 2, 0, 60, {"PAGE_SIZE": 1}),
    ]
    for number, case in enumerate([*cases, *fp8, *fp8[:2]]):
        dtype, dim, dim_v, block_n, q_buffers, stages, box, known_spills, changed = case
        codes = number >= len(cases)  # the last ones with q in fp8 as well
        queries = "fp8e4nv" if number >= len(cases) + len(fp8) else dtype
        blocks = {f"BLOCK_{name}": max(1 << (size - 1).bit_length(), 64) for name, size in (("D", dim), ("DV", dim_v))}
        constants = plain | {"HEAD_DIM": dim, "HEAD_DIM_V": dim_v, "BLOCK_N": block_n, **blocks} | changed
        constants |= {"GATHER": box == 0, "BOX": box, "Q_BUFFERS": q_buffers, "STAGES": stages, "num_warps": 4}
        constants |= dict(
            zip(("CONSUMER_REGISTERS", "PRODUCER_REGISTERS"), (232, 40) if box else (224, 56), strict=True)
        )
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
        keys = f"tensordesc<{dtype}[1, 1, {box}, 64],{layout!r}>" if box else "*fp8e4nv" if codes else f"*{dtype}"
        details = ", ".join(f"{name.lower()}={value}" for name, value in changed.items())
        group, dense = constants["GROUP"], constants["DENSE"]
        constants["Q_BOX"] = 0 if 64 % group or queries != dtype else 64 // group
        types = shared | pointers(dtype, "out") | {"q": f"*{queries}", "k": keys, "v": keys}
        if constants["Q_BOX"]:
            q_layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5 if dense else 4)
            q_box = [1] * dense + [64 // group, 1, group, 64]
            types["q"] = f"tensordesc<{dtype}{q_box},{q_layout!r}>"
        if codes:
            types |= pointers("fp32", "k_scale", "v_scale")
        else:
            constants |= {"k_scale_ptr": None, "v_scale_ptr": None}
        name = f"{dtype} {'' if queries == dtype else 'fp8 queries '}{'fp8 keys ' if codes else ''}D={dim},{dim_v}"
        yield Spec(
            f"hopper attention {name} box={box} {details}".strip(),
            hopper_prefill.prefill,
            constants,
            types,
            unaligned=("stride_lse_head", "stride_q_head", "stride_k_head") if dim == 72 else ("stride_lse_head",),
            tensor_cores=True,
            known_spills=known_spills,
            architectures=(90,),
        )


def decode_specs() -> Iterator[Spec]:
    """The Hopper kernel for few rows."""
    shared = pointers("fp32", "lse", "partial_o", "partial_lse")
    shared |= pointers("i32", "kv_indices", "worker_indptr", "segments", "tiles", "counters", "status")
    shared |= dict.fromkeys(("sm_scale", "logits_soft_cap", "lse_scale"), "fp32")
    plain = {"GROUP": 8, "PAGE_SIZE": 16, "DENSE": False, "times_ptr": None}
    plain |= {"CAUSAL": True, "HAS_WINDOW": False, "HAS_SOFT_CAP": False, "HAS_LSE": True}
    # dtype, head dims of k and v, rows, keys, stages, keys of a box (0: gathered), what differs from `plain`
    cases: list[tuple[str, int, int, int, int, int, int, dict[str, Any]]] = [
        ("bf16", 128, 128, 8, 128, 3, 16, {}),
        ("bf16", 128, 128, 16, 128, 3, 64, {"PAGE_SIZE": 64, "HAS_WINDOW": True, "HAS_LSE": False}),
        ("bf16", 128, 128, 8, 64, 6, 0, {"PAGE_SIZE": 1}),
        ("bf16", 128, 128, 32, 128, 3, 128, {"PAGE_SIZE": 0, "DENSE": True, "CAUSAL": False}),
        ("fp16", 64, 64, 32, 128, 6, 128, {"PAGE_SIZE": 256, "HAS_SOFT_CAP": True}),
        ("fp16", 72, 72, 8, 64, 6, 0, {"PAGE_SIZE": 24, "GROUP": 7, "HAS_SOFT_CAP": True}),
        ("bf16", 256, 256, 8, 64, 3, 16, {}),
        ("bf16", 128, 128, 8, 64, 6, 0, {"PAGE_SIZE": 0}),  # no request has a key: TMA takes no empty tensor
        ("bf16", 256, 256, 16, 64, 3, 0, {"PAGE_SIZE": 1, "HAS_WINDOW": True}),
        ("bf16", 192, 128, 16, 64, 3, 16, {"CAUSAL": False}),
    ]
    for dtype, dim, dim_v, block_m, block_n, stages, box, changed in cases:
        blocks = {f"BLOCK_{name}": max(1 << (size - 1).bit_length(), 64) for name, size in (("D", dim), ("DV", dim_v))}
        constants = plain | {"HEAD_DIM": dim, "HEAD_DIM_V": dim_v, "BLOCK_M": block_m, "BLOCK_N": block_n, **blocks}
        constants |= changed | {"GATHER": box == 0, "BOX": box, "STAGES": stages, "num_warps": 4}
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
        keys = f"tensordesc<{dtype}[1, 1, {box}, 64],{layout!r}>" if box else f"*{dtype}"
        details = ", ".join(f"{name.lower()}={value}" for name, value in changed.items())
        yield Spec(
            f"hopper decode {dtype} D={dim},{dim_v} {block_m}x{block_n} box={box} {details}".strip(),
            hopper_decode.decode,
            constants,
            shared | pointers(dtype, "q", "out") | {"k": keys, "v": keys},
            unaligned=("stride_lse_head", "stride_q_head", "stride_k_head") if dim == 72 else ("stride_lse_head",),
            tensor_cores=True,
            architectures=(90,),
        )


def fp8_decode_specs() -> Iterator[Spec]:
    """The Hopper kernel for few rows and fp8 keys."""
    shared = pointers("fp32", "lse", "partial_o", "partial_lse", "k_scale", "v_scale")
    shared |= pointers("i32", "kv_indices", "worker_indptr", "segments", "tiles", "counters", "status")
    shared |= dict.fromkeys(("sm_scale", "logits_soft_cap", "lse_scale"), "fp32")
    plain = {"GROUP": 8, "PAGE_SIZE": 16, "DENSE": False, "times_ptr": None}
    plain |= {"CAUSAL": True, "HAS_WINDOW": False, "HAS_SOFT_CAP": False, "HAS_LSE": True}
    # dtype, head dims of k and v, rows, keys, stages, keys of a box (0: gathered), known spills, what differs from `plain`
    cases: list[tuple[str, int, int, int, int, int, int, int, dict[str, Any]]] = [
        ("bf16", 128, 128, 8, 128, 6, 16, 0, {}),
        ("bf16", 128, 128, 16, 128, 6, 64, 0, {"PAGE_SIZE": 64, "HAS_WINDOW": True, "HAS_LSE": False}),
        ("fp16", 128, 128, 8, 64, 12, 0, 0, {"PAGE_SIZE": 1}),
        ("bf16", 128, 128, 32, 64, 11, 64, 0, {"PAGE_SIZE": 0, "DENSE": True, "CAUSAL": False}),
        ("fp16", 64, 64, 16, 128, 6, 128, 0, {"PAGE_SIZE": 256, "HAS_SOFT_CAP": True}),
        ("bf16", 80, 80, 8, 64, 12, 0, 0, {"PAGE_SIZE": 24, "GROUP": 7, "HAS_SOFT_CAP": True}),
        ("bf16", 256, 256, 8, 64, 6, 16, 12, {}),
        ("bf16", 256, 256, 16, 64, 5, 0, 70, {"PAGE_SIZE": 1, "HAS_WINDOW": True}),
        ("bf16", 192, 128, 16, 64, 8, 16, 0, {"CAUSAL": False}),
    ]
    fp8_q: list[tuple[str, int, int, int, int, int, int, int, dict[str, Any]]] = [
        ("bf16", 128, 128, 8, 128, 6, 16, 0, {}),
        ("bf16", 128, 128, 32, 64, 11, 64, 6, {"PAGE_SIZE": 0, "DENSE": True, "CAUSAL": False}),
        ("bf16", 256, 256, 16, 64, 5, 0, 141, {"PAGE_SIZE": 1, "HAS_WINDOW": True}),
    ]
    for number, case in enumerate([*cases, *fp8_q]):
        dtype, dim, dim_v, block_m, block_n, stages, box, known_spills, changed = case
        queries = dtype if number < len(cases) else "fp8e4nv"
        blocks = {f"BLOCK_{name}": max(1 << (size - 1).bit_length(), 128) for name, size in (("D", dim), ("DV", dim_v))}
        constants = plain | {"HEAD_DIM": dim, "HEAD_DIM_V": dim_v, "BLOCK_M": block_m, "BLOCK_N": block_n, **blocks}
        constants |= changed | {"GATHER": box == 0, "BOX": box, "STAGES": stages, "num_warps": 4}
        constants |= dict(
            zip(("CONSUMER_REGISTERS", "PRODUCER_REGISTERS"), (232, 40) if box else (208, 88), strict=True)
        )
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)
        keys = f"tensordesc<fp8e4nv[1, 1, {box}, 128],{layout!r}>" if box else "*fp8e4nv"
        details = ", ".join(f"{name.lower()}={value}" for name, value in changed.items())
        name = f"{dtype} {'' if queries == dtype else 'fp8 queries '}fp8 keys D={dim},{dim_v}"
        yield Spec(
            f"hopper decode {name} {block_m}x{block_n} box={box} {details}".strip(),
            hopper_decode_fp8.decode,
            constants,
            shared | pointers(queries, "q") | pointers(dtype, "out") | {"k": keys, "v": keys},
            unaligned=("stride_lse_head",),
            tensor_cores=True,
            known_spills=known_spills,
            architectures=(90,),
        )


def merge_specs() -> Iterator[Spec]:
    constants = {"HEAD_DIM": 128, "BLOCK_M": 8, "BLOCK_D": 128}
    types = pointers("fp32", "lse", "lse_a", "lse_b", "lse_out") | {"log2_base": "fp32"}
    for name, tensors in (("merge_state", ("o_a", "o_b", "out")), ("merge_states", ("o", "out"))):
        kernel = getattr(merge, name)
        own = {argument: kind for argument, kind in types.items() if argument in kernel.arg_names}
        own |= pointers("bf16", *tensors)
        sizes = ("num_rows", "num_heads")
        yield Spec(name, kernel, constants, own, ("stride_out_dim",), sizes, known_spills=AROUND_CALLS)


def small_specs() -> Iterator[Spec]:
    """Kernels of indices: planning, the tile table, appending to a cache."""
    for form in (0, 1, 2):
        for has_qo in (False, True):
            constants = {"HAS_QO": has_qo, "FORM": form, "PAGE_SIZE": 16 if form else 0, "GROUP": 4, "BLOCK_M": 16}
            constants |= {
                "CAUSAL": True,
                "HAS_WINDOW": True,
                "HEADS": 8,
                "BLOCK_N": 128,
                "BLOCK": 128,
                "REQUEST_BLOCK": 1024,
            }
            types = pointers("i32", "qo_indptr", "kv_indptr", "kv_lens", "tiles", "iterations", "num_tiles", "status")
            counts = ("batch", "max_tiles", "table_stride", "table_width", "num_indices", "window_left")
            name = f"tile_table form {form} {'queries' if has_qo else 'one query'}"
            yield Spec(name, tile_table.tile_table, constants, types, unaligned=counts)
    rows = pointers("i32", "iterations", "num_rows", "status", "worker_indptr", "segments", "waves", "numbers")
    rows |= pointers("i32", "slot_cum", "split_cum")
    rows |= pointers("i64", "totals", "ends", "loads", "part_cum")
    sizes = ("max_rows", "inner", "overhead", "parameter", "num_workers", "max_segments")
    workers = {"WORKER_BLOCK": 512}
    planners: list[tuple[Any, dict[str, Any], int]] = [
        *((shares.measure_waves, {"BLOCK": block, "WAVE_BLOCK": 64}, 4) for block in (128, 1024)),
        *(
            (shares.plan_shares, workers | {"BLOCK": block, "LEVEL": level, "FILL_BLOCK": 128}, 8)
            for block in (128, 1024)
            for level in (False, True)
        ),
        *((parts.measure_parts, workers | {"BLOCK": 1024, "CUT": cut}, 4) for cut in (0, 1, 2)),
        *((parts.fill_parts, {"CUT": cut, "BLOCK": 128}, 4) for cut in (0, 1, 2)),
    ]
    known_spills = {shares.plan_shares: AROUND_CALLS, shares.measure_waves: 6}  # the latter around its loops
    for kernel, constants, num_warps in planners:
        types = {argument: kind for argument, kind in rows.items() if argument in kernel.arg_names}
        unaligned = tuple(size for size in sizes if size in kernel.arg_names)
        details = " ".join(
            f"{key.lower()}={value}" for key, value in constants.items() if key in ("LEVEL", "CUT", "BLOCK")
        )
        yield Spec(
            f"{kernel.__name__} {details}",
            kernel,
            constants,
            types,
            unaligned=unaligned,
            num_warps=num_warps,
            known_spills=known_spills.get(kernel, 0),
        )
    for has_indptr in (False, True):
        types = pointers("bf16", "k", "v", "k_cache", "v_cache")
        types |= pointers("i32", "batch_indices", "positions", "kv_indptr", "table")
        constants = {"HAS_INDPTR": has_indptr, "HEAD_DIM": 128, "HEAD_DIM_V": 128, "BLOCK_M": 4, "BLOCK_D": 128}
        ones = ("stride_batch", "stride_position", "stride_k_dim", "stride_v_dim", "stride_kc_dim", "stride_vc_dim")
        counts = ("num_rows", "num_heads", "num_requests", "num_entries", "table_width", "num_pages")
        yield Spec(
            f"append {'indptr' if has_indptr else 'block table'}",
            append.append_paged_kv_cache,
            constants,
            types,
            ones,
            counts,
        )


def all_specs() -> list[Spec]:
    return [
        *gemm_specs(),
        *w4a16_specs(),
        *grouped_specs(),
        *dequantize_specs(),
        *hopper_few_specs(),
        *hopper_w4a16_specs(),
        *grouped_matmul_specs(),
        *hopper_grouped_specs(),
        *hopper_matmul_specs(),
        *portable_fp8_specs(Spec, pointers),
        *hopper_fp8_specs(Spec, pointers),
        *hopper_skinny_specs(Spec, pointers),
        *attention_specs(),
        *hopper_specs(),
        *decode_specs(),
        *fp8_decode_specs(),
        *(profiled(next(specs())) for specs in (attention_specs, hopper_specs, decode_specs)),
        *merge_specs(),
        *small_specs(),
        *sparse_specs(Spec, pointers),
        *mla_specs(Spec, pointers),
        *hopper_mla_specs(Spec, pointers),
        *ops_specs(Spec, pointers),
        *variant_specs(attention_specs()),
    ]

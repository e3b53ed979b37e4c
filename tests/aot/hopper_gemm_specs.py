"""The fp8 products and those of few rows, as they are launched; a function of `specs.Spec`, as `ops_specs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from triton.experimental.gluon.language import NVMMASharedLayout

from evenshare.device import epilogue
from evenshare.gemm.kernels import hopper_scaled, hopper_skinny, scaled_matmul

CODES = {"e4m3": "fp8e4nv", "e5m2": "fp8e5"}
SCRATCH = {"partials_ptr": "*fp32", "counters_ptr": "*i32", "alpha": "fp32", "beta": "fp32"}
SCALES = {"scale_a_ptr": "*fp32", "scale_b_ptr": "*fp32"}


def _is_gated(activation: str | None) -> bool:
    return activation is not None and activation.endswith("_and_multiply")


def portable_fp8_specs(spec: type, pointers: Callable[..., dict[str, str]]) -> Iterator[Any]:
    # codes of a and b, block m, n and k, warps, stages, a's scales (None: numbers), columns per scale, activation, strides of 1
    row_major, transposed = ("stride_a_k", "stride_b_n"), ("stride_a_k", "stride_b_k")
    cases = [
        ("e4m3 e4m3", (16, 64, 128), 4, 4, "blocks", 128, "silu", transposed),
        ("e4m3 e4m3", (64, 64, 64), 4, 4, "blocks", 128, None, transposed),
        ("e4m3 e5m2", (64, 64, 64), 4, 4, "rows", 1, None, row_major),
        ("e4m3 e4m3", (128, 64, 64), 8, 4, "blocks", 128, "silu_and_multiply", transposed),
        ("e4m3 e4m3", (128, 64, 64), 8, 4, None, 1, None, transposed),
        ("e5m2 e4m3", (128, 64, 64), 8, 4, "rows", 1, "gelu", row_major),
        ("e4m3 e4m3", (128, 64, 32), 8, 4, "blocks", 128, None, ()),
        ("e4m3 e4m3", (16, 64, 32), 4, 4, "rows", 1, None, ()),
        ("e4m3 e4m3", (64, 64, 32), 4, 4, "rows", 1, None, ()),
    ]
    for kinds, block, num_warps, stages, scales, columns_per_scale, activation, ones in cases:
        a, b = kinds.split()
        constants = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), block, strict=True)) | {"NUM_STAGES": stages}
        constants |= {"A_E4M3": a == "e4m3", "B_E4M3": b == "e4m3", "A_BLOCKS": scales == "blocks"}
        constants |= {"COLUMNS_PER_SCALE": columns_per_scale, "GATED": _is_gated(activation)}
        constants |= {"ACTIVATION": epilogue.get_activation(activation)}
        types = SCRATCH | pointers("u8", "a", "b") | pointers("bf16", "out")
        plain = dict.fromkeys((*SCALES, "bias_ptr", "residual_ptr"))
        constants |= {} if scales else plain
        types |= SCALES | pointers("bf16", "bias", "residual") if scales else {}
        types.pop("beta")
        strides = ("stride_a_m", "stride_a_k", "stride_b_k", "stride_b_n", "stride_out_m", "stride_out_n")
        of_scales = ("stride_scale_a_m", "stride_scale_a_k", "stride_scale_b_k", "stride_scale_b_n")
        yield spec(
            f"fp8 gemm {kinds} {'x'.join(map(str, block))} {scales or 'numbers'} {activation or ''}".strip(),
            scaled_matmul.scaled_matmul,
            constants,
            types,
            ones=(*ones, "stride_out_n") if ones else (),
            unaligned=of_scales if ones else ("m", "n", "k", *strides, *of_scales),
            num_warps=num_warps,
            tensor_cores=True,
        )


def hopper_fp8_specs(spec: type, pointers: Callable[..., dict[str, str]]) -> Iterator[Any]:
    # codes of a and b, block m and n, consumers, stages, scales of a and of b (None: numbers), activation, output by TMA, known
    # spills: all of them outside the loop over steps
    cases = [
        ("e4m3 e4m3", 128, 256, 2, 3, "blocks", "blocks", None, True, 82),
        ("e4m3 e4m3", 128, 256, 2, 3, "rows", "columns", None, True, 90),
        ("e4m3 e4m3", 128, 256, 2, 3, None, None, None, True, 90),
        ("e4m3 e4m3", 128, 256, 2, 3, "blocks", "blocks", "silu_and_multiply", True, 17),
        ("e4m3 e5m2", 128, 256, 2, 3, "blocks", "columns", None, False, 8),
        ("e4m3 e4m3", 128, 128, 2, 6, "blocks", "blocks", "gelu", True, 0),
        ("e5m2 e4m3", 128, 128, 2, 6, None, "blocks", None, False, 0),
        ("e4m3 e4m3", 64, 128, 1, 8, "blocks", "blocks", "silu_and_multiply", True, 0),
        ("e4m3 e4m3", 64, 64, 1, 12, "rows", None, None, True, 0),
        ("e4m3 e4m3", 64, 64, 1, 12, "blocks", "blocks", "silu_and_multiply", False, 0),
    ]
    layouts = {bits: NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2) for bits in (8, 16)}
    for kinds, block_m, block_n, consumers, stages, scale_a, scale_b, activation, by_tma, known_spills in cases:
        a, b = (CODES[kind] for kind in kinds.split())
        gated = _is_gated(activation)
        rows, columns = block_m // consumers, block_n // 2 if gated else block_n
        width = block_n // 2 if block_n == 256 else columns
        constants: dict[str, Any] = {"A_BLOCKS": scale_a == "blocks", "B_BLOCKS": scale_b == "blocks"}
        constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "GATED": gated}
        constants |= {"ACTIVATION": epilogue.get_activation(activation), "CONSUMERS": consumers, "STAGES": stages}
        constants |= {"num_warps": 4, "out_ptr" if by_tma else "out": None}
        types = {name: kind for name, kind in (SCRATCH | SCALES).items() if name != "beta"}
        types |= pointers("bf16", "bias", "residual")
        types |= {
            "a": f"tensordesc<{a}[{rows}, 128],{layouts[8]!r}>",
            "b": f"tensordesc<{b}[{width}, 128],{layouts[8]!r}>",
        }
        if by_tma:
            types["out"] = f"tensordesc<bf16[{rows}, {columns}],{layouts[16]!r}>"
        else:
            types |= pointers("bf16", "out")
        scales = f"{scale_a or 'number'} {scale_b or 'number'}"
        yield spec(
            f"hopper fp8 matmul {kinds} {block_m}x{block_n} {scales} {activation or ''}".strip(),
            hopper_scaled.scaled_matmul,
            constants,
            types,
            ones=("stride_out_n",),
            unaligned=("stride_scale_a_m", "stride_scale_a_k", "stride_scale_b_k", "stride_scale_b_n"),
            tensor_cores=True,
            known_spills=known_spills,
            architectures=(90,),
        )


def hopper_skinny_specs(spec: type, pointers: Callable[..., dict[str, str]]) -> Iterator[Any]:
    """Few rows in 16 bits."""
    # dtype, rows, strips, stages, k is contiguous in b, activation, output in float32
    cases = [
        ("bf16", 8, 1, 12, True, None, False),
        ("bf16", 8, 2, 6, True, "silu_and_multiply", False),
        ("bf16", 16, 1, 11, True, "gelu", False),
        ("fp16", 16, 2, 6, False, None, False),
        ("bf16", 32, 2, 5, True, None, True),
        ("fp16", 32, 1, 9, False, "relu", False),
        ("bf16", 64, 1, 7, False, None, False),
        ("bf16", 64, 2, 4, True, "silu_and_multiply", False),
        ("bf16", 64, 2, 4, True, None, False),
    ]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    for dtype, rows, strips, stages, k_major, activation, wide in cases:
        constants = {"B_K_MAJOR": k_major, "ACTIVATION": epilogue.get_activation(activation), "BLOCK_M": rows}
        constants |= {"GATED": _is_gated(activation), "STRIPS": strips, "STAGES": stages, "num_warps": 4}
        types = SCRATCH | pointers(dtype, "bias", "residual") | pointers("fp32" if wide else dtype, "out")
        boxes = {"a": [rows, 64], "b": [64, 64] if k_major else [128, 64]}
        types |= {name: f"tensordesc<{dtype}{box},{layout!r}>" for name, box in boxes.items()}
        yield spec(
            f"hopper skinny {dtype} {rows}x{64 * strips} {'kn'[k_major]} {activation or ''}".strip(),
            hopper_skinny.matmul,
            constants,
            types,
            ones=("stride_out_n",),
            tensor_cores=True,
            architectures=(90,),
        )

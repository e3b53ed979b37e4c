"""What a 4-bit code stands for where it is no integer: tables of 16 numbers. Imports no torch, so kernels use it as well."""

import struct
from collections.abc import Sequence

INTEGER = "integer"
# OCP Microscaling Formats 1.0, section 5.3.3: sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# 4-bit NormalFloat, arXiv 2305.14314, appendix E.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
CODEBOOKS = {"e2m1": E2M1, "nf4": NF4}
ENCODINGS = (INTEGER, *CODEBOOKS)


def byte_tables(values: Sequence[float], bfloat16: bool) -> tuple[int, ...]:
    """16 numbers, rounded to bfloat16 or float16, as eight int32 of four bytes: the low bytes of all, then the high ones."""
    bits = [_bfloat16_bits(value) if bfloat16 else struct.unpack("<H", struct.pack("<e", value))[0] for value in values]
    pieces = [bytes(b >> shift & 255 for b in bits) for shift in (0, 8)]
    return struct.unpack("<8i", b"".join(pieces))


def _bfloat16_bits(value: float) -> int:
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to the nearest, ties to even

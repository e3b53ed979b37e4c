"""How a plane of packed codes becomes numbers, in float32 and exactly: `FORM`."""

import triton
import triton.language as tl

from evenshare.quant import encodings

LANES = tl.constexpr(16)  # the k of one 16-bit mma, and the smallest group
# (q - 2^(BITS - 1)) * scale, (q - zero) * scale, q * scale + offset, and the two tables of quant/encodings.py.
SYMMETRIC = tl.constexpr(0)
INTEGER_ZEROS = tl.constexpr(1)
FLOAT_OFFSETS = tl.constexpr(2)
E2M1 = tl.constexpr(3)
NF4 = tl.constexpr(4)
TWO_TO_23 = tl.constexpr(8388608.0)
BITS_OF_TWO_TO_23 = tl.constexpr(0x4B000000)
TWO_TO_126 = tl.constexpr(2.0**126)
NF4_VALUES = tl.constexpr(encodings.NF4)


@triton.jit
def dequantize(words, scale, zero, PLANE: tl.constexpr, BITS: tl.constexpr, FORM: tl.constexpr):
    """Plane PLANE of `words` as float32. `zero` is the zero point or the offset."""
    if FORM == NF4:
        weight = _nf4(words, PLANE * BITS) * scale
    elif FORM == E2M1:
        weight = _e2m1(words, PLANE * BITS) * scale
    else:
        weight = _integer(words, scale, zero, PLANE, BITS, FORM)
    return weight


@triton.jit
def _integer(words, scale, zero, PLANE: tl.constexpr, BITS: tl.constexpr, FORM: tl.constexpr):
    """An integer below 2^23 put into the mantissa of 2^23 is 2^23 plus that integer: a code becomes a number by one and-or where
    it lies, without shift or conversion, and what its place multiplies it by is taken out of the scale."""
    # Codes in the low 20 bits are used in place, the others after one shift that they share.
    PLANES_IN_PLACE: tl.constexpr = 20 // BITS
    SHIFT: tl.constexpr = PLANE // PLANES_IN_PLACE * PLANES_IN_PLACE * BITS
    UNIT: tl.constexpr = 1 << (PLANE % PLANES_IN_PLACE * BITS)
    raised = ((words >> SHIFT) & (((1 << BITS) - 1) * UNIT)) | BITS_OF_TWO_TO_23
    raised = raised.to(tl.float32, bitcast=True)  # 2^23 + code * UNIT
    if FORM == SYMMETRIC:
        weight = (raised - (TWO_TO_23 + (1 << (BITS - 1)) * UNIT)) * (scale * (1.0 / UNIT))
    elif FORM == INTEGER_ZEROS:
        weight = (raised - (TWO_TO_23 + zero * UNIT)) * (scale * (1.0 / UNIT))
    else:
        weight = (raised - TWO_TO_23) * (scale * (1.0 / UNIT)) + zero
    return weight


@triton.jit
def _e2m1(words, FIRST_BIT: tl.constexpr):
    """Exponent and mantissa of the code become the low bits of a float32's exponent and the high one of its mantissa: the same
    number, its subnormals too, but for the bias, times 2^-126."""
    sign = (words << (28 - FIRST_BIT)) & -0x80000000
    if FIRST_BIT <= 22:
        magnitude = words << (22 - FIRST_BIT)
    else:
        magnitude = words >> (FIRST_BIT - 22)
    return (sign | (magnitude & 0x01C00000)).to(tl.float32, bitcast=True) * TWO_TO_126


@triton.jit
def _nf4(words, FIRST_BIT: tl.constexpr):
    """Fifteen selections a code, most of them with a constant. A table in memory would be loaded through shared memory,
    asynchronously and a word at a time: it takes more of both than the weight itself."""
    bit0 = ((words >> FIRST_BIT) & 1) != 0
    bit1 = ((words >> FIRST_BIT) & 2) != 0
    below = _one_of_4(bit0, bit1, 0), _one_of_4(bit0, bit1, 4)
    above = _one_of_4(bit0, bit1, 8), _one_of_4(bit0, bit1, 12)
    bit2 = ((words >> FIRST_BIT) & 4) != 0
    bit3 = ((words >> FIRST_BIT) & 8) != 0
    return tl.where(bit3, tl.where(bit2, above[1], above[0]), tl.where(bit2, below[1], below[0]))


@triton.jit
def _one_of_4(bit0, bit1, FIRST: tl.constexpr):
    upper = tl.where(bit0, NF4_VALUES[FIRST + 3], NF4_VALUES[FIRST + 2])
    return tl.where(bit1, upper, tl.where(bit0, NF4_VALUES[FIRST + 1], NF4_VALUES[FIRST]))

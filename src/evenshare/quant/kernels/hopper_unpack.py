"""4-bit codes -> 16-bit numbers in the registers of a tensor core's left operand, without a shuffle (`quant/hopper_weight.py` orders them so)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from evenshare.quant import encodings
from evenshare.quant.encodings import byte_tables
from evenshare.quant.kernels.dequantize import E2M1

STEP = gl.constexpr(128)  # columns of W
BLOCK = gl.constexpr(64)  # columns of W in one load, of x in one panel of 128 bytes
BAND = gl.constexpr(16)  # rows of W that lie together: a warp's
STRIP = gl.constexpr(64)  # of four warps
MIDDLE = gl.constexpr(8)  # the zero point of symmetric codes
E2M1_BFLOAT16, E2M1_FLOAT16 = (gl.constexpr(byte_tables(encodings.E2M1, wide)) for wide in (True, False))
NF4_BFLOAT16, NF4_FLOAT16 = (gl.constexpr(byte_tables(encodings.NF4, wide)) for wide in (True, False))


@gluon.jit
def integers(words, upper, lower, element: gl.constexpr):
    """int32 words of eight codes -> four pairs of 16-bit numbers, code - zero, in the order of an operand's registers.

    upper and lower: the zeros of rows 0 to 7 and 8 to 15, as `as_pair` makes them."""
    if element == gl.bfloat16:
        # 0x4300 is 128: a code is its lowest bits.
        pairs = gl.inline_asm_elementwise(
            """{
            .reg .b32 t0, t1, t2, t3, s1, s2, s3;
            shr.u32 s1, $8, 4;
            shr.u32 s2, $8, 8;
            shr.u32 s3, $8, 12;
            lop3.b32 t0, $8, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 t1, s1, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 t2, s2, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 t3, s3, 0x000F000F, 0x43004300, 0xEA;
            sub.bf16x2 t0, t0, $9;
            sub.bf16x2 t1, t1, $10;
            sub.bf16x2 t2, t2, $9;
            sub.bf16x2 t3, t3, $10;
            mov.b32 {$0, $1}, t0;
            mov.b32 {$2, $3}, t1;
            mov.b32 {$4, $5}, t2;
            mov.b32 {$6, $7}, t3;
            }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
            [words, upper, lower],
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            True,
            1,
        )
    else:
        # 0x6400 is 1024.
        pairs = gl.inline_asm_elementwise(
            """{
            .reg .b32 t0, t1, t2, t3, s1, s2, s3;
            shr.u32 s1, $8, 4;
            shr.u32 s2, $8, 8;
            shr.u32 s3, $8, 12;
            lop3.b32 t0, $8, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 t1, s1, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 t2, s2, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 t3, s3, 0x000F000F, 0x64006400, 0xEA;
            sub.f16x2 t0, t0, $9;
            sub.f16x2 t1, t1, $10;
            sub.f16x2 t2, t2, $9;
            sub.f16x2 t3, t3, $10;
            mov.b32 {$0, $1}, t0;
            mov.b32 {$2, $3}, t1;
            mov.b32 {$4, $5}, t2;
            mov.b32 {$6, $7}, t3;
            }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
            [words, upper, lower],
            (gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
            True,
            1,
        )
    return pairs


@gluon.jit
def subnormals(words):
    """int32 words of eight codes -> four pairs of float16 in the order of an operand's registers, without their zeros:
    2^-24 of a code in rows 0 to 7, 2^-20 in rows 8 to 15."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 s, t0, t1, t2, t3;
        shr.u32 s, $8, 8;
        and.b32 t0, $8, 0x000F000F;
        and.b32 t1, $8, 0x00F000F0;
        and.b32 t2, s, 0x000F000F;
        and.b32 t3, s, 0x00F000F0;
        mov.b32 {$0, $1}, t0;
        mov.b32 {$2, $3}, t1;
        mov.b32 {$4, $5}, t2;
        mov.b32 {$6, $7}, t3;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        (gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        True,
        1,
    )


@gluon.jit
def looked_up(words, element: gl.constexpr, FORM: gl.constexpr):
    """int32 words of eight codes -> their numbers in a table, in pairs as `integers`; here neighbours are one.

    prmt picks four of eight bytes by the low three bits of four codes: from either half of the table, and then by the fourth bit
    between the two, for the low bytes of the numbers and the high ones."""
    if element == gl.bfloat16:
        tables: gl.constexpr = E2M1_BFLOAT16 if FORM == E2M1 else NF4_BFLOAT16
    else:
        tables: gl.constexpr = E2M1_FLOAT16 if FORM == E2M1 else NF4_FLOAT16
    none = gl.zeros_like(words)
    a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
        """{
        .reg .b32 l, h, c, d, a, b, p, q;
        and.b32 l, $8, 0x77777777;
        shr.u32 c, $8, 1;
        lop3.b32 c, c, 0x44444444, 0x32103210, 0xEA;
        shr.u32 h, l, 16;
        shr.u32 d, c, 16;
        prmt.b32 a, $9, $10, l;
        prmt.b32 b, $11, $12, l;
        prmt.b32 p, a, b, c;
        prmt.b32 a, $13, $14, l;
        prmt.b32 b, $15, $16, l;
        prmt.b32 q, a, b, c;
        prmt.b32 a, p, q, 0x5140;
        prmt.b32 b, p, q, 0x7362;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        prmt.b32 a, $9, $10, h;
        prmt.b32 b, $11, $12, h;
        prmt.b32 p, a, b, d;
        prmt.b32 a, $13, $14, h;
        prmt.b32 b, $15, $16, h;
        prmt.b32 q, a, b, d;
        prmt.b32 a, p, q, 0x5140;
        prmt.b32 b, p, q, 0x7362;
        mov.b32 {$4, $5}, a;
        mov.b32 {$6, $7}, b;
        }""",
        "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r,r,r,r,r,r,r,r",
        [words, none + tables[0], none + tables[1], none + tables[2], none + tables[3],
         none + tables[4], none + tables[5], none + tables[6], none + tables[7]],
        (gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
        True,
        1,
    )  # fmt: skip
    return (
        a0.to(element, bitcast=True), a1.to(element, bitcast=True), b0.to(element, bitcast=True), b1.to(element, bitcast=True),
        c0.to(element, bitcast=True), c1.to(element, bitcast=True), d0.to(element, bitcast=True), d1.to(element, bitcast=True),
    )  # fmt: skip


@gluon.jit
def as_pair(zero, element: gl.constexpr):
    """Integers 0 to 127 -> what `integers` subtracts: one more than 128, or 1024, twice, in 32 bits."""
    one: gl.constexpr = 0x4300 if element == gl.bfloat16 else 0x6400
    return (zero | one) | (zero | one) << 16


@gluon.jit
def _in_order(numbers):
    """Numbers of [warps, 8, 4, steps of 16 columns] words -> [warps, 2, 8, steps, 2, 4, 2], whose ends are rows and columns."""
    a0, a1, b0, b1, c0, c1, d0, d1 = numbers
    top = gl.join(gl.join(a0, a1), gl.join(c0, c1))  # rows 0 to 7 of the warp's 16; then pair, half of the 16 columns
    bottom = gl.join(gl.join(b0, b1), gl.join(d0, d1))
    both = gl.join(top, bottom)  # [warp, row, quad, step, pair, half, upper or lower]
    return gl.permute(both, [0, 6, 1, 3, 5, 2, 4])


@gluon.jit
def as_batch(numbers, operand: gl.constexpr):
    """Numbers of [warps, 8, 4, steps of 16 columns] words -> [warps, 16, columns]: left operands, every register where it is."""
    both = _in_order(numbers)
    both = gl.reshape(both, [both.shape[0], 16, 16 * both.shape[3]])
    return gl.convert_layout(both, operand, assert_trivial=True)


@gluon.jit
def as_operand(numbers, operand: gl.constexpr):
    """As `as_batch`, one operand of all warps' rows, [16 warps, columns]."""
    both = _in_order(numbers)
    both = gl.reshape(both, [16 * both.shape[0], 16 * both.shape[3]])
    return gl.convert_layout(both, operand, assert_trivial=True)


@gluon.jit
def parts_of(words, PARTS: gl.constexpr):
    """[warps, 8, 4, 4] words of 64 columns -> a tuple of PARTS of 64 / PARTS columns."""
    if PARTS == 1:
        parts = (words,)
    else:
        split = gl.permute(gl.reshape(words, [words.shape[0], 8, 4, 2, 2]), [0, 1, 2, 4, 3])
        first, second = gl.split(split)
        if PARTS == 2:
            parts = (first, second)
        else:
            a, b = gl.split(gl.reshape(first, [words.shape[0], 8, 4, 1, 2]))
            c, d = gl.split(gl.reshape(second, [words.shape[0], 8, 4, 1, 2]))
            parts = (a, b, c, d)
    return parts


@gluon.jit
def zeros_of(zeros, words, element: gl.constexpr):
    """Zero points of 16 rows a warp -> (those of the upper and of the lower rows) beside each of `words`."""
    by_warp = gl.permute(gl.reshape(zeros.to(gl.int32), [words.shape[0], 2, 8]), [0, 2, 1])
    upper, lower = gl.split(by_warp)
    beside: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, words.type.layout))
    upper = gl.convert_layout(as_pair(upper, element), beside, assert_trivial=True)
    lower = gl.convert_layout(as_pair(lower, element), beside, assert_trivial=True)
    none = gl.zeros_like(words)
    return upper.expand_dims(2).expand_dims(3) + none, lower.expand_dims(2).expand_dims(3) + none

"""Inline PTX of prepare.py: operations of one warp on its 16 rows of an accumulator.

Register layout: an 8 x 8 block of 16-bit elements takes one register, in which lane 4 g + c holds columns 2 c and 2 c +
1 of row g. A 16 x 16 block takes four: upper left, lower left, upper right, lower right. mma.sync multiplies blocks,
movmatrix transposes one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _diagonal_mask_asm(early):
    """Compute g, row minus first column of a register on the diagonal, and own, the mask of its causal elements.

    Non-causal are the elements above the diagonal and, if early, those on it. Also computes warp, its number.
    """
    return f"""mov.u32 g, %laneid;
mov.u32 warp, %tid.x;
shr.u32 warp, warp, 5;
and.b32 c, g, 3;
shl.b32 c, c, 1;
shr.u32 g, g, 2;
sub.s32 g, g, c;
setp.gt.s32 p, g, {int(early)};
selp.b32 own, -1, 0, p;
setp.eq.s32 p, g, {int(early)};
selp.b32 own, 0xffff, own, p;
"""


def _round_causal_asm(early, convert):
    """Round P [$16 to $47] to 16 bits [$0 to $15] and zero its non-causal elements in the blocks on the diagonal."""
    text = "{\n.reg .b32 g, c, warp, own, m<4>;\n.reg .pred p;\n" + _diagonal_mask_asm(early)
    for block in range(4):
        text += f"setp.eq.u32 p, warp, {block};\nselp.b32 m{block}, own, -1, p;\n"
    for r in range(16):  # register r: two adjacent columns of 8-column block r // 2, in row g or g + 8
        text += f"{convert} ${r}, ${16 + 2 * r + 1}, ${16 + 2 * r};\n"
        if (r // 2) % 2 == r % 2:
            text += f"and.b32 ${r}, ${r}, m{r // 4};\n"
    return text + "}"


ROUND_BF16 = gl.constexpr(_round_causal_asm(False, "cvt.rn.bf16x2.f32"))
ROUND_FP16 = gl.constexpr(_round_causal_asm(False, "cvt.rn.f16x2.f32"))
ROUND_EARLY_BF16 = gl.constexpr(_round_causal_asm(True, "cvt.rn.bf16x2.f32"))
ROUND_EARLY_FP16 = gl.constexpr(_round_causal_asm(True, "cvt.rn.f16x2.f32"))
ROUND_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 32))

# selects the one of a warp's four 16 x 16 blocks that is on the diagonal
DIAGONAL_BLOCK = gl.constexpr(
    """{
.reg .b32 warp, low, high;
.reg .pred p1, p3, p2;
mov.u32 warp, %tid.x;
shr.u32 warp, warp, 5;
setp.eq.u32 p1, warp, 1;
setp.eq.u32 p3, warp, 3;
setp.ge.u32 p2, warp, 2;
"""
    + "".join(
        f"selp.b32 low, ${8 + r}, ${4 + r}, p1;\nselp.b32 high, ${16 + r}, ${12 + r}, p3;\n"
        f"selp.b32 ${r}, high, low, p2;\n"
        for r in range(4)
    )
    + "}"
)
DIAGONAL_BLOCK_OPERANDS = gl.constexpr(",".join(["=&r"] * 4 + ["r"] * 16))


def _zero_except_asm(warp):
    """Select $4 to $7 in one warp and zero in the others."""
    text = "{\n.reg .b32 warp;\n.reg .pred p;\nmov.u32 warp, %tid.x;\nshr.u32 warp, warp, 5;\n"
    text += f"setp.eq.u32 p, warp, {warp};\n"
    return text + "".join(f"selp.b32 ${r}, ${4 + r}, 0, p;\n" for r in range(4)) + "}"


ZERO_EXCEPT_1 = gl.constexpr(_zero_except_asm(1))
ZERO_EXCEPT_3 = gl.constexpr(_zero_except_asm(3))
ZERO_EXCEPT_OPERANDS = gl.constexpr(",".join(["=&r"] * 4 + ["r"] * 4))


def _split_operand_asm():
    """Prepare two float16 terms of L as an operand, high ($32 to $47) and low ($48 to $63), strictly lower triangular.

    Zeros are stored on and above the diagonal, and -1 on the diagonal of the high term. Register 2 n + m of 16 holds
    two adjacent columns of 8-column block n, in row g (m = 0) or g + 8 (m = 1) of the warp's 16 rows; warp w has the
    blocks n - m = 2 w on the diagonal.
    """
    text = "{\n.reg .b32 g, c, warp, own, one, t, m<7>, d<4>;\n.reg .pred p, p1, p2, p3;\n" + _diagonal_mask_asm(True)
    text += """selp.b32 one, 0xbc000000, 0, p;
setp.eq.s32 p, g, 0;
selp.b32 one, 0xbc00, one, p;
setp.ge.u32 p1, warp, 1;
setp.ge.u32 p2, warp, 2;
setp.ge.u32 p3, warp, 3;
selp.b32 m0, -1, own, p1;
selp.b32 m1, -1, 0, p1;
selp.b32 t, own, 0, p1;
selp.b32 m2, -1, t, p2;
selp.b32 m3, -1, 0, p2;
selp.b32 t, own, 0, p2;
selp.b32 m4, -1, t, p3;
selp.b32 m5, -1, 0, p3;
selp.b32 m6, own, 0, p3;
"""
    for block in range(4):
        text += f"setp.eq.u32 p, warp, {block};\nselp.b32 d{block}, one, 0, p;\n"
    for term in range(2):
        for r in range(16):
            n = r // 2 - r % 2  # the block is above the diagonal if n > 2 w, below it if n < 2 w
            target, source = f"${16 * term + r}", f"${32 + 16 * term + r}"
            mask = "-1" if n < 0 else "0" if n > 6 else f"m{n}"
            text += f"and.b32 {target}, {source}, {mask};\n"
            if term == 0 and n >= 0 and n % 2 == 0:
                text += f"or.b32 {target}, {target}, d{n // 2};\n"
    return text + "}"


SPLIT_OPERAND = gl.constexpr(_split_operand_asm())
SPLIT_OPERAND_OPERANDS = gl.constexpr(",".join(["=&r"] * 32 + ["r"] * 32))


def _join_blocks_asm():
    """Select the blocks of T of each warp: column blocks $0 to $15 from x ($16 to $19), u, T0 and T1 (to $31)."""
    text = """{
.reg .b32 w, t;
.reg .pred p0, p1, p2, p3;
mov.u32 w, %tid.x;
shr.u32 w, w, 5;
setp.eq.u32 p0, w, 0;
setp.eq.u32 p1, w, 1;
setp.eq.u32 p2, w, 2;
setp.eq.u32 p3, w, 3;
"""
    for r in range(4):
        x, u, T0, T1 = (f"${16 + 4 * n + r}" for n in range(4))
        text += f"selp.b32 t, {u}, {T0}, p1;\nselp.b32 ${r}, {x}, t, p0;\n"
        text += f"selp.b32 t, 0, {T1}, p0;\nselp.b32 ${4 + r}, {x}, t, p1;\n"
        text += f"selp.b32 t, {u}, 0, p3;\nselp.b32 ${8 + r}, {x}, t, p2;\n"
        text += f"selp.b32 ${12 + r}, {x}, 0, p3;\n"
    return text + "}"


JOIN_BLOCKS = gl.constexpr(_join_blocks_asm())
JOIN_BLOCKS_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 16))

_MMA = "mma.sync.aligned.m16n8k{k}.row.col.f32.f16.f16.f32 {{{d}}}, {{{a}}}, {{{b}}}, {{{z}}};\n"


def _mma(d, a, b):
    zeros = ", ".join(["zf"] * 4)
    return _MMA.format(k=16 if len(b) == 2 else 8, d=", ".join(d), a=", ".join(a), b=", ".join(b), z=zeros)


def _inverse_asm():
    """Invert I - L for each warp's 16 x 16 block L.

    $4, $5 and $7 are its 8 x 8 blocks upper left, lower left and lower right. Level doubling X <- X + X M X, where M
    holds the blocks of L that the level merges over: sizes 1, 2 and 4 in both diagonal 8 x 8 blocks at once, then size
    8.
    """
    text = """{
.reg .b32 lane, g, c, h, t, m0, m1, m2, one, x1, x2, t1, t2, t3, b1, b2, u1, u2, y1, y2, zero;
.reg .f32 zf, f<4>;
.reg .pred p, odd;
mov.f32 zf, 0f00000000;
mov.b32 zero, 0;
mov.u32 lane, %laneid;
shr.u32 g, lane, 2;
and.b32 c, lane, 3;
shr.u32 h, lane, 3;
setp.eq.u32 p, c, h;
and.b32 t, g, 1;
setp.eq.u32 odd, t, 1;
selp.b32 one, 0x3c000000, 0x3c00, odd;
selp.b32 one, one, 0, p;
selp.b32 m0, 0xffff, 0, odd;
selp.b32 m0, m0, 0, p;
xor.b32 t, h, 1;
setp.eq.u32 p, c, t;
and.b32 t, c, 1;
setp.eq.and.u32 p, t, 1, p;
selp.b32 m1, -1, 0, p;
setp.lt.u32 p, g, 4;
setp.ge.and.u32 p, c, 2, p;
selp.b32 m2, -1, 0, p;
and.b32 x1, $4, m0;
or.b32 x1, x1, one;
and.b32 x2, $7, m0;
or.b32 x2, x2, one;
movmatrix.sync.aligned.m8n8.trans.b16 t1, $4;
movmatrix.sync.aligned.m8n8.trans.b16 t2, $7;
movmatrix.sync.aligned.m8n8.trans.b16 t3, $5;
"""
    f = ["f0", "f1", "f2", "f3"]
    for mask in ("m1", "m2"):
        text += f"and.b32 b1, t1, {mask};\nand.b32 b2, t2, {mask};\n"
        text += _mma(f, ["x1", "zero", "zero", "x2"], ["b1", "b2"])
        text += "movmatrix.sync.aligned.m8n8.trans.b16 u1, x1;\nmovmatrix.sync.aligned.m8n8.trans.b16 u2, x2;\n"
        text += "cvt.rn.f16x2.f32 y1, f1, f0;\ncvt.rn.f16x2.f32 y2, f3, f2;\n"
        text += _mma(f, ["y1", "zero", "zero", "y2"], ["u1", "u2"])
        text += "cvt.rn.f16x2.f32 y1, f1, f0;\ncvt.rn.f16x2.f32 y2, f3, f2;\n"
        text += "or.b32 x1, x1, y1;\nor.b32 x2, x2, y2;\n"
    text += _mma(f, ["x2", "zero"], ["t3"])
    text += "movmatrix.sync.aligned.m8n8.trans.b16 u1, x1;\ncvt.rn.f16x2.f32 y1, f1, f0;\n"
    text += _mma(f, ["y1", "zero"], ["u1"])
    return text + "cvt.rn.f16x2.f32 $1, f1, f0;\nmov.b32 $0, x1;\nmov.b32 $2, zero;\nmov.b32 $3, x2;\n}"


INVERSE = gl.constexpr(_inverse_asm())
INVERSE_OPERANDS = gl.constexpr(",".join(["=&r"] * 4 + ["r"] * 4))


def _products_asm():
    """Multiply each warp's 16 x 16 block x ($24 to $27) with three 16 x 16 blocks ($28 on)."""
    text = "{\n.reg .b32 b0, b1;\n.reg .f32 zf;\nmov.f32 zf, 0f00000000;\n"
    for n in range(6):
        for k in range(2):
            text += f"movmatrix.sync.aligned.m8n8.trans.b16 b{k}, ${28 + 2 * n + k};\n"
        text += _mma([f"${4 * n + r}" for r in range(4)], ["$24", "$25", "$26", "$27"], ["b0", "b1"])
    return text + "}"


PRODUCTS = gl.constexpr(_products_asm())
PRODUCTS_OPERANDS = gl.constexpr(",".join(["=&r"] * 24 + ["r"] * 16))
# Inclusive cumulative sums of two elements per lane. The first is not computed by subtracting the second from their
# sum, which would lose precision where the second is far larger.
CUMSUM = gl.constexpr(
    "{\n.reg .f32 t, s;\n.reg .pred p;\nadd.f32 s, $2, $3;\n"
    + "".join(f"shfl.sync.up.b32 t|p, s, {1 << n}, 0, -1;\n@p add.f32 s, s, t;\n" for n in range(5))
    + "shfl.sync.up.b32 t|p, s, 1, 0, -1;\n@!p mov.f32 t, 0f00000000;\nadd.f32 $0, t, $2;\nmov.f32 $1, s;\n}"
)


@gluon.jit
def round_causal(P, dtype: gl.constexpr, READ_BEFORE: gl.constexpr):
    """Round P to 16 bits, with zeros at the non-causal positions of the 8 x 8 blocks on the diagonal.

    The blocks above the diagonal, which are not stored, are left as they are.
    """
    if dtype == gl.bfloat16:
        bf16_asm: gl.constexpr = ROUND_EARLY_BF16 if READ_BEFORE else ROUND_BF16
        return gl.inline_asm_elementwise(bf16_asm, ROUND_OPERANDS, [P], gl.bfloat16, is_pure=True, pack=32)
    else:
        fp16_asm: gl.constexpr = ROUND_EARLY_FP16 if READ_BEFORE else ROUND_FP16
        return gl.inline_asm_elementwise(fp16_asm, ROUND_OPERANDS, [P], gl.float16, is_pure=True, pack=32)


@gluon.jit
def diagonal_blocks(x0, x1, x2, x3):
    """Return [64, 16] with rows 0 to 15 of x0, rows 16 to 31 of x1, 32 to 47 of x2 and 48 to 63 of x3, of 16 bits."""
    return gl.inline_asm_elementwise(
        DIAGONAL_BLOCK, DIAGONAL_BLOCK_OPERANDS, [x0, x1, x2, x3], x0.dtype, is_pure=True, pack=8
    )  # fmt: skip


@gluon.jit
def invert_diagonal_blocks(l0, l1, l2, l3):
    """Return (I - L)^-1 for each warp's 16 x 16 block on the diagonal of L, given as column blocks [64, 16]."""
    blocks = diagonal_blocks(l0, l1, l2, l3)
    return gl.inline_asm_elementwise(INVERSE, INVERSE_OPERANDS, [blocks], gl.float16, is_pure=True, pack=8)


@gluon.jit
def multiply_warp_blocks(x, y0, y1, y2):
    """Return x y0, x y1 and x y2 with the 16 x 16 blocks of each warp; all [64, 16]."""
    return gl.inline_asm_elementwise(
        PRODUCTS, PRODUCTS_OPERANDS, [x, y0, y1, y2], (gl.float32, gl.float32, gl.float32), is_pure=True, pack=8
    )  # fmt: skip


@gluon.jit
def split_operand(high, low):
    """Return the terms of L [64, 64] strictly below the diagonal, with -1 on the diagonal of the high one: of L - I."""
    return gl.inline_asm_elementwise(
        SPLIT_OPERAND, SPLIT_OPERAND_OPERANDS, [high, low], (gl.float16, gl.float16), is_pure=True, pack=32
    )


@gluon.jit
def join_blocks(x, u, T0, T1):
    """Return the column blocks [64, 16] of T from the blocks that wy_tiles.py names, zero above the diagonal blocks."""
    return gl.inline_asm_elementwise(
        JOIN_BLOCKS, JOIN_BLOCKS_OPERANDS, [x, u, T0, T1], (gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True, pack=8,
    )  # fmt: skip


@gluon.jit
def exp2_ftz(x):
    """Return 2^x, with denormal results flushed to zero."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2_again(x):
    """Compute exp2_ftz again. It is volatile: the compiler keeps no equal earlier result in registers."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=False, pack=1)


@gluon.jit
def cumsum_by_warp(x):
    """Cumulative sums of each row of x [4, 64], a row per warp and two adjacent elements per lane."""
    return gl.inline_asm_elementwise(CUMSUM, "=&r,=&r,r,r", [x], gl.float32, is_pure=True, pack=2)


@gluon.jit
def zero_except_warp_1(x):
    """Zero x [64, 16] outside rows 16 to 31."""
    return gl.inline_asm_elementwise(ZERO_EXCEPT_1, ZERO_EXCEPT_OPERANDS, [x], gl.float16, is_pure=True, pack=8)


@gluon.jit
def zero_except_warp_3(x):
    """Zero x [64, 16] outside rows 48 to 63."""
    return gl.inline_asm_elementwise(ZERO_EXCEPT_3, ZERO_EXCEPT_OPERANDS, [x], gl.float16, is_pure=True, pack=8)


# for a pair of adjacent elements of 16 bits with one condition
SELECT_PAIR = gl.constexpr("{\n.reg .pred p;\nsetp.ne.s32 p, $1, 0;\nselp.b32 $0, $3, $4, p;\n}")


@gluon.jit
def select_pairs(upper, x, y, LEVEL: gl.constexpr):
    """Return x where `upper`, else y, for x and y of 16 bits; above level 0 adjacent elements have one condition."""
    if LEVEL == 0:
        return gl.where(upper, x, y)
    else:
        operands = [gl.where(upper, 1, 0), x, y]
        return gl.inline_asm_elementwise(SELECT_PAIR, "=r,r,r,r,r", operands, x.dtype, is_pure=True, pack=2)

"""What a warp does alone with the 16 rows that it has of a product, in inline PTX, for prepare_hopper.py.

Of a block of 8 x 8 in 16 bits lane 4 g + c has columns 2 c and 2 c + 1 of row g, in one register; a block of 16 x 16 is
four such: upper left, lower left, upper right, lower right. mma.sync multiplies blocks, movmatrix turns one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _keep_asm(early, convert):
    """P [$16 to $47] narrowed [$0 to $15]; of the blocks of 8 on the diagonal what lies above is left out, and where
    early what lies on it, too."""
    text = f"""{{
.reg .b32 g, c, warp, own, m<4>;
.reg .pred p;
mov.u32 g, %laneid;
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
    for block in range(4):
        text += f"setp.eq.u32 p, warp, {block};\nselp.b32 m{block}, own, -1, p;\n"
    for r in range(16):  # a pair of columns each: [block of 8 columns, row g or g + 8]
        text += f"{convert} ${r}, ${16 + 2 * r + 1}, ${16 + 2 * r};\n"
        if (r // 2) % 2 == r % 2:
            text += f"and.b32 ${r}, ${r}, m{r // 4};\n"
    return text + "}"


KEEP_BF16 = gl.constexpr(_keep_asm(False, "cvt.rn.bf16x2.f32"))
KEEP_FP16 = gl.constexpr(_keep_asm(False, "cvt.rn.f16x2.f32"))
KEEP_EARLY_BF16 = gl.constexpr(_keep_asm(True, "cvt.rn.bf16x2.f32"))
KEEP_EARLY_FP16 = gl.constexpr(_keep_asm(True, "cvt.rn.f16x2.f32"))
KEEP_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 32))

# which of its four blocks of 16 lies on a warp's diagonal
OWN_BLOCK = gl.constexpr(
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
OWN_BLOCK_OPERANDS = gl.constexpr(",".join(["=&r"] * 4 + ["r"] * 16))


def _only_asm(warp):
    text = "{\n.reg .b32 warp;\n.reg .pred p;\nmov.u32 warp, %tid.x;\nshr.u32 warp, warp, 5;\n"
    text += f"setp.eq.u32 p, warp, {warp};\n"
    return text + "".join(f"selp.b32 ${r}, ${4 + r}, 0, p;\n" for r in range(4)) + "}"


ONLY_1 = gl.constexpr(_only_asm(1))
ONLY_3 = gl.constexpr(_only_asm(3))
ONLY_OPERANDS = gl.constexpr(",".join(["=&r"] * 4 + ["r"] * 4))

_MMA = "mma.sync.aligned.m16n8k{k}.row.col.f32.f16.f16.f32 {{{d}}}, {{{a}}}, {{{b}}}, {{{z}}};\n"


def _mma(d, a, b):
    zeros = ", ".join(["zf"] * 4)
    return _MMA.format(k=16 if len(b) == 2 else 8, d=", ".join(d), a=", ".join(a), b=", ".join(b), z=zeros)


def _inverse_asm():
    """(I - L')^-1 of each warp's block of 16, $4 to $7 the blocks of 8 of L' (upper left, lower left, -, lower right):
    levels 1, 2 and 4 of both blocks of 8 at once, then 8. X + X M X, M the blocks of L' that a level merges over."""
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
    """x y of each warp's own blocks of 16 for three y, $24 to $27 x and $28 on the y."""
    text = "{\n.reg .b32 b0, b1;\n.reg .f32 zf;\nmov.f32 zf, 0f00000000;\n"
    for n in range(6):
        for k in range(2):
            text += f"movmatrix.sync.aligned.m8n8.trans.b16 b{k}, ${28 + 2 * n + k};\n"
        text += _mma([f"${4 * n + r}" for r in range(4)], ["$24", "$25", "$26", "$27"], ["b0", "b1"])
    return text + "}"


PRODUCTS = gl.constexpr(_products_asm())
PRODUCTS_OPERANDS = gl.constexpr(",".join(["=&r"] * 24 + ["r"] * 16))
# of two numbers a lane the sums up to them, over the warp; the first without the second, which may be far larger
SCAN = gl.constexpr(
    "{\n.reg .f32 t, s;\n.reg .pred p;\nadd.f32 s, $2, $3;\n"
    + "".join(f"shfl.sync.up.b32 t|p, s, {1 << n}, 0, -1;\n@p add.f32 s, s, t;\n" for n in range(5))
    + "shfl.sync.up.b32 t|p, s, 1, 0, -1;\n@!p mov.f32 t, 0f00000000;\nadd.f32 $0, t, $2;\nmov.f32 $1, s;\n}"
)


@gluon.jit
def keep(P, dtype: gl.constexpr, READ_EARLY: gl.constexpr):
    """P narrowed; in the blocks of 8 on the diagonal zeros where nothing is seen, above those anything."""
    if dtype == gl.bfloat16:
        to_bf16: gl.constexpr = KEEP_EARLY_BF16 if READ_EARLY else KEEP_BF16
        return gl.inline_asm_elementwise(to_bf16, KEEP_OPERANDS, [P], gl.bfloat16, is_pure=True, pack=32)
    else:
        to_fp16: gl.constexpr = KEEP_EARLY_FP16 if READ_EARLY else KEEP_FP16
        return gl.inline_asm_elementwise(to_fp16, KEEP_OPERANDS, [P], gl.float16, is_pure=True, pack=32)


@gluon.jit
def own_inverse(l0, l1, l2, l3):
    """The inverse of each warp's block of 16 on the diagonal."""
    own = gl.inline_asm_elementwise(
        OWN_BLOCK, OWN_BLOCK_OPERANDS, [l0, l1, l2, l3], gl.float16, is_pure=True, pack=8
    )  # fmt: skip
    return gl.inline_asm_elementwise(INVERSE, INVERSE_OPERANDS, [own], gl.float16, is_pure=True, pack=8)


@gluon.jit
def own_products(x, y0, y1, y2):
    """x y for each of three y, of each warp's own blocks of 16."""
    return gl.inline_asm_elementwise(
        PRODUCTS, PRODUCTS_OPERANDS, [x, y0, y1, y2], (gl.float32, gl.float32, gl.float32), is_pure=True, pack=8
    )  # fmt: skip


@gluon.jit
def exp2(x):
    """2^x; what would be denormal is 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def sums_up_to(x):
    """Of a tile [.., 64] with two numbers side by side a lane the cumulative sums of its rows, each a warp's."""
    return gl.inline_asm_elementwise(SCAN, "=&r,=&r,r,r", [x], gl.float32, is_pure=True, pack=2)


@gluon.jit
def of_warp_1(x):
    """x [64, 16] in rows 16 to 31, zeros elsewhere."""
    return gl.inline_asm_elementwise(ONLY_1, ONLY_OPERANDS, [x], gl.float16, is_pure=True, pack=8)


@gluon.jit
def of_warp_3(x):
    """x [64, 16] in rows 48 to 63, zeros elsewhere."""
    return gl.inline_asm_elementwise(ONLY_3, ONLY_OPERANDS, [x], gl.float16, is_pure=True, pack=8)

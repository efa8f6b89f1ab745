"""Text of the inline PTX of decay_levels.py, which explains the layout of a tile and the products.

Registers of a tile: 8 channels of row g (even token), then of row g + 8 (odd token). Those of the blocks A and P:
p + 2 h + 4 n + 8 r holds row g + 8 r and column 2 c + p + 8 h of A (n = 0) or P (n = 1).
"""

from triton.experimental import gluon


@gluon.constexpr_function
def mma_asm(d, a, b, accumulate):
    operands = ", ".join("{" + ", ".join(x) + "}" for x in (d, a, b, d if accumulate else ["zero"] * 4))
    return f"mma.sync.aligned.m16n8k{8 * len(b)}.row.col.f32.f16.f16.f32 {operands};\n"


@gluon.constexpr_function
def round_asm(x, registers):
    """Round registers r of x to pairs of float16: xh[r / 2]."""
    return "".join(f"cvt.rn.f16x2.f32 {x}h{r // 2}, {x}{r + 1}, {x}{r};\n" for r in registers[::2])


@gluon.constexpr_function
def level_predicates_asm():
    """Set up<s>: token pair g is in an upper half; l<s>_<p>: row g and column 2 c + p of 8 x 8 are of level s."""
    text = "mov.u32 lane, %laneid;\nshr.u32 g, lane, 2;\n"
    for p in range(2):
        text += f"and.b32 j, lane, 3;\nshl.b32 j, j, 1;\nor.b32 j, j, {p};\nxor.b32 j, j, g;\n"
        text += f"setp.eq.u32 l1_{p}, j, 0;\n"
        for b, s in enumerate((2, 4, 8)):
            text += f"shr.u32 bit, g, {b};\nand.b32 bit, bit, 1;\nsetp.ne.u32 up{s}, bit, 0;\n"
            text += f"shr.u32 bit, j, {b};\nsetp.eq.and.u32 l{s}_{p}, bit, 1, up{s};\n"
    return text


@gluon.constexpr_function
def products_asm(s, x, n):
    """Add the products of level s: of rows xh as the A operand and of Kh as the B operand, to the blocks n."""
    text = ""
    for h in (0,) if s == 1 else (0, 1):
        t = [f"t{4 * h + r}" for r in range(4)]
        for first in (0, 2):
            pairs = range(first, first + 2)
            a = [y for pair in pairs for y in (f"{x}h{pair}", f"{x}h{4 + pair}")]
            text += mma_asm(t, a, [f"Kh{4 * h + pair}" for pair in pairs], first > 0)
        for r in (1,) if s == 1 else (0, 1):
            for p in range(2):
                d = f"d{p + 2 * h + 4 * n + 8 * r}"
                text += f"@l{s}_{p} add.f32 {d}, {d}, t{4 * h + 2 * r + p};\n"
    return text


@gluon.constexpr_function
def level_products_asm(delta, own, erase_previous, read_before):
    """Outputs: k suf_16, q pre_16, with an erase term e pre_16, the sums over 16 tokens, and the blocks A and P.

    Inputs: a, k, q, e if own, the blocks.
    """
    upper = ["q", "e"] if delta else ["q"]
    early = {"q": read_before, "e": erase_previous}
    inputs = ["a", "k", "q", *(["e"] if own else []), "d"]
    outputs = ["K", *(x.upper() for x in upper), "sum", "d"]
    text = "{\n.reg .b32 lane, g, j, bit, zero, " + ", ".join(f"{x}<16>" for x in "akqdfKQE") + ";\n"
    text += ".reg .b32 t<8>, P<8>, sum<16>, " + ("e<16>, " if own else "") + "Kh<8>, Qh<8>, Eh<8>;\n"
    text += ".reg .pred l1_0, l1_1, " + ", ".join(f"up{s}, l{s}_0, l{s}_1" for s in (2, 4, 8)) + ";\n"
    text += "mov.b32 zero, 0;\n" + level_predicates_asm()
    for n, name in enumerate(inputs):
        text += "".join(f"mov.b32 {name}{r}, ${16 * (len(outputs) + n) + r};\n" for r in range(16))
    text += "".join(f"ex2.approx.ftz.f32 f{r}, a{r};\nmov.b32 K{r}, k{r};\n" for r in range(16))
    for x in upper:
        source = "k" if x == "e" and not own else x
        for r in range(16):
            text += f"mov.b32 {x.upper()}{r}, {source}{r};\n" if early[x] else ""
            text += f"mul.f32 {x.upper()}{r}, {source}{r}, f{r};\n" if not early[x] else ""
    for s in (1, 2, 4, 8):
        text += round_asm("K", range(8) if s == 1 else range(16))
        for x in upper:
            # the even tokens' rows at level 1 are those of level 2
            text += round_asm(x.upper(), range(8, 16) if s == 2 else range(16))
            text += products_asm(s, x.upper(), 1 if x == "q" else 0)
        # level 1: within the pairs of tokens that a thread holds
        for r in range(8):
            if s == 1:
                text += f"add.f32 sum{r}, a{r}, a{r + 8};\nmul.f32 K{r}, K{r}, f{r + 8};\n"
                text += "".join(f"mul.f32 {x.upper()}{r + 8}, {x.upper()}{r + 8}, f{r};\n" for x in upper)
                continue
            text += f"shfl.sync.bfly.b32 P{r}, sum{r}, {2 * s}, 31, -1;\nadd.f32 sum{r}, sum{r}, P{r};\n"
            text += f"ex2.approx.ftz.f32 P{r}, P{r};\n"
            for row in (r, r + 8):
                text += f"@!up{s} mul.f32 K{row}, K{row}, P{r};\n"
                text += "".join(f"@up{s} mul.f32 {x.upper()}{row}, {x.upper()}{row}, P{r};\n" for x in upper)
    text += "".join(f"mov.b32 sum{r + 8}, sum{r};\n" for r in range(8))
    for n, name in enumerate(outputs):
        for r in range(16):
            empty = name == "d" and not delta and not r & 4
            text += f"mov.b32 ${16 * n + r}, {'zero' if empty else f'{name}{r}'};\n"
    return text + "}"


@gluon.constexpr_function
def level_products_operands(delta, own):
    """Return the constraints: four or five tiles of outputs, four or five of inputs."""
    return ",".join(["=&r"] * (80 if delta else 64) + ["r"] * (80 if own else 64))


@gluon.constexpr_function
def choose_by_warp_asm(bit):
    """Output: the first of two tiles in the warps whose number has `bit` set, the second in the others.

    gl.where would copy the predicate, uniform in a warp, once per register.
    """
    text = f"{{\n.reg .b32 bit;\n.reg .pred up;\nmov.u32 bit, %tid.x;\nand.b32 bit, bit, {32 * bit};\n"
    text += "setp.ne.u32 up, bit, 0;\n"
    return text + "".join(f"selp.b32 ${r}, ${16 + r}, ${32 + r}, up;\n" for r in range(16)) + "}"

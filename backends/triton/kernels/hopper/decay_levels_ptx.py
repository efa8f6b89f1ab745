"""Text of the inline PTX of decay_levels.py, which explains the layout of a tile and the products.

Registers of a tile: 8 channels of row g, then of row g + 8. Those of the blocks A and P: p + 2 h + 4 n + 8 r holds row
g + 8 r and column 2 c + p + 8 h of A (n = 0) or P (n = 1).
"""

from triton.experimental import gluon


@gluon.constexpr_function
def mma_asm(d, a, b, c):
    operands = ", ".join("{" + ", ".join(x) + "}" for x in (d, a, b, c))
    return f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {operands};\n"


@gluon.constexpr_function
def scale_asm(out, x, factor, registers):
    """Write x times factor, rounded to pairs of float16: out[r / 2] for the registers r."""
    text = "".join(f"mul.f32 m{r}, {x}{r}, {factor}{r};\n" for r in registers)
    return text + "".join(f"cvt.rn.f16x2.f32 {out}{r // 2}, m{r + 1}, m{r};\n" for r in registers[::2])


@gluon.constexpr_function
def level_predicates_asm():
    """Set l<s>_<p>: row g and column 2 c + p of an 8 x 8 block on the diagonal are a pair of level s; and up<s>."""
    text = "mov.u32 lane, %laneid;\nshr.u32 g, lane, 2;\n"
    for p in range(2):
        text += f"and.b32 j, lane, 3;\nshl.b32 j, j, 1;\nor.b32 j, j, {p};\nxor.b32 j, j, g;\n"
        for level, s in enumerate((1, 2, 4)):
            text += f"shr.u32 bit, g, {level};\nand.b32 bit, bit, 1;\nsetp.ne.u32 up{s}, bit, 0;\n"
            text += f"shr.u32 bit, j, {level};\nsetp.eq.and.u32 l{s}_{p}, bit, 1, up{s};\n"
    return text


@gluon.constexpr_function
def products_asm(s, x, n):
    """Add the products of level s: of rows xh as the A operand and of kh as the B operand, to the blocks n."""
    if s == 8:
        text = ""
        d = ["t0", "t1", f"d{4 * n + 8}", f"d{4 * n + 9}"]
        for pair in (0, 2):
            a = ["zero", f"{x}h{4 + pair}", "zero", f"{x}h{5 + pair}"]
            text += mma_asm(d, a, [f"kh{pair}", f"kh{pair + 1}"], ["zero", "zero", *d[2:]])
        return text
    t = ["t0", "t1", "t2", "t3"]
    text = ""
    for pair in range(4):
        a = [f"{x}h{pair}", "zero", "zero", f"{x}h{4 + pair}"]
        text += mma_asm(t, a, [f"kh{pair}", f"kh{4 + pair}"], t if pair else ["zero"] * 4)
    for p in range(2):
        for r in range(2):
            d = f"d{p + 4 * n + 10 * r}"
            text += f"@l{s}_{p} add.f32 {d}, {d}, t{2 * r + p};\n"
    return text


@gluon.constexpr_function
def level_products_asm(delta, own, erase_early, read_early):
    """Outputs: pre_16, suf_16, the blocks A and P. Inputs: a, k, q, e if own, the blocks."""
    names = ["a", "k", "q", *(["e"] if own else []), "d"]
    text = "{\n.reg .b32 lane, g, j, bit, zero, " + ", ".join(f"{x}<16>" for x in [*names, "pre", "suf", "x"]) + ";\n"
    text += ".reg .b32 f<16>, early<16>, m<16>, t<16>, " + ", ".join(f"{x}h<8>" for x in "kqe") + ";\n"
    text += ".reg .pred " + ", ".join(f"up{s}, l{s}_0, l{s}_1" for s in (1, 2, 4)) + ";\nmov.b32 zero, 0;\n"
    text += level_predicates_asm()
    for n, name in enumerate(names):
        text += "".join(f"mov.b32 {name}{r}, ${48 + 16 * n + r};\n" for r in range(16))
    for r in range(16):
        text += f"mov.b32 pre{r}, a{r};\nmov.b32 suf{r}, zero;\n"
    erase = "e" if own else "k"
    for s in (1, 2, 4, 8):
        upper, lower = (range(8, 16), range(8)) if s == 8 else (range(16), range(16))
        for r in range(16):
            if s < 8:
                text += f"selp.b32 x{r}, pre{r}, suf{r}, up{s};\n"
            else:
                text += f"mov.b32 x{r}, {'pre' if r in upper else 'suf'}{r};\n"
            text += f"ex2.approx.ftz.f32 f{r}, x{r};\n"
            if r in upper and (read_early or erase_early):
                text += f"sub.f32 x{r}, x{r}, a{r};\nex2.approx.ftz.f32 early{r}, x{r};\n"
        text += scale_asm("kh", "k", "f", lower)
        text += scale_asm("qh", "q", "early" if read_early else "f", upper)
        text += products_asm(s, "q", 1)
        if delta and (own or erase_early or s == 8):
            text += scale_asm("eh", erase, "early" if erase_early else "f", upper)
        if delta:
            text += products_asm(s, "e" if own or erase_early or s == 8 else "k", 0)
        text += "".join(f"add.f32 t{r}, pre{r}, suf{r};\n" for r in range(16))
        if s < 8:
            for r in range(16):
                text += f"shfl.sync.bfly.b32 t{r}, t{r}, {4 * s}, 31, -1;\n"
                text += f"@up{s} add.f32 pre{r}, pre{r}, t{r};\n@!up{s} add.f32 suf{r}, suf{r}, t{r};\n"
        else:
            for r in range(8):
                text += f"add.f32 pre{8 + r}, pre{8 + r}, t{r};\nadd.f32 suf{r}, suf{r}, t{8 + r};\n"
    for n, name in enumerate(["pre", "suf", "d"]):
        for r in range(16):
            above = name == "d" and r in (2, 3, 6, 7)  # rows 0 to 7, columns 8 to 15
            text += f"mov.b32 ${16 * n + r}, {'zero' if above else f'{name}{r}'};\n"
    return text + "}"


@gluon.constexpr_function
def level_products_operands(own):
    """Return the constraints: three tiles of outputs, four or five of inputs."""
    return ",".join(["=&r"] * 48 + ["r"] * (80 if own else 64))

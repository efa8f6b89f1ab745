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
def scale_asm(out, x, factor, registers):
    """Write x times factor, rounded to pairs of float16: out[r / 2] for the registers r. factor "": 1."""
    text = "".join(f"mul.f32 m{r}, {x}{r}, {factor}{r};\n" for r in registers if factor)
    m = "m" if factor else x
    return text + "".join(f"cvt.rn.f16x2.f32 {out}{r // 2}, {m}{r + 1}, {m}{r};\n" for r in registers[::2])


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
def products_asm(s, x, n, step):
    """Add the products of level s: of rows xh as the A operand and of kh as the B operand, to the blocks n.

    step: register pairs per mma.sync. With 2, operands are in adjacent registers in another order as A than as B, which
    would take copies if kh is both.
    """
    text = ""
    for h in (0,) if s == 1 else (0, 1):
        t = [f"t{4 * h + r}" for r in range(4)]
        for first in range(0, 4, step):
            pairs = range(first, first + step)
            a = [y for pair in pairs for y in ("zero" if s == 1 else f"{x}h{pair}", f"{x}h{4 + pair}")]
            text += mma_asm(t, a, [f"kh{4 * h + pair}" for pair in pairs], first > 0)
        for r in (1,) if s == 1 else (0, 1):
            for p in range(2):
                d = f"d{p + 2 * h + 4 * n + 8 * r}"
                text += f"@l{s}_{p} add.f32 {d}, {d}, t{4 * h + 2 * r + p};\n"
    return text


@gluon.constexpr_function
def level_products_asm(delta, own, erase_early, read_early):
    """Outputs: factors pre_16 and suf_16, sums over 16 tokens, if any is early the early pre_16, the blocks A and P.

    Inputs: a, k, q, e if own, the blocks.
    """
    any_early = read_early or (delta and erase_early)
    apart = own or erase_early
    step = 1 if delta and not apart else 2
    names = ["a", "k", "q", *(["e"] if own else []), "d"]
    outputs = ["pre", "suf", "sum", *(["early"] if any_early else []), "d"]
    text = "{\n.reg .b32 lane, g, j, bit, zero, one, "
    text += ", ".join(f"{x}<16>" for x in [*names, "pre", "suf", "sum", "early", "f", "x", "m"]) + ";\n"
    text += ".reg .b32 t<8>, P<8>, " + ", ".join(f"{x}h<8>" for x in "kqe") + ";\n"
    text += ".reg .pred l1_0, l1_1, " + ", ".join(f"up{s}, l{s}_0, l{s}_1" for s in (2, 4, 8)) + ";\n"
    text += "mov.b32 zero, 0;\nmov.b32 one, 0x3f800000;\n" + level_predicates_asm()
    for n, name in enumerate(names):
        text += "".join(f"mov.b32 {name}{r}, ${16 * (len(outputs) + n) + r};\n" for r in range(16))
    erase = "e" if own else "k"
    # level 1, within the pairs of tokens that a thread holds: the factor of even tokens is 1, as is an early one
    text += "".join(f"ex2.approx.ftz.f32 f{r}, a{r};\n" for r in range(16))
    odd = range(8, 16)
    text += scale_asm("kh", "k", "", range(8))
    text += scale_asm("qh", "q", "" if read_early else "f", odd) + products_asm(1, "q", 1, step)
    if delta:
        text += scale_asm("eh", erase, "" if erase_early else "f", odd) + products_asm(1, "e", 0, step)
    for r in range(8):
        text += f"add.f32 sum{r}, a{r}, a{r + 8};\nmov.b32 pre{r}, f{r};\nmul.f32 pre{r + 8}, f{r}, f{r + 8};\n"
        text += f"mov.b32 suf{r}, f{r + 8};\nmov.b32 suf{r + 8}, one;\n"
        if any_early:
            text += f"mov.b32 early{r}, one;\nmov.b32 early{r + 8}, f{r};\n"
    for s in (2, 4, 8):
        text += "".join(f"selp.b32 f{r}, pre{r}, suf{r}, up{s};\n" for r in range(16))
        text += scale_asm("kh", "k", "f", range(16))
        text += scale_asm("qh", "q", "early" if read_early else "f", range(16)) + products_asm(s, "q", 1, step)
        if delta and apart:
            text += scale_asm("eh", erase, "early" if erase_early else "f", range(16))
        if delta:
            text += products_asm(s, "e" if apart else "k", 0, step)
        for r in range(8):
            text += f"shfl.sync.bfly.b32 P{r}, sum{r}, {2 * s}, 31, -1;\nadd.f32 sum{r}, sum{r}, P{r};\n"
            text += f"ex2.approx.ftz.f32 P{r}, P{r};\n"
            for row in (r, r + 8):
                text += f"@up{s} mul.f32 pre{row}, pre{row}, P{r};\n@!up{s} mul.f32 suf{row}, suf{row}, P{r};\n"
                if any_early:
                    text += f"@up{s} mul.f32 early{row}, early{row}, P{r};\n"
    text += "".join(f"mov.b32 sum{r + 8}, sum{r};\n" for r in range(8))
    for n, name in enumerate(outputs):
        for r in range(16):
            empty = name == "d" and not delta and not r & 4
            text += f"mov.b32 ${16 * n + r}, {'zero' if empty else f'{name}{r}'};\n"
    return text + "}"


@gluon.constexpr_function
def level_products_operands(own, any_early):
    """Return the constraints: four or five tiles of outputs, four or five of inputs."""
    return ",".join(["=&r"] * (80 if any_early else 64) + ["r"] * (80 if own else 64))

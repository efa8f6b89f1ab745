"""Text of the inline PTX of decay_levels.py, which explains the layout of a tile and the products.

Registers of a tile: 8 channels of row g (even token), then of row g + 8 (odd token), in float16 two per register. Those
of the blocks A and P:
p + 2 h + 4 n + 8 r holds row g + 8 r and column 2 c + p + 8 h of A (n = 0) or P (n = 1).
"""

from triton.experimental import gluon


@gluon.constexpr_function
def mma_asm(d, a, b, accumulate):
    operands = ", ".join("{" + ", ".join(x) + "}" for x in (d, a, b, d if accumulate else ["zero"] * 4))
    return f"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {operands};\n"


@gluon.constexpr_function
def factors_asm(x, registers):
    """Set fh[r / 2] to 2^x for the registers r of x, rounded to pairs of float16."""
    text = "".join(f"ex2.approx.ftz.f32 f{r}, {x}{r};\n" for r in registers)
    return text + "".join(f"cvt.rn.f16x2.f32 fh{r // 2}, f{r + 1}, f{r};\n" for r in registers[::2])


@gluon.constexpr_function
def scale_asm(out, x, registers):
    """Write the pairs x times fh: out[r / 2] for the registers r."""
    return "".join(f"mul.rn.f16x2 {out}{r // 2}, {x}{r // 2}, fh{r // 2};\n" for r in registers[::2])


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
    """Add the products of level s: of rows xh as the A operand and of kh as the B operand, to the blocks n."""
    text = ""
    for h in (0,) if s == 1 else (0, 1):
        t = [f"t{4 * h + r}" for r in range(4)]
        for pair in range(4):
            a = ["zero" if s == 1 else f"{x}h{pair}", f"{x}h{4 + pair}"]
            text += mma_asm(t, a, [f"kh{4 * h + pair}"], pair > 0)
        for r in (1,) if s == 1 else (0, 1):
            for p in range(2):
                d = f"d{p + 2 * h + 4 * n + 8 * r}"
                text += f"@l{s}_{p} add.f32 {d}, {d}, t{4 * h + 2 * r + p};\n"
    return text


@gluon.constexpr_function
def level_products_asm(delta, own, erase_early, read_early):
    """Outputs: pre_16, total, the blocks A and P. Inputs: a, the pairs of k, q, and e if own, the blocks."""
    names = ["k", "q", *(["e"] if own else [])]
    text = (
        "{\n.reg .b32 lane, g, j, bit, zero, " + ", ".join(f"{x}<16>" for x in ("a", "d", "pre", "x", "early")) + ";\n"
    )
    text += ".reg .b32 f<16>, fh<8>, t<8>, sum<8>, P<8>, c<8>, "
    text += ", ".join(f"{x}<8>, {x}h<8>" for x in "kqe") + ";\n"
    text += ".reg .pred l1_0, l1_1, " + ", ".join(f"up{s}, l{s}_0, l{s}_1" for s in (2, 4, 8)) + ";\n"
    text += "mov.b32 zero, 0;\n" + level_predicates_asm()
    blocks = 64 + 8 * len(names)
    text += "".join(f"mov.b32 a{r}, ${48 + r};\nmov.b32 d{r}, ${blocks + r};\n" for r in range(16))
    for n, name in enumerate(names):
        text += "".join(f"mov.b32 {name}{r}, ${64 + 8 * n + r};\n" for r in range(8))
    erase = "e" if own else "k"
    # level 1, within the pairs of tokens that a thread holds: the factor of even tokens is 1, as is an early one
    odd, pairs = range(8, 16), range(4, 8)
    if not (read_early and (erase_early or not delta)):
        text += factors_asm("a", odd)
    text += "".join(f"mov.b32 kh{r}, k{r};\n" for r in range(4))
    text += "".join(f"mov.b32 qh{r}, q{r};\n" for r in pairs) if read_early else scale_asm("qh", "q", odd)
    text += products_asm(1, "q", 1)
    if delta:
        text += "".join(f"mov.b32 eh{r}, {erase}{r};\n" for r in pairs) if erase_early else scale_asm("eh", erase, odd)
        text += products_asm(1, "e", 0)
    for r in range(8):
        text += f"add.f32 sum{r}, a{r}, a{r + 8};\nmov.b32 pre{r}, a{r};\nmov.b32 pre{r + 8}, sum{r};\n"
    for s in (2, 4, 8):
        text += "".join(f"selp.b32 c{r}, zero, sum{r}, up{s};\n" for r in range(8))
        for r in range(16):
            text += f"sub.f32 x{r}, pre{r}, c{r % 8};\nabs.f32 x{r}, x{r};\nneg.f32 x{r}, x{r};\n"
        text += factors_asm("x", range(16)) + scale_asm("kh", "k", range(16))
        if not read_early:
            text += scale_asm("qh", "q", range(16)) + products_asm(s, "q", 1)
        if delta and not erase_early:
            text += scale_asm("eh", "e", range(16)) if own else ""
            text += products_asm(s, "e" if own else "k", 0)
        if read_early or (delta and erase_early):
            text += "".join(f"sub.f32 early{r}, x{r}, a{r};\n" for r in range(16)) + factors_asm("early", range(16))
        if read_early:
            text += scale_asm("qh", "q", range(16)) + products_asm(s, "q", 1)
        if delta and erase_early:
            text += scale_asm("eh", erase, range(16)) + products_asm(s, "e", 0)
        for r in range(8):
            text += f"shfl.sync.bfly.b32 P{r}, sum{r}, {2 * s}, 31, -1;\nadd.f32 sum{r}, sum{r}, P{r};\n"
            text += "".join(f"@up{s} add.f32 pre{row}, pre{row}, P{r};\n" for row in (r, r + 8))
    for r in range(16):
        empty = not delta and not r & 4
        text += f"mov.b32 ${r}, pre{r};\nmov.b32 ${16 + r}, sum{r % 8};\n"
        text += f"mov.b32 ${32 + r}, {'zero' if empty else f'd{r}'};\n"
    return text + "}"


@gluon.constexpr_function
def level_products_operands(own):
    """Return the constraints: three tiles of outputs, a tile, two or three of 16 bits, and the blocks."""
    return ",".join(["=&r"] * 48 + ["r"] * (56 if own else 48))

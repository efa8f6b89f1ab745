"""Text of the inline PTX of decay_factors.py.

Lane 4 g + c of a warp holds rows g and g + 8 of the warp's 16. Registers 0 to 3 have tokens 2 c and 2 c + 1 of row g,
then of row g + 8; registers 4 to 7 the same of tokens 8 + 2 c and 9 + 2 c. So a token's block of 2 is in one register
pair, its block of 4 or 8 in adjacent lanes, and its block of 16 in the four lanes that share a row.
"""

from triton.experimental import gluon


@gluon.constexpr_function
def level_factors_asm(level, early):
    """Factors of a level below 4. Inputs: G, with `early` also G before each token, for tokens in upper halves."""
    text = "{\n.reg .b32 lane, source, bit, m<8>, x<8>;\n.reg .pred upper;\nmov.u32 lane, %laneid;\n"
    if level in (1, 2):
        text += f"and.b32 bit, lane, {level};\nsetp.ne.u32 upper, bit, 0;\n"
        keep, last = {1: (30, 0), 2: (28, 1)}[level]
        text += f"and.b32 source, lane, {keep};\nor.b32 source, source, {last};\n"
        text += "".join(f"shfl.sync.idx.b32 m{r}, ${8 + r}, source, 31, -1;\n" for r in (1, 3, 5, 7))
    if level == 3:
        text += "or.b32 source, lane, 3;\n"
        text += "".join(f"shfl.sync.idx.b32 m{r}, ${8 + r}, source, 31, -1;\n" for r in (1, 3))
    for r in range(8):
        m, G, before = f"m{r & 2 | 1 if level == 3 else r | 1}", f"${8 + r}", f"${16 + r}"
        if level == 0:
            if r % 2 == 0 or early:  # no decays are between the token and the boundary
                text += f"mov.b32 ${r}, 0x3f800000;\n"
                continue
            m = f"${8 + r - 1}"
        if early and level == 3 and r >= 4:
            G = before
        if early and level in (1, 2):
            text += f"selp.b32 x{r}, {before}, {G}, upper;\n"
            G = f"x{r}"
        text += f"sub.f32 x{r}, {G}, {m};\nabs.f32 x{r}, x{r};\nneg.f32 x{r}, x{r};\nex2.approx.ftz.f32 ${r}, x{r};\n"
    return text + "}"


@gluon.constexpr_function
def boundary_factors_asm():
    """Factors relative to the last token of the second input's tile."""
    text = "{\n.reg .b32 source, m<8>, x<8>;\nmov.u32 source, %laneid;\nor.b32 source, source, 3;\n"
    text += "".join(f"shfl.sync.idx.b32 m{r}, ${16 + 4 + r}, source, 31, -1;\n" for r in (1, 3))
    for r in range(8):
        text += f"sub.f32 x{r}, ${8 + r}, m{r & 2 | 1};\nabs.f32 x{r}, x{r};\nneg.f32 x{r}, x{r};\n"
        text += f"ex2.approx.ftz.f32 ${r}, x{r};\n"
    return text + "}"

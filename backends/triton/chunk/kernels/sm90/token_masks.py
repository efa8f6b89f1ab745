"""Masks of pairs of tokens of a chunk, as inline PTX on a [64, 64] tensor of 16 bits in the accumulator layout.

Register layout: warp w holds rows 16 w to 16 w + 15. Register r of a lane holds two adjacent columns of the 8 columns
from 8 (r // 2) on, in the upper (r even) or lower 8 of the rows; lane 4 g + c holds columns 2 c and 2 c + 1 of row g of
such an 8 x 8 block. A block's mask is a 64-bit constant, of which each lane takes two adjacent bits. Masks computed
from indices by the compiler would take several instructions per element.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 16))


@gluon.constexpr_function
def keeps(kind, level, i, j):
    """Whether a mask keeps row i, column j.

    kind: "before", "upto", "after": j < i, j <= i, j > i. "pairs": i and j are in different halves of the same block of
    2^(level + 1) tokens. "late", "early": the decays j that sum up to the level's factor of token i (decay_levels.py),
    for a token in an upper half with or without its own decay.
    """
    if kind == "pairs":
        return (i ^ j) >> level == 1
    if kind in ("late", "early"):
        if (i ^ j) >> level != 0:
            return False
        kind = ("upto" if kind == "late" else "before") if i >> level & 1 else "after"
    return {"before": j < i, "upto": j <= i, "after": j > i}[kind]


@gluon.constexpr_function
def block_mask(kind, level, row, column):
    """Return the mask of an 8 x 8 block as 64 bits."""
    return sum(keeps(kind, level, row + b // 8, column + b % 8) << b for b in range(64))


@gluon.constexpr_function
def mask_asm(kind, level):
    """Zero the elements that the mask does not keep: $0 to $15 from $16 to $31."""
    text = """{
.reg .b32 tid, lane, warp, x, y, m, pattern<8>;
.reg .b64 bits;
.reg .pred warp1, warp2, warp3;
mov.u32 tid, %tid.x;
and.b32 lane, tid, 31;
shl.b32 lane, lane, 1;
shr.u32 warp, tid, 5;
setp.eq.u32 warp1, warp, 1;
setp.eq.u32 warp2, warp, 2;
setp.eq.u32 warp3, warp, 3;
"""
    names = {0: "0", 2**64 - 1: "-1"}
    for r in range(16):
        by_warp = []
        for warp in range(4):
            block = block_mask(kind, level, 16 * warp + r % 2 * 8, r // 2 * 8)
            if block not in names:
                name = f"pattern{len(names) - 2}"
                names[block] = name
                text += f"mov.b64 bits, {block:#x};\nshr.b64 bits, bits, lane;\ncvt.u32.u64 x, bits;\n"
                text += "and.b32 y, x, 1;\nmul.lo.u32 y, y, 0xffff;\nand.b32 x, x, 2;\nmul.lo.u32 x, x, 0x7fff8000;\n"
                text += f"or.b32 {name}, x, y;\n"
            by_warp.append(names[block])
        text += f"mov.b32 m, {by_warp[0]};\n"
        for warp in range(1, 4):
            if by_warp[warp] != by_warp[0]:
                text += f"selp.b32 m, {by_warp[warp]}, m, warp{warp};\n"
        text += f"and.b32 ${r}, ${16 + r}, m;\n"
    return text + "}"

"""Interpreter of the inline PTX of decay_levels_ptx.py and decay_factors_ptx.py, on the registers of 128 threads.

A register is a tensor [128] of int32; float32 and pairs of float16 are views of its bits.
"""

import operator
import re

import torch

THREADS = torch.arange(128, dtype=torch.int32)
LANE = THREADS % 32
COMPARE = {"eq": operator.eq, "ne": operator.ne, "gt": operator.gt}


def f32(bits):
    return bits.view(torch.float32)


def bits(x):
    return x.float().contiguous().view(torch.int32)


def pack(high, low):
    """Round to a pair of float16."""
    return torch.stack((f32(low).half(), f32(high).half()), -1).view(torch.int32)[:, 0]


def unpack(register):
    """Return the pair of float16 of each lane of each warp: [4 warps, 8 g, 4 c, 2]."""
    return register[:, None].contiguous().view(torch.float16).float().view(4, 8, 4, 2)


def matmul(a, b, c):
    """mma.sync m16n8k8 or k16: rows g and g + 8, k = 2 c + {0, 1} (+ 8); columns of b g, of the sums 2 c + {0, 1}."""
    A, B = ([unpack(x).reshape(4, 8, 8) for x in registers] for registers in (a, b))
    A = torch.cat([torch.cat(A[n : n + 2], 1) for n in range(0, len(A), 2)], 2)
    product = (A @ torch.cat(B, 2).mT).view(4, 2, 8, 4, 2)
    return [bits(f32(c[n]) + product[:, n // 2, :, :, n % 2].reshape(128)) for n in range(4)]


OPERATIONS = {
    "mov": lambda x: x,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shr": operator.rshift,
    "shl": operator.lshift,
    "add": lambda x, y: bits(f32(x) + f32(y)),
    "sub": lambda x, y: bits(f32(x) - f32(y)),
    "mul": lambda x, y: bits(f32(x) * f32(y)),
    "ex2": lambda x: bits(torch.exp2(f32(x))),
    "cvt": pack,
    "abs": lambda x: bits(f32(x).abs()),
    "neg": lambda x: bits(-f32(x)),
    "shfl.sync.bfly": lambda x, distance, *_: x[THREADS ^ distance],
    "shfl.sync.idx": lambda x, lane, *_: x[THREADS - LANE + lane],
}


def execute(text, operands):
    """Execute PTX. operands: values of $0, $1, ..., in which the results are stored."""
    registers = {f"${n}": x for n, x in enumerate(operands)}
    predicates = {}

    def value(name):
        if name == "%laneid":
            return LANE
        if name == "%tid.x":
            return THREADS
        return registers[name] if name in registers else torch.full((128,), int(name, 0), dtype=torch.int32)

    for instruction in (part.strip(" {}\n") for part in re.split(r";\n?", text)):
        if not instruction or instruction.startswith(".reg"):
            continue
        guard = re.match(r"@(!?)(\w+) ", instruction)
        name, _, rest = instruction[guard.end() if guard else 0 :].partition(" ")
        if name.startswith("mma.sync"):
            d, a, b, c = ([x.strip() for x in group.split(",")] for group in re.findall(r"\{(.*?)\}", rest + "}"))
            registers.update(zip(d, matmul(*([value(x) for x in group] for group in (a, b, c))), strict=True))
            continue
        target, *names = [x.strip() for x in rest.split(",")]
        op = name.split(".")
        if op[0] == "setp":
            x, y = (value(n) for n in names[:2])
            result = COMPARE[op[1]](x, y)
            predicates[target] = result & predicates[names[2]] if op[2] == "and" else result
            continue
        if op[0] == "selp":
            x, y = value(names[0]), value(names[1])
            result = torch.where(predicates[names[2]], x, y)
        else:
            result = OPERATIONS[".".join(op[:3]) if op[0] == "shfl" else op[0]](*(value(n) for n in names))
        if guard:
            result = torch.where(predicates[guard[2]] ^ bool(guard[1]), result, value(target))
        registers[target] = result
    return registers


def elementwise(text, tiles, outputs):
    """Execute PTX with tiles [4 warps, 16 rows, 32 channels] in the layout decay_levels.TILE; return its outputs."""

    def registers(tile):  # [w, row bit 3, g, c, 8 channels] -> registers of rows g, then of rows g + 8
        return list(bits(tile).view(4, 2, 8, 4, 8).permute(1, 4, 0, 2, 3).reshape(16, 128))

    empty = [torch.zeros(128, dtype=torch.int32)] * (16 * outputs)
    results = execute(text, empty + [r for tile in tiles for r in registers(tile)])
    out = torch.stack([results[f"${n}"] for n in range(16 * outputs)]).view(outputs, 2, 8, 4, 8, 4)
    return [f32(x.contiguous()).view(4, 16, 32) for x in out.permute(0, 3, 1, 4, 5, 2)]


def elementwise_n16(text, tiles):
    """Execute PTX with float32 tiles [64, 16] in the layout common.ACC_N16; return its output."""

    def registers(tile):  # [w, row bit 3, g, column bit 3, c, p] -> 4 h + 2 r + p
        return list(bits(tile).view(4, 2, 8, 2, 4, 2).permute(3, 1, 5, 0, 2, 4).reshape(8, 128))

    results = execute(text, [torch.zeros(128, dtype=torch.int32)] * 8 + [r for tile in tiles for r in registers(tile)])
    out = torch.stack([results[f"${n}"] for n in range(8)]).view(2, 2, 2, 4, 8, 4)
    return f32(out.permute(3, 1, 4, 0, 5, 2).contiguous()).view(64, 16)

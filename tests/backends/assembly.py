"""Search SASS for three bugs of ptxas that small tests may not reveal (docs/compiler-bugs.md), and count its waits."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LOW = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);\s*/\* 0x[0-9a-f]{16} \*/")
_HIGH = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/")
_STORES = {"ST", "STS", "STG", "STL", "STSM"}
_NO_REGISTER = _STORES | {
    "RED", "BAR", "BRA", "SYNCS", "ARRIVES", "MEMBAR", "WARPSYNC", "LDGSTS", "CCTL", "R2UR", "R2P", "ISETP", "FSETP",
    "PLOP3", "HSETP2", "VOTE",
}  # fmt: skip


def disassemble(cubin: bytes) -> str:
    """Disassemble a cubin, with the encoding of each instruction, by the nvdisasm in Triton's package."""
    import triton

    nvdisasm = Path(triton.__path__[0]) / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run([nvdisasm, "-c", "-hex", file.name], capture_output=True, text=True, check=True)
    return result.stdout


def wrong_descriptor_addresses(text: str) -> list[str]:
    """Find 64-bit additions whose high half (UIADD3.X) reads the register of the low half, where it must read zero."""
    low: dict[str, str] = {}  # by carry predicate: the register of the low half, until it is overwritten
    faults = []
    for line in text.splitlines():
        if (m := re.search(r"UIADD3\.X UR\d+, (UR\d+), .*?, URZ, (UP\d)", line)) and low.get(m[2]) == m[1]:
            faults.append(line.strip())
        if m := re.search(r"\s(?:U\w+|R2UR|S2UR)(?:\.\w+)* (?:UP\d, )?(UR\d+)", line):
            wide = ".64" in line or ".128" in line
            changed = {m[1], f"UR{int(m[1][2:]) + 1}"} if wide else {m[1]}
            low = {predicate: register for predicate, register in low.items() if register not in changed}
        if m := re.search(r"UIADD3 UR\d+, (UP\d), (UR\d+), ", line):
            low[m[1]] = m[2]
    return faults


def missing_waits(text: str) -> list[str]:
    """Find instructions that read a variable-latency result (of a load, exp2, ...) without a wait for it.

    Each such instruction increments one of six scoreboards; the first use of its result must wait until that scoreboard
    is 0. Branches are not followed: the search restarts after an unconditional branch.
    """
    pending: dict[int, tuple[int, int, str]] = {}  # by register: scoreboard, position, instruction
    faults = []
    for position, (instruction, scoreboard, waits) in enumerate(_instructions(text)):
        pending = {register: p for register, p in pending.items() if p[0] not in waits}
        if m := re.match(r"DEPBAR\.LE SB(\d), (0x[0-9a-f]+)", instruction):  # waits for all but the last few
            positions = sorted({p[1] for p in pending.values() if p[0] == int(m[1])})
            left = set(positions[len(positions) - int(m[2], 16) :])
            pending = {register: p for register, p in pending.items() if p[0] != int(m[1]) or p[1] in left}
        written, read = _registers(instruction)
        faults += [f"{instruction} does not wait for {pending[r][2]}" for r in sorted(read) if r in pending]
        pending = {register: p for register, p in pending.items() if register not in written}
        if scoreboard != 7:
            pending |= dict.fromkeys(written, (scoreboard, position, instruction))
        if re.match(r"(BRA|EXIT|RET)\b", instruction):
            pending = {}
    return faults


def overwritten_operands(text: str) -> list[str]:
    """Find instructions that write to a register of a wgmma's A operand before the wait for that wgmma.

    A wgmma reads its registers asynchronously. Branches are not followed: the search restarts after an unconditional
    branch.
    """
    groups: list[dict[int, str]] = []  # committed groups of wgmmas, the oldest first: their A registers
    current: dict[int, str] = {}
    faults = []
    for instruction, _, _ in _instructions(text):
        if "HGMMA" in instruction:
            if m := re.search(r"HGMMA\S* R\d+, R(\d+)", instruction):
                current |= {int(m[1]) + n: instruction for n in range(4)}
            if "gsb0" in instruction:
                groups, current = [*groups, current], {}
        elif m := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", instruction):  # all but the last few
            groups = groups[max(0, len(groups) - int(m[1], 16)) :]
        else:
            written, _ = _registers(instruction)
            faults += [
                f"{instruction} overwrites {group[r]}"
                for group in (*groups, current)
                for r in sorted(written & group.keys())
            ]
        if re.match(r"(BRA|EXIT|RET)\b", instruction):
            groups, current = [], {}
    return faults


def load_waits(text: str) -> int:
    """Count the waits for loads from global memory, each for loads issued since the one before.

    Counted from the last wait for the preceding kernel on, in the order of the text. A kernel that issues all loads
    before it uses one waits once, for the latency of the memory.
    """
    waits, pending = 0, set()
    for instruction, scoreboard, awaited in _instructions(text):
        if awaited & pending:
            waits, pending = waits + 1, set()
        if instruction == "ACQBULK":
            waits, pending = 0, set()
        if re.match(r"(@!?U?P\w+ )?LDG\.", instruction):
            pending.add(scoreboard)
    return waits


def _instructions(text: str) -> Iterator[tuple[str, int, set[int]]]:
    """Each instruction, the scoreboard of its result (7: none), and the scoreboards that it waits for."""
    low = None
    for line in text.splitlines():
        if m := _LOW.match(line):
            low = m[2].strip()
        elif low is not None and (m := _HIGH.match(line)):
            control = int(m[1], 16) >> 41
            yield low, control >> 5 & 7, {scoreboard for scoreboard in range(6) if control >> 11 + scoreboard & 1}
            low = None


def _registers(instruction: str) -> tuple[set[int], set[int]]:
    """The registers that an instruction writes and reads; none for wgmma, which has its own waits."""
    name, _, rest = re.sub(r"^@!?U?P\w+\s+", "", instruction).replace(".reuse", "").partition(" ")
    kind = name.split(".")[0]
    if kind == "HGMMA":
        return set(), set()
    pairs = ".64" in name or ".WIDE" in name or name.endswith(".M88.2")
    width = 4 if ".128" in name or name.endswith(".M88.4") else 2 if pairs else 1
    arguments = [argument.strip() for argument in rest.split(",")]
    while arguments and re.fullmatch(r"!?U?P\w", arguments[0]):
        arguments.pop(0)
    written: set[int] = set()
    if arguments and kind not in _NO_REGISTER and (m := re.fullmatch(r"R(\d+)", arguments[0])):
        written = {int(m[1]) + n for n in range(width)}
        arguments.pop(0)
    read: set[int] = set()
    for argument in arguments:
        is_stored_value = kind in _STORES and "[" not in argument
        for number, pair in re.findall(r"\bR(\d+)(\.64)?(?!\d)", argument):
            read |= {int(number) + n for n in range(width if is_stored_value else 2 if pair else 1)}
    return written, read

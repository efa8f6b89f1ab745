"""Two faults of ptxas 12.8.93 that no result of a small test need show, looked for in what it made of a kernel.

docs/notes/triton-kernels/NOTES.md tells of both: "Miscarried" and "Forgotten waits".
"""

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
    """The text of a cubin, each instruction with its bits, by the nvdisasm that comes with Triton."""
    import triton

    nvdisasm = Path(triton.__path__[0]) / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([nvdisasm, "-c", "-hex", file.name], capture_output=True, text=True, check=True)
    return done.stdout


def miscarried(text: str) -> list[str]:
    """Where the high half of a 64-bit sum takes the low half's register in place of its own."""
    low: dict[str, str] = {}  # by predicate: the register that the carry comes from, as long as it holds the same
    found = []
    for line in text.splitlines():
        if (m := re.search(r"UIADD3\.X UR\d+, (UR\d+), .*?, URZ, (UP\d)", line)) and low.get(m[2]) == m[1]:
            found.append(line.strip())
        if m := re.search(r"\s(?:U\w+|R2UR|S2UR)(?:\.\w+)* (?:UP\d, )?(UR\d+)", line):
            wide = ".64" in line or ".128" in line
            changed = {m[1], f"UR{int(m[1][2:]) + 1}"} if wide else {m[1]}
            low = {predicate: register for predicate, register in low.items() if register not in changed}
        if m := re.search(r"UIADD3 UR\d+, (UP\d), (UR\d+), ", line):
            low[m[1]] = m[2]
    return found


def forgotten(text: str) -> list[str]:
    """Where a result that takes no fixed time (of a load, exp2, ...) is used with no wait for it in between.

    Each such instruction has one of six counters, and the first that uses its result must wait until that counter is 0.
    Branches are not followed: what comes after one that is always taken starts anew.
    """
    pending: dict[int, tuple[int, int, str]] = {}  # by register: the counter, the place, the instruction
    found = []
    for place, (instruction, counter, awaited) in enumerate(_instructions(text)):
        pending = {register: p for register, p in pending.items() if p[0] not in awaited}
        if m := re.match(r"DEPBAR\.LE SB(\d), (0x[0-9a-f]+)", instruction):  # all but the last few of a counter
            places = sorted({p[1] for p in pending.values() if p[0] == int(m[1])})
            left = set(places[len(places) - int(m[2], 16) :])
            pending = {register: p for register, p in pending.items() if p[0] != int(m[1]) or p[1] in left}
        written, read = _registers(instruction)
        found += [f"{instruction} does not wait for {pending[r][2]}" for r in sorted(read) if r in pending]
        pending = {register: p for register, p in pending.items() if register not in written}
        if counter != 7:
            pending |= dict.fromkeys(written, (counter, place, instruction))
        if re.match(r"(BRA|EXIT|RET)\b", instruction):
            pending = {}
    return found


def _instructions(text: str) -> Iterator[tuple[str, int, set[int]]]:
    """Each instruction, the counter that its result sets (7: none), and those it waits for."""
    low = None
    for line in text.splitlines():
        if m := _LOW.match(line):
            low = m[2].strip()
        elif low is not None and (m := _HIGH.match(line)):
            control = int(m[1], 16) >> 41
            yield low, control >> 5 & 7, {counter for counter in range(6) if control >> 11 + counter & 1}
            low = None


def _registers(instruction: str) -> tuple[set[int], set[int]]:
    """What an instruction writes and reads; nothing of products, which have waits of their own."""
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
        stored = kind in _STORES and "[" not in argument
        for number, pair in re.findall(r"\bR(\d+)(\.64)?(?!\d)", argument):
            read |= {int(number) + n for n in range(width if stored else 2 if pair else 1)}
    return written, read

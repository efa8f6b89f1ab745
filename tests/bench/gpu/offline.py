"""Compile the kernels for sm_90 without a GPU; report registers, spills, shared memory and known faults of ptxas.

From the repository's root, with torch and Triton installed:
    python tests/bench/gpu/offline.py all [WORD]...      every plan of the grid below whose name has the words;
                                                         prints kernels that spill, fail or have a fault
    python tests/bench/gpu/offline.py [WORD]...          the plans of K = V = 128, every kernel
    DUMP=FOLDER writes TTGIR, PTX and cubin of each kernel.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "backends"))

import torch
import triton
from assembly import disassemble, missing_waits, overwritten_operands, wrong_descriptor_addresses
from compiling import Compiler, launch_update
from triton.backends.nvidia.compiler import get_ptxas

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.chunk.registry import saves_16_bits
from deltazoo.backends.triton.problem import Problem

OPTIONS = ("--regAllocOptLevel=2",) if triton.__version__ >= "3.8" else ()  # of ptxas, as Triton sets them
WIDTHS = (
    (16, 16), (32, 32), (32, 64), (64, 16), (64, 64), (64, 128), (72, 104), (104, 40), (128, 32), (128, 64), (128, 128),
    (128, 256), (192, 384), (200, 400), (256, 256),
)  # fmt: skip
DEVICES = {
    "hopper": DeviceSpec("a small Hopper GPU", "cuda", (9, 0), 4, 232448),
    "portable": DeviceSpec("a small GPU", "cuda", (8, 0), 4, 232448),
}
SEARCHES = (wrong_descriptor_addresses, missing_waits, overwritten_operands)
MAX_SPILL = 600  # bytes of spill stores


def problems(every: bool) -> Iterator[tuple[str, str, Problem, bool]]:
    """Names, devices, problems, and whether erase and read come before the decay and the update."""
    widths = WIDTHS if every else [(128, 128)]
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if every else (torch.bfloat16,)
    flags = (False, True)
    for device, dtype, (K, V), delta, erase_key, split_terms, packed, groups, decay, before, T in product(
        DEVICES, dtypes, widths, (True, False), flags, flags, flags, (1, 2), ("head", "none"), flags, (200, 4200)
    ):
        if (erase_key or split_terms) and not delta:
            continue
        if (split_terms and dtype != torch.bfloat16) or (erase_key and dtype == torch.bfloat16 and not split_terms):
            continue
        if (packed or groups > 1 or decay == "none" or before) and (K, V) not in ((16, 16), (128, 128)):
            continue
        N, H = (2, 2) if T == 200 else (1, 1)
        problem = Problem(dtype, N, T, H, H * groups, K, V, delta, erase_key, decay, packed, split_terms)
        problem = problem._replace(saves_16_bits=saves_16_bits(problem, DEVICES[device]))
        traits = [name for name in ("erase_key", "packed", "split_terms") if getattr(problem, name)]
        words = [device, str(dtype)[6:], f"K={K} V={V}", "delta" if delta else "additive", decay, f"groups={groups}"]
        words += traits + (["before"] if before else []) + (["segments"] if T > 200 else [])
        yield " ".join(words), device, problem, before


def compile_problem(device: DeviceSpec, problem: Problem, before: bool) -> list[tuple[str, object]]:
    """Compile what a forward and a backward pass launch."""
    compiler = Compiler(all=True)
    launch_update(problem, device._replace(processors=132) if problem.T > 200 else device, compiler, before)
    return compiler.compiled


def report(kernel: object) -> dict[str, object]:
    """Registers, bytes of spills and shared memory, instructions, faults, and ptxas's warnings."""
    asm = kernel.asm
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", *OPTIONS, "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True).stderr
    sass = disassemble(asm["cubin"])
    info = {
        "registers": int(re.search(r"Used (\d+) registers", log).group(1)),
        "spill": int(re.search(r"(\d+) bytes spill stores", log).group(1)),
        "shared": kernel.metadata.shared,
        "wgmma": asm["ptx"].count("wgmma.mma_async"),
        "mma": asm["ptx"].count("mma.sync"),
        "barriers": asm["ptx"].count("bar.sync"),
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.MULTILINE)),
        "faults": sum(
            len(search(sass)) for search in (wrong_descriptor_addresses, missing_waits, overwritten_operands)
        ),
    }
    warnings = [line for line in log.splitlines() if "C75" in line or "erialized" in line]
    return info | ({"warnings": warnings[:2]} if warnings else {})


def main(words: list[str]) -> None:
    every = words[:1] == ["all"]
    for name, device, problem, before in problems(every):
        if not all(word in name for word in words[every:]):
            continue
        try:
            kernels = compile_problem(DEVICES[device], problem, before)
        except Exception as error:
            print(f"{name}: {str(error)[-300:]}", flush=True)
            continue
        for n, (kernel_name, kernel) in enumerate(kernels):
            info = report(kernel)
            if not every or info["spill"] > MAX_SPILL or info["faults"] or "warnings" in info:
                print(f"{name}: {kernel_name}", *(f"{key} {value}" for key, value in info.items()), flush=True)
            if folder := os.environ.get("DUMP"):
                path = Path(folder) / f"{name} {n} {kernel_name}".replace(" ", "_")
                for kind in ("ttgir", "ptx"):
                    path.with_suffix(f".{kind}").write_text(kernel.asm[kind])
                path.with_suffix(".cubin").write_bytes(kernel.asm["cubin"])


if __name__ == "__main__":
    main(sys.argv[1:])

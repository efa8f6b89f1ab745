"""Print the kernels of the decode step of mixers without a GPU: python step_waits.py [MIXER...]

Layers of width 2048 with default fields, bf16, 64 rows with 576 slots, compiled for sm_90. Columns: kernel, threads,
bytes of shared memory, and waits for loads (`load_waits` in tests/backends/assembly.py). A step of RWKV-6 on an H200
became 2.6 us shorter when `ddlerp_kernel` waited twice in place of ten times.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "backends"))

from assembly import disassemble, load_waits
from compiling import compile_step

from deltazoo.backends.update import registry
from deltazoo.mixers.core.config import parse


def main() -> None:
    for name in sys.argv[1:] or registry.names(registry.MIXERS):
        for kernel, compiled in compile_step(parse({"mixer": name}), width=2048, rows=64, slots=576):
            waits, metadata = load_waits(disassemble(compiled.asm["cubin"])), compiled.metadata
            print(f"{name}  {kernel}  {32 * metadata.num_warps}  {metadata.shared}  {waits}", flush=True)


if __name__ == "__main__":
    main()

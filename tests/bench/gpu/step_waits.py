"""Print the kernels of the decode step of mixers without a GPU: python step_waits.py [MIXER...]

Layers of width 2048 with default fields, bf16, 64 rows with 576 slots, compiled for sm_90. Columns: kernel, threads,
bytes of shared memory, and waits for loads (`load_waits` in tests/backends/assembly.py). A step of RWKV-6 on an H200
became 2.6 us shorter when `ddlerp_kernel` waited twice in place of ten times.
"""

import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2] / "backends"))

import torch
from assembly import disassemble, load_waits
from compiling import Compiler

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.runtime.simulation import simulated_launches
from deltazoo.backends.update import registry
from deltazoo.mixers.core.config import parse

LAUNCHERS = ("runtime.launcher", "decode.launch")


def main() -> None:
    for name in sys.argv[1:] or registry.names(registry.MIXERS):
        compiler = Compiler(all=True)
        with torch.device("meta"):
            mixer = parse({"mixer": name}).build(2048).to(torch.bfloat16)
            x = torch.empty(64, 1, 2048, dtype=torch.bfloat16)
        runtime, decode = (patch(f"deltazoo.backends.triton.{module}.launcher", compiler) for module in LAUNCHERS)
        with runtime, decode, torch.no_grad(), simulated_launches(DeviceSpec.named("NVIDIA H200")):
            mixer(x, mixer.init_state(64, 576))
        for kernel, compiled in compiler.compiled:
            waits, metadata = load_waits(disassemble(compiled.asm["cubin"])), compiled.metadata
            print(f"{name}  {kernel}  {32 * metadata.num_warps}  {metadata.shared}  {waits}", flush=True)


if __name__ == "__main__":
    main()

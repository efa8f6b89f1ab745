"""The kernels of single tokens compile offline for sm_90, without spills and known bugs of ptxas."""

import sys

import pytest
import torch
from assembly import disassemble, missing_waits, overwritten_operands, wrong_descriptor_addresses
from compiling import Compiler

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.runtime.simulation import simulated_launches
from deltazoo.mixers.core.config import parse

pytest.importorskip("triton", reason="the kernels need the package triton")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(sys.platform != "linux", reason="Triton ships its NVIDIA compiler for Linux only"),
]
KERNELS = {
    "complex_step_kernel", "normalised_step_kernel", "rg_lru_step_kernel", "rotating_step_kernel",
    "selective_step_kernel", "slots_step_kernel", "tempered_step_kernel", "wkv_step_kernel",
}  # fmt: skip

NAMES = (
    "lru", "hgrn", "rwkv4", "rg_lru", "h3", "s4d", "mamba", "mlstm", "gated_rfa", "linear_attention", "abc", "rodimus",
)  # fmt: skip
MIXERS = [(name, 2048) for name in NAMES] + [("s5", 4096), ("hgrn", 4096)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "width"), MIXERS)
def test_the_kernel_of_a_token_compiles(name, width, dtype, monkeypatch):
    compiler = Compiler(all=True)
    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher.launcher", compiler)
    with torch.device("meta"):
        mixer = parse({"mixer": name}).build(width).to(dtype)
        x = torch.empty(2, 1, width, dtype=dtype)
    with torch.no_grad(), simulated_launches(DeviceSpec.named("NVIDIA H200")):
        mixer(x, mixer.init_state(2))
    compiled = [(kernel_name, kernel) for kernel_name, kernel in compiler.compiled if kernel_name in KERNELS]
    assert len(compiled) == 1
    for kernel_name, kernel in compiled:
        sass = disassemble(kernel.asm["cubin"])
        assert "STL" not in sass, kernel_name  # a spill
        for problems in (missing_waits, overwritten_operands, wrong_descriptor_addresses):
            assert not problems(sass), kernel_name

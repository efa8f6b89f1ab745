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
    "complex_step_kernel", "ddlerp_down_kernel", "ddlerp_kernel", "rg_lru_step_kernel", "rotating_step_kernel",
    "rwkv_low_rank_kernel", "rwkv_step_kernel", "wkv_step_kernel",
}  # fmt: skip
MIXERS = [(name, 2048) for name in ("lru", "hgrn", "rwkv4", "rg_lru", "h3", "s4d")] + [("s5", 4096), ("hgrn", 4096)]
RWKV_KERNELS = {"rwkv6": ["ddlerp_down_kernel", "ddlerp_kernel"], "rwkv7": ["rwkv_low_rank_kernel"]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "width"), MIXERS)
def test_the_kernel_of_a_token_compiles(name, width, dtype, monkeypatch):
    assert len(compile_step(name, width, 2, dtype, monkeypatch)) == 1


@pytest.mark.parametrize(("rows", "dtype"), [(2, torch.float32), (1, torch.bfloat16), (64, torch.bfloat16)])
@pytest.mark.parametrize("name", RWKV_KERNELS)
def test_the_kernels_of_a_token_of_rwkv_compile(name, rows, dtype, monkeypatch):
    before = [] if name == "rwkv7" and rows == 1 else RWKV_KERNELS[name]
    assert compile_step(name, 2048, rows, dtype, monkeypatch) == [*before, "rwkv_step_kernel"]


def compile_step(name: str, width: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compile the kernels of a token of a mixer, check those of `KERNELS`, and return their names."""
    compiler = Compiler(all=True)
    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher.launcher", compiler)
    with torch.device("meta"):
        mixer = parse({"mixer": name}).build(width).to(dtype)
        x = torch.empty(rows, 1, width, dtype=dtype)
    with torch.no_grad(), simulated_launches(DeviceSpec.named("NVIDIA H200")):
        mixer(x, mixer.init_state(rows))
    compiled = [(kernel_name, kernel) for kernel_name, kernel in compiler.compiled if kernel_name in KERNELS]
    for kernel_name, kernel in compiled:
        sass = disassemble(kernel.asm["cubin"])
        assert "STL" not in sass, kernel_name  # a spill
        for problems in (missing_waits, overwritten_operands, wrong_descriptor_addresses):
            assert not problems(sass), kernel_name
    return [kernel_name for kernel_name, _ in compiled]

"""The kernels of single tokens compile offline for sm_90, without spills and known bugs of ptxas."""

import sys
from typing import Any

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
KERNELS = {"complex_step_kernel", "rg_lru_step_kernel", "rotating_step_kernel", "wkv_step_kernel"}
KERNELS |= {"implicit_filter_kernel", "long_conv_step_kernel", "slot_step_kernel"}

MIXERS = [(name, 2048) for name in ("lru", "hgrn", "rwkv4", "rg_lru", "h3", "s4d", "hyena", "raven")]
MIXERS += [("s5", 4096), ("hgrn", 4096)]


def check_assembly(name: str, kernel: Any) -> None:
    sass = disassemble(kernel.asm["cubin"])
    assert "STL" not in sass, name  # a spill
    for problems in (missing_waits, overwritten_operands, wrong_descriptor_addresses):
        assert not problems(sass), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "width"), MIXERS)
def test_the_kernel_of_a_token_compiles(name, width, dtype, monkeypatch):
    compiler = Compiler(all=True)
    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher.launcher", compiler)
    with torch.device("meta"):
        mixer = parse({"mixer": name}).build(width).to(dtype)
        x = torch.empty(2, 1, width, dtype=dtype)
    with torch.no_grad(), simulated_launches(DeviceSpec.named("NVIDIA H200")):
        mixer(x, mixer.init_state(2, 576))
    compiled = [(kernel_name, kernel) for kernel_name, kernel in compiler.compiled if kernel_name in KERNELS]
    assert len(compiled) == (2 if name == "hyena" else 1)
    for kernel_name, kernel in compiled:
        check_assembly(kernel_name, kernel)


@pytest.mark.parametrize(
    ("rows", "slots", "dtype"),
    [(64, 577, torch.bfloat16), (16, 4096, torch.bfloat16), (1, 32768, torch.bfloat16), (2, 4096, torch.float32)],
)
def test_the_kernels_of_a_token_of_latent_attention_compile(rows, slots, dtype, monkeypatch):
    compiler = Compiler(all=True)
    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher.launcher", compiler)
    with torch.device("meta"):
        mixer, x = parse({"mixer": "mla"}).build(2048).to(dtype), torch.empty(rows, 1, 2048, dtype=dtype)
    with torch.no_grad(), simulated_launches(DeviceSpec.named("NVIDIA H200")):
        mixer(x, mixer.init_state(rows, slots))
    compiled = {name: kernel for name, kernel in compiler.compiled if name.startswith("latent")}
    assert list(compiled) == ["latent_token_kernel", "latent_attention_kernel", "latent_output_kernel"]
    for name, kernel in compiled.items():
        if dtype != torch.float32 or name != "latent_attention_kernel":  # it spills in float32
            check_assembly(name, kernel)

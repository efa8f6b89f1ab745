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
# Besides those of products.
KERNELS: dict[str, tuple[str, ...]] = {
    "abc": ("softmax_slots_step_kernel",),
    "gated_rfa": ("normalised_step_kernel",),
    "h3": ("complex_step_kernel",),
    "hgrn": ("rotating_step_kernel",),
    "hyena": ("implicit_filter_kernel", "long_conv_step_kernel"),
    "linear_attention": ("normalised_step_kernel",),
    "lru": ("rotating_step_kernel",),
    "mamba": ("selective_step_kernel",),
    "mla": ("latent_token_kernel", "latent_attention_kernel", "latent_output_kernel"),
    "mlstm": ("normalised_step_kernel",),
    "raven": ("routed_slots_step_kernel",),
    "rg_lru": ("rg_lru_step_kernel",),
    "rodimus": ("tempered_step_kernel",),
    "rwkv4": ("wkv_step_kernel",),
    "rwkv6": ("ddlerp_down_kernel", "ddlerp_kernel", "rwkv_step_kernel"),
    "rwkv7": ("rwkv_low_rank_kernel", "rwkv_step_kernel"),
    "s4d": ("complex_step_kernel",),
    "s5": ("rotating_step_kernel",),
}
IN_16_BITS = {"latent_attention_kernel": "latent_attention_sm90_kernel"}
ALL = {kernel for kernels in KERNELS.values() for kernel in kernels} | {*IN_16_BITS.values()}
WIDTHS = [(name, 4096 if name == "s5" else 2048) for name in KERNELS]
LARGE = [
    ("rwkv6", 1, 576),
    ("rwkv6", 64, 576),
    ("rwkv7", 64, 576),
    ("mla", 64, 577),
    ("mla", 16, 4096),
    ("mla", 1, 32768),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "width"), [*WIDTHS, ("hgrn", 4096)])
def test_the_kernels_of_a_token_compile(name, width, dtype, monkeypatch):
    check_step(name, width, 2, 576, dtype, monkeypatch)


@pytest.mark.parametrize(("name", "rows", "slots"), LARGE)
def test_the_kernels_of_a_token_compile_for_many_rows_and_slots(name, rows, slots, monkeypatch):
    check_step(name, 2048, rows, slots, torch.bfloat16, monkeypatch)


def check_step(name, width, rows, slots, dtype, monkeypatch):
    compiler = Compiler(all=True)
    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher.launcher", compiler)
    with torch.device("meta"):
        mixer = parse({"mixer": name}).build(width).to(dtype)
        x = torch.empty(rows, 1, width, dtype=dtype)
    with torch.no_grad(), simulated_launches(DeviceSpec.named("NVIDIA H200")):
        mixer(x, mixer.init_state(rows, slots))
    compiled = [(kernel_name, kernel) for kernel_name, kernel in compiler.compiled if kernel_name in ALL]
    expected = [kernel if dtype == torch.float32 else IN_16_BITS.get(kernel, kernel) for kernel in KERNELS[name]]
    assert [kernel_name for kernel_name, _ in compiled] == expected
    for kernel_name, kernel in compiled:
        sass = disassemble(kernel.asm["cubin"])
        if dtype != torch.float32 or kernel_name != "latent_attention_kernel":  # it spills in float32
            assert "STL" not in sass, kernel_name
        for problems in (missing_waits, overwritten_operands, wrong_descriptor_addresses):
            assert not problems(sass), kernel_name

"""The kernels of single tokens compile offline for sm_90, without spills and known bugs of ptxas."""

import sys

import pytest
import torch
from assembly import disassemble, load_waits, missing_waits, overwritten_operands, wrong_descriptor_addresses
from compiling import compile_kernel, compile_step

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.element import selective_op
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
    "based": ("normalised_step_kernel",),
    "gated_rfa": ("normalised_step_kernel",),
    "h3": ("complex_step_kernel",),
    "hgrn": ("rotating_step_kernel",),
    "hyena": ("implicit_filter_kernel", "long_conv_step_kernel"),
    "linear_attention": ("normalised_step_kernel",),
    "lru": ("rotating_step_kernel",),
    "mamba": ("selective_step_kernel",),
    "mla": ("latent_token_kernel", "latent_attention_kernel", "latent_output_kernel"),
    "mlstm": ("normalised_step_kernel",),
    "path_attention": ("path_decode_kernel", "path_combine_kernel", "path_count_kernel"),
    "preconditioned_deltanet": ("preconditioned_operands_kernel", "decode_kernel", "finish_step_kernel"),
    "preconditioned_kda": ("preconditioned_operands_kernel", "decode_kernel", "finish_step_kernel"),
    "raven": ("routed_slots_step_kernel",),
    "rebased": ("normalised_step_kernel",),
    "rg_lru": ("rg_lru_step_kernel",),
    "rodimus": ("tempered_step_kernel",),
    "rwkv4": ("wkv_step_kernel",),
    "rwkv6": ("ddlerp_down_kernel", "ddlerp_kernel", "rwkv_step_kernel"),
    "rwkv7": ("rwkv_low_rank_kernel", "rwkv_step_kernel"),
    "s4d": ("complex_step_kernel",),
    "s5": ("rotating_step_kernel",),
    "ttt_linear": ("ttt_token_kernel", "ttt_output_kernel"),
}
IN_16_BITS = {"latent_attention_kernel": "latent_attention_sm90_kernel"}
ALL = {kernel for kernels in KERNELS.values() for kernel in kernels} | {*IN_16_BITS.values()}
# Most waits for loads, in 16 bits and width 2048, of kernels that issue them together; they had 10, 5 and 4.
WAITS = {"ddlerp_kernel": 2, "rotating_step_kernel": 3, "wkv_step_kernel": 2}
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
def test_the_kernels_of_a_token_compile(name, width, dtype):
    check_step(name, width, 2, 576, dtype)


@pytest.mark.parametrize(("name", "rows", "slots"), LARGE)
def test_the_kernels_of_a_token_compile_for_many_rows_and_slots(name, rows, slots):
    check_step(name, 2048, rows, slots, torch.bfloat16)


@pytest.mark.parametrize(
    ("fields", "kernel"),
    [
        ({"rotary_width": 32}, "latent_attention_kernel"),
        ({"rotary_width": 128, "latent_width": 256}, "latent_attention_sm90_kernel"),
        ({"rotary_width": 0, "rotary_theta": None}, "latent_attention_kernel"),
    ],
)
def test_other_rotary_widths_of_mla_compile(fields, kernel):
    expected = ("latent_token_kernel", kernel, "latent_output_kernel")
    check_step("mla", 2048, 2, 576, torch.bfloat16, fields, expected)


@pytest.mark.parametrize("fields", [{}, {"heads": 16, "key_value_heads": 8, "forget_gate": True}])
def test_path_attention_compiles_for_many_rows(fields):
    expected = ("path_decode_kernel", "path_count_kernel")
    check_step("path_attention", 2048, 64, 576, torch.bfloat16, fields, expected)


@pytest.mark.parametrize("architecture", [80, 86, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("C", "N", "R"), [(4096, 16, 128), (4096, 64, 128), (16384, 16, 512)])
def test_tiles_of_selective_steps_fit_the_shared_memory(C, N, R, dtype, architecture, monkeypatch):
    compiled = []

    def launcher(*arguments):
        compiled.append(compile_kernel(*arguments, architecture=architecture))
        return lambda *_: None

    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher.launcher", launcher)
    shapes = ((64, C), (64, R + 2 * N), (64, C), (C, R), (C,), (C, N), (C,))
    tensors = [torch.empty(*shape, dtype=dtype, device="meta") for shape in shapes]
    available = {80: 166912, 86: 101376, 90: 232448}[architecture]
    with simulated_launches(DeviceSpec("a GPU", "cuda", divmod(architecture, 10), 132, available)):
        selective_op._step(*tensors, torch.empty(64, C, N, device="meta"))
    assert compiled[0].metadata.shared <= available


def check_step(name, width, rows, slots, dtype, fields=None, kernels=()):
    config = parse({"mixer": name, **(fields or {})})
    compiled = [(kernel, x) for kernel, x in compile_step(config, width, rows, slots, dtype) if kernel in ALL]
    expected = [kernel if dtype == torch.float32 else IN_16_BITS.get(kernel, kernel) for kernel in KERNELS[name]]
    assert [kernel_name for kernel_name, _ in compiled] == (list(kernels) or expected)
    for kernel_name, kernel in compiled:
        sass = disassemble(kernel.asm["cubin"])
        if dtype != torch.float32 or kernel_name != "latent_attention_kernel":  # it spills in float32
            assert "STL" not in sass, kernel_name
        if dtype == torch.bfloat16 and width == 2048:
            assert load_waits(sass) <= WAITS.get(kernel_name, 100), kernel_name
        for problems in (missing_waits, overwritten_operands, wrong_descriptor_addresses):
            assert not problems(sass), kernel_name

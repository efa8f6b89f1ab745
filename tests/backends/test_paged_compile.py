"""The kernels of attention over pages compile offline for sm_90, without spills and known bugs of ptxas."""

import sys

import pytest
import torch
from assembly import disassemble, missing_waits, overwritten_operands, wrong_descriptor_addresses
from compiling import Compiler

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.attention import paged_op, token_op

pytest.importorskip("triton", reason="the kernels need the package triton")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(sys.platform != "linux", reason="Triton ships its NVIDIA compiler for Linux only"),
]

H200 = DeviceSpec("NVIDIA H200", "cuda", (9, 0), 132, 232448, "3.7.1")
SLOTS, PAGES = 64, 40


@pytest.fixture
def compiler(monkeypatch) -> Compiler:
    from deltazoo.backends.triton.runtime import launcher

    compiler = Compiler(all=True)
    monkeypatch.setattr(launcher, "launcher", compiler)
    for module in (paged_op, token_op):
        monkeypatch.setattr(module, "device_spec", lambda index: H200)
    return compiler


def check(compiler: Compiler, names: list[str]) -> None:
    assert [name for name, _ in compiler.compiled] == names
    for name, kernel in compiler.compiled:
        sass = disassemble(kernel.asm["cubin"])
        assert "STL" not in sass, name  # a spill
        for problems in (missing_waits, overwritten_operands, wrong_descriptor_addresses):
            assert not problems(sass), name


def pages(G: int, widths: tuple[int, int], rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    k, v = (torch.empty(PAGES, SLOTS, G, width, dtype=dtype) for width in widths)
    return [k, v, torch.zeros(rows, 128, dtype=torch.int32)]


@pytest.mark.parametrize(
    ("H", "G", "E", "V", "rows", "T", "dtype"),
    [
        pytest.param(32, 32, 64, 64, 8, 2048, torch.bfloat16, id="pack"),
        pytest.param(32, 32, 72, 64, 8, 2048, torch.bfloat16, id="pack with forget gates"),
        pytest.param(32, 8, 128, 128, 8, 64, torch.bfloat16, id="short pack, grouped heads"),
        pytest.param(16, 2, 256, 256, 4, 512, torch.bfloat16, id="wide heads"),
        pytest.param(16, 16, 128, 128, 4, 3, torch.float32, id="drafts in float32"),
    ],
)
def test_the_kernels_of_new_tokens_compile(compiler, H, G, E, V, rows, T, dtype):
    packed = T > 4
    B = 1 if packed else rows
    q, k, v = (torch.empty(B, T, *size, dtype=dtype) for size in ((H, E), (G, E), (G, V)))
    cu = torch.zeros(rows + 1, dtype=torch.int32) if packed else None
    paged_op.attend_pages(q, k, v, *pages(G, (E, V), rows, dtype), torch.zeros(rows, dtype=torch.int64), None, cu, 0.1)
    names = ["store_pages_kernel", "paged_attention_kernel"]
    check(compiler, [*names, "combine_parts_kernel"] if len(compiler.compiled) == 3 else names)


@pytest.mark.parametrize(("H", "G", "E"), [(32, 32, 64), (32, 8, 128)])
def test_the_kernel_of_one_token_compiles(compiler, H, G, E):
    qkv, position = torch.empty(4, (H + 2 * G) * E, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
    k, v, table = pages(G, (E, E), 4, torch.bfloat16)
    token_op.attend_token(qkv, None, None, None, k, v, position, table, E // 2, 1e4, [], 0.0, 0.1)
    check(compiler, ["token_attention_kernel", "combine_token_kernel"])

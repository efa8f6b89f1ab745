"""The kernels of log-linear attention compile offline for sm_90, two fit on an SM, and show no known bug of ptxas."""

import sys

import pytest
import torch
from assembly import disassemble, missing_waits, overwritten_operands, wrong_descriptor_addresses
from compiling import Compiler

from deltazoo.backends.triton.levels.operands import _SHARED_MEMORY, LevelOperands

pytest.importorskip("triton", reason="the kernels need the package triton")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(sys.platform != "linux", reason="Triton ships its NVIDIA compiler for Linux only"),
]

TWO_PER_SM = 113 * 1024  # bytes of shared memory of a program


@pytest.mark.parametrize(("delta", "dtype"), [(False, torch.bfloat16), (True, torch.bfloat16), (False, torch.float32)])
def test_the_kernels_of_training_and_decoding_compile_and_fit(delta, dtype, monkeypatch):
    from deltazoo.backends.triton.levels import launch

    compiler = Compiler(all=True)
    monkeypatch.setattr(launch, "launcher", compiler)
    is_wide = dtype == torch.float32
    T, H, HV, K, V, L = 128, 2, 4 if delta else 32, 128 if is_wide else 96, 72, 15
    keys = [torch.empty(1, T, H, K, dtype=dtype) for _ in range(2)]
    strength = torch.empty(1, T, HV)
    v, weights = torch.empty(1, T, HV, V, dtype=dtype), torch.empty(1, T, HV, L)
    x = LevelOperands(*keys, v, strength, strength if delta else None, weights)
    sizes = launch.FLOAT32 if is_wide else launch.LAUNCH._replace(stages=1)
    launch.forward(x, sizes)
    launch.backward(x, torch.empty_like(v), None, sizes)
    token = LevelOperands(*(None if y is None else y[:, :1].contiguous() for y in x))
    seen = torch.empty(1, dtype=torch.int64)
    launch.step_(token, torch.empty(1, L - 1, HV, K, V), seen, seen)
    assert len(compiler.compiled) == 8
    for name, kernel in compiler.compiled:
        assert kernel.metadata.shared <= (_SHARED_MEMORY[4] if is_wide else TWO_PER_SM), name
        sass = disassemble(kernel.asm["cubin"])
        assert not wrong_descriptor_addresses(sass), name
        assert not missing_waits(sass), name
        assert not overwritten_operands(sass), name
